"""The round, written once: draft, score, accept, commit, observe. Nothing here knows the name of a method.

    decoder = Decoder(target, tokenizer)
    generation = decoder.submit(Request(prompt, method, max_new_tokens=64))
    decoder.run()
    print(generation.text)

Requests join and leave between rounds; whatever their methods, one target forward scores all of their trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.metrics import PHASES, Timed
from outpace.core.sampling import Sampler
from outpace.core.text import TextStream, Tokenizer
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.engine.request import Generation, Logprob, Request, Round, check_references
from outpace.targets.base import Scores, Sequence, Target
from outpace.targets.states import States

K = TypeVar("K")
Item = TypeVar("Item")


class Decoder:
    """Runs rounds over the active requests of one target."""

    def __init__(self, target: Target, tokenizer: Tokenizer | None = None) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.active: list[Generation] = []
        self._joining: list[Generation] = []

    def submit(self, request: Request) -> Generation:
        """Let a request join at the next round. Raises BadInput for a request that cannot be honoured."""
        if request.max_new_tokens < 1:
            raise BadInput(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        if request.stop_strings and self.tokenizer is None:
            raise BadInput("stop strings need a tokenizer; load the model with one, or use stop_ids")
        if "" in request.stop_strings:
            raise BadInput("an empty stop string would stop everything; leave it out")
        check_references(request.references)
        rule = request.method.rule_for(request.params)
        sequence = self.target.sequence(
            request.prompt,
            request.params,
            references=request.references,
            namespace=request.namespace,
            stop_ids=request.stop_ids,
        )
        if request.kept is not None:
            self._continue(sequence, request.kept, request.method.drafter.aux_hidden_state_layers)
        generation = Generation(
            request=request,
            sequence=sequence,
            rule=rule,
            rule_state=rule.begin(sequence),
            stream=TextStream(self.tokenizer, request.stop_strings) if self.tokenizer else None,
            started=perf_counter(),
        )
        generation.metrics.prompt_tokens = len(request.prompt)
        self._joining.append(generation)
        return generation

    def run(self) -> None:
        """Run rounds until no request is left."""
        while self.step():
            pass

    def stream(self, generation: Generation) -> Iterator[str]:
        """Run rounds until ``generation`` ends, yielding its text as it is released.

        Rounds serve every request: several streams may be read in any order.
        """
        if generation.finish_reason is None and generation not in [*self.active, *self._joining]:
            raise ValueError("this generation belongs to another decoder")
        while True:
            if piece := generation.take_text():
                yield piece
            if generation.finish_reason is not None:
                return
            self.step()

    def step(self) -> bool:
        """Let requests leave and join, then run one round over all. False when there is nothing left to do."""
        with self.target.round():
            self.admit()
            if not self.active:
                return False
            self.round(self.active)
            self._leave([one for one in self.active if one.finish_reason is not None])
            return bool(self.active or self._joining)

    def admit(self) -> None:
        """Let requests that ended leave, and those that were submitted join."""
        self._leave([one for one in self.active if one.finish_reason is not None])
        self._join()

    def rewind(self, moved: Seq[tuple[Generation, Seq[int]]]) -> None:
        """Let active requests go on from other tokens (prompt included): what these do not begin with is taken back."""
        for one, tokens in moved:
            sequence = one.sequence
            before, most = sequence.tokens, min(len(sequence.tokens), len(tokens))
            kept = next((at for at in range(sequence.prompt_length, most) if before[at] != tokens[at]), most)
            sequence.tokens[kept:] = tokens[kept:]
            one.tokens[:] = tokens[sequence.prompt_length :]
            if self.target.length(sequence.kv) > (rows := min(kept, len(tokens) - 1)):
                sequence.kv = self.target.truncate(sequence.kv, rows)
            if sequence.params.path_dependent:
                stops = sequence.sampler.stop_ids
                sequence.sampler = Sampler(sequence.params, one.request.prompt, self.target.vocab_size, stops)
                sequence.sampler.extend(one.tokens)
            one.rule_state = one.rule.begin(sequence)
            one.request.method.drafter.rewind(sequence, kept)
        self._prefill([one for one, _ in moved])

    def round(self, active: Seq[Generation]) -> None:
        """One round over some of the active requests."""
        began = perf_counter()
        split: list[dict[str, float]] = [{} for _ in active]
        trees = self._draft(active, split)

        with Timed(split, "score"):
            aux_hidden_state_layers = sorted(
                {layer for one in active for layer in one.request.method.drafter.aux_hidden_state_layers}
            )
            batch = [(one.sequence, tree) for one, tree in zip(active, trees, strict=True)]
            scores = self.target.score(
                batch, aux_hidden_state_layers=aux_hidden_state_layers, resume=self._reusable_forward(active)
            )

        verdicts = self._accept(active, scores, split)
        kept = [
            [] if verdict is None else one.take(self._tokens(tree, verdict), self.target.context_length)
            for one, tree, verdict in zip(active, trees, verdicts, strict=True)
        ]
        paths = [None if v is None else v.path[: len(tokens) - 1] for v, tokens in zip(verdicts, kept, strict=True)]
        self.target.commit(scores, paths)
        for one, scored, path in zip(active, scores.parts, paths, strict=True):
            if one.sequence.states is not None and path is not None:
                written = [0, *(1 + node for node in path)]
                one.sequence.states.add({layer: rows[written] for layer, rows in scored.hidden_states.items()})
        for one, tree, verdict, tokens in zip(active, trees, verdicts, kept, strict=True):
            if verdict is not None:
                one.sequence.tokens.extend(tokens)
                one.metrics.count_round(len(tree), min(len(verdict.path), len(tokens)), len(tokens))
                if one.request.trace:
                    one.rounds.append(Round(tree, verdict.path, tuple(tokens)))
        self._record_logprobs(active, scores, verdicts, kept)
        for one, tokens in zip(active, kept, strict=True):
            one.sequence.sampler.extend(tokens)  # last: the scores' distributions read the sampler as it was
        self._observe(active, scores, verdicts, split)
        self._close_books(active, split, began)

    @staticmethod
    def _tokens(tree: TokenTree, verdict: Verdict) -> list[int]:
        return [*(tree.tokens[node] for node in verdict.path), verdict.token]

    def _draft(self, active: Seq[Generation], split: list[dict[str, float]]) -> list[TokenTree]:
        trees = [TokenTree() for _ in active]
        budgets = [self._budget(one, len(active)) for one in active]
        drafting = [index for index, budget in enumerate(budgets) if budget.depth > 0]
        for drafter, members in grouped(drafting, lambda i: active[i].request.method.drafter):
            with Timed([split[i] for i in members], "draft"):
                proposed = drafter.propose([active[i].sequence for i in members], [budgets[i] for i in members])
            for index, tree in zip(members, proposed, strict=True):
                trees[index] = tree
        return trees

    @staticmethod
    def _reusable_forward(active: Seq[Generation]) -> Scores | None:
        """What a drafter that is alone in the batch has already run of this very forward."""
        drafters = {id(one.request.method.drafter): one.request.method.drafter for one in active}
        if len(drafters) > 1:
            return None
        [drafter] = drafters.values()
        return drafter.reusable_forward([one.sequence for one in active])

    def _budget(self, one: Generation, batch: int) -> Budget:
        # A path longer than the room left would be scored for nothing; depth is fixed before any draw is made.
        room = min(one.request.max_new_tokens - len(one.tokens), self.target.context_length - len(one.sequence.tokens))
        return one.request.method.controller.budget(one.metrics, batch, not one.request.params.greedy).limited(room - 1)

    def _accept(self, active: Seq[Generation], scores: Scores, split: list[dict[str, float]]) -> list[Verdict | None]:
        verdicts: list[Verdict | None] = [None] * len(active)

        def judge(rule: AcceptanceRule, members: Seq[int]) -> None:
            chances = [active[i].sequence.chance.at(len(active[i].sequence.tokens), "accept") for i in members]
            found = rule.accept([scores[i] for i in members], [active[i].rule_state for i in members], chances)
            for index, verdict in zip(members, found, strict=True):
                verdicts[index] = verdict

        for rule, members in grouped(range(len(active)), lambda i: active[i].rule):
            with Timed([split[i] for i in members], "accept"):
                try:
                    judge(rule, members)
                except (
                    OutpaceError
                ):  # a request that cannot go on (its grammar allows nothing) must not take others along
                    for index in members:
                        try:
                            judge(rule, [index])
                        except OutpaceError as error:
                            active[index].fail(error)
        return verdicts

    def _observe(
        self, active: Seq[Generation], scores: Scores, verdicts: Seq[Verdict | None], split: list[dict[str, float]]
    ) -> None:
        judged = {index: verdict for index, verdict in enumerate(verdicts) if verdict is not None}
        for drafter, members in grouped(judged, lambda i: active[i].request.method.drafter):
            with Timed([split[i] for i in members], "draft"):
                drafter.observe(
                    [active[i].sequence for i in members], [scores[i] for i in members], [judged[i] for i in members]
                )

    @staticmethod
    def _record_logprobs(
        active: Seq[Generation], scores: Scores, verdicts: Seq[Verdict | None], kept: Seq[Seq[int]]
    ) -> None:
        for index, (one, verdict) in enumerate(zip(active, verdicts, strict=True)):
            params = one.request.params
            if verdict is None or not params.logprobs:
                continue
            for node, token in zip((ROOT, *verdict.path), kept[index], strict=False):
                if token not in one.request.stop_ids:
                    value, top = scores[index].distribution.logprobs(node, token, params.top_logprobs)
                    one.logprobs.append(Logprob(token, value, tuple(top)))

    @staticmethod
    def _close_books(active: Seq[Generation], split: list[dict[str, float]], began: float) -> None:
        now = perf_counter()
        for one, phases in zip(active, split, strict=True):
            phases["other"] = now - began - sum(phases.values())
            for phase in PHASES:
                one.metrics.phase_seconds[phase] += phases.get(phase, 0.0)
            if one.tokens and not one.metrics.answered:
                one.metrics.answered = 1
                one.metrics.first_token_seconds = now - one.started
            one.metrics.tokens = len(one.tokens)
            one.metrics.seconds = now - one.started

    def _join(self) -> None:
        joining = [one for one in self._joining if one.finish_reason is None]
        for one in self._joining:
            if one.finish_reason is not None and not one.request.keep:
                self.target.close(one.sequence.kv)
        self._joining.clear()
        if not joining:
            return
        for one in joining:
            one.request.method.drafter.begin(one.sequence)
            self._recall(one)
        self._prefill(joining)
        self.active.extend(joining)

    @staticmethod
    def _recall(one: Generation) -> None:
        """Show the drafter the states of the K/V that a kept sequence lent; keep those to come if that is asked."""
        drafter, sequence = one.request.method.drafter, one.sequence
        if sequence.states is not None:
            for position, states in sequence.states.chunks():
                drafter.on_prefill(sequence, position, states)
        if not one.request.keep or not drafter.aux_hidden_state_layers:
            sequence.states = None
        elif sequence.states is None:
            sequence.states = States(drafter.aux_hidden_state_layers)

    def _prefill(self, generations: Seq[Generation]) -> None:
        """K/V of all their tokens but the last."""
        for aux_hidden_state_layers, members in grouped(
            generations, lambda one: tuple(one.request.method.drafter.aux_hidden_state_layers)
        ):
            drafters = {id(one.sequence): one.request.method.drafter for one in members}

            def hand_over(
                sequence: Sequence, position: int, states: Mapping[int, Tensor], to: dict[int, Drafter] = drafters
            ) -> None:
                to[id(sequence)].on_prefill(sequence, position, states)
                if sequence.states is not None:
                    sequence.states.add(states)

            self.target.prefill(
                [one.sequence for one in members],
                aux_hidden_state_layers,
                hand_over if aux_hidden_state_layers else None,
            )

    def _leave(self, leaving: Seq[Generation]) -> None:
        for one in leaving:
            one.metrics.caches = one.request.method.drafter.caches(one.sequence)
            one.metrics.parts = one.request.method.drafter.drafting(one.sequence)
            one.request.method.drafter.end(one.sequence)
            self.active.remove(one)
            if not one.request.keep:
                self.target.close(one.sequence.kv)

    def _continue(self, sequence: Sequence, kept: Sequence, aux_hidden_state_layers: tuple[int, ...]) -> None:
        """Begin with the K/V of the longest common beginning with a kept sequence; its last token is always scored.

        A drafter that reads hidden states is shown those of the beginning: K/V without them are of no use to it.
        """
        limit = min(self.target.length(kept.kv), len(sequence.tokens) - 1)
        if aux_hidden_state_layers:
            limit = min(limit, 0 if kept.states is None else kept.states.length(aux_hidden_state_layers))
        same = next((i for i in range(limit) if kept.tokens[i] != sequence.tokens[i]), limit)
        self.target.close(sequence.kv)
        sequence.kv = self.target.fork(kept.kv, same)
        if aux_hidden_state_layers and kept.states is not None:
            sequence.states = kept.states.first(same, aux_hidden_state_layers)


def grouped(items: Iterable[Item], key: Callable[[Item], K]) -> list[tuple[K, list[Item]]]:
    """Items by equal key (identity for parts, which do not define equality), in order of first appearance."""
    groups: dict[K, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


__all__ = ["Decoder", "Generation", "Logprob", "Request", "Round"]
