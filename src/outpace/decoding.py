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
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.controllers.base import Budget
from outpace.drafters.base import Drafter
from outpace.errors import BadInput
from outpace.method import Method
from outpace.metrics import PHASES, RequestMetrics
from outpace.sampling import SamplingParams
from outpace.targets.base import Scores, Sequence, Target
from outpace.text import TextStream, Tokenizer
from outpace.tree import ROOT, TokenTree

K = TypeVar("K")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to make. ``stop_ids`` end the answer and are not part of it; stop strings are cut from the text.

    ``keep`` leaves the K/V open when the answer ends; ``kept`` continues the K/V of such a generation where the
    prompts agree (a chat's earlier turns).
    """

    prompt: tuple[int, ...]
    method: Method
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
    namespace: str = ""
    keep: bool = False
    kept: Sequence | None = None
    trace: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one request, for those who want to watch: the tree, and the tokens that came of it."""

    tree: TokenTree
    path: tuple[int, ...]
    committed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of an output token under the target's raw logits, and the most likely tokens there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class Generation:
    """A request under way or finished. ``finish_reason``: None while running, else "stop", "length" or "cancelled"."""

    request: Request
    sequence: Sequence
    rule: AcceptanceRule
    rule_state: Any
    stream: TextStream | None
    started: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text released so far."""
        return self.stream.text if self.stream else ""

    def take_text(self) -> str:
        """The text released since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def cancel(self) -> None:
        """Leave at the next round. Text that was held back is released."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            if self.stream is not None:
                self._pieces.append(self.stream.finish())


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
        rule = request.method.rule_for(request.params)
        sequence = self.target.sequence(
            request.prompt, request.params, references=request.references, namespace=request.namespace
        )
        if request.kept is not None:
            self.target.close(sequence.kv)
            sequence.kv = self._continue(request.kept, request.prompt)
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
        while True:
            if piece := generation.take_text():
                yield piece
            if generation.finish_reason is not None:
                return
            self.step()

    def step(self) -> bool:
        """Let requests leave and join, then run one round over all. False when there is nothing left to do."""
        self._leave([one for one in self.active if one.finish_reason is not None])
        self._join()
        if not self.active:
            return False
        self._round(self.active)
        self._leave([one for one in self.active if one.finish_reason is not None])
        return bool(self.active or self._joining)

    def _round(self, active: Seq[Generation]) -> None:
        began = perf_counter()
        split: list[dict[str, float]] = [{} for _ in active]
        trees = self._draft(active, split)

        with _Timed(split, "score"):
            taps = sorted({layer for one in active for layer in one.request.method.drafter.taps})
            batch = [(one.sequence, tree) for one, tree in zip(active, trees, strict=True)]
            scores = self.target.score(batch, taps=taps)

        verdicts = self._accept(active, scores, split)
        kept = [self._cut(one, tree, verdict) for one, tree, verdict in zip(active, trees, verdicts, strict=True)]
        self._record_logprobs(active, scores, verdicts, kept)
        self.target.commit(
            scores, [verdict.path[: len(tokens) - 1] for verdict, tokens in zip(verdicts, kept, strict=True)]
        )
        for one, tree, verdict, tokens in zip(active, trees, verdicts, kept, strict=True):
            one.sequence.tokens.extend(tokens)
            one.sequence.sampler.extend(tokens)
            one.metrics.count_round(len(tree), min(len(verdict.path), len(tokens)), len(tokens))
            if one.request.trace:
                one.rounds.append(Round(tree, verdict.path, tuple(tokens)))
        self._observe(active, scores, verdicts, split)
        self._close_books(active, split, began)

    def _draft(self, active: Seq[Generation], split: list[dict[str, float]]) -> list[TokenTree]:
        trees = [TokenTree() for _ in active]
        budgets = [self._budget(one, len(active)) for one in active]
        drafting = [index for index, budget in enumerate(budgets) if budget.depth > 0]
        for drafter, members in _grouped(drafting, lambda i: active[i].request.method.drafter):
            with _Timed([split[i] for i in members], "draft"):
                proposed = drafter.propose([active[i].sequence for i in members], [budgets[i] for i in members])
            for index, tree in zip(members, proposed, strict=True):
                trees[index] = tree
        return trees

    def _budget(self, one: Generation, batch: int) -> Budget:
        # A path longer than the room left would be scored for nothing; depth is fixed before any draw is made.
        room = min(one.request.max_new_tokens - len(one.tokens), self.target.context_length - len(one.sequence.tokens))
        return one.request.method.controller.budget(one.metrics, batch).limited(room - 1)

    def _accept(self, active: Seq[Generation], scores: Scores, split: list[dict[str, float]]) -> list[Verdict]:
        verdicts: list[Verdict] = [Verdict((), ROOT)] * len(active)
        for rule, members in _grouped(range(len(active)), lambda i: active[i].rule):
            with _Timed([split[i] for i in members], "accept"):
                chances = [active[i].sequence.chance.at(len(active[i].sequence.tokens), "accept") for i in members]
                found = rule.accept([scores[i] for i in members], [active[i].rule_state for i in members], chances)
            for index, verdict in zip(members, found, strict=True):
                verdicts[index] = verdict
        return verdicts

    def _cut(self, one: Generation, tree: TokenTree, verdict: Verdict) -> list[int]:
        """The tokens of the verdict that stay: up to a stop token, a stop string or the length limit."""
        kept: list[int] = []
        for token in [*(tree.tokens[node] for node in verdict.path), verdict.token]:
            kept.append(token)
            if token in one.request.stop_ids:
                one.finish_reason = "stop"
                break
            one.tokens.append(token)
            if one.stream is not None:
                one._pieces.append(one.stream.push(token))
                if one.stream.stopped is not None:
                    one.finish_reason = "stop"
                    break
            full = len(one.sequence.tokens) + len(kept) >= self.target.context_length
            if full or len(one.tokens) >= one.request.max_new_tokens:
                one.finish_reason = "length"
                break
        if one.finish_reason is not None and one.stream is not None:
            one._pieces.append(one.stream.finish())
        return kept

    def _observe(
        self, active: Seq[Generation], scores: Scores, verdicts: Seq[Verdict], split: list[dict[str, float]]
    ) -> None:
        for drafter, members in _grouped(range(len(active)), lambda i: active[i].request.method.drafter):
            with _Timed([split[i] for i in members], "draft"):
                drafter.observe(
                    [active[i].sequence for i in members], [scores[i] for i in members], [verdicts[i] for i in members]
                )

    @staticmethod
    def _record_logprobs(active: Seq[Generation], scores: Scores, verdicts: Seq[Verdict], kept: Seq[Seq[int]]) -> None:
        for index, one in enumerate(active):
            params = one.request.params
            if not params.logprobs:
                continue
            where = (ROOT, *verdicts[index].path)
            for node, token in zip(where, kept[index], strict=False):
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
        for taps, members in _grouped(joining, lambda one: tuple(one.request.method.drafter.taps)):
            drafters = {id(one.sequence): one.request.method.drafter for one in members}

            def hand_over(
                sequence: Sequence, position: int, states: Mapping[int, Tensor], to: dict[int, Drafter] = drafters
            ) -> None:
                to[id(sequence)].on_prefill(sequence, position, states)

            self.target.prefill([one.sequence for one in members], taps, hand_over if taps else None)
        self.active.extend(joining)

    def _leave(self, leaving: Seq[Generation]) -> None:
        for one in leaving:
            one.request.method.drafter.end(one.sequence)
            self.active.remove(one)
            if not one.request.keep:
                self.target.close(one.sequence.kv)

    def _continue(self, kept: Sequence, prompt: Seq[int]) -> Any:
        """K/V of the longest common beginning of a kept sequence and a new prompt (its last token is always scored)."""
        limit = min(self.target.length(kept.kv), len(prompt) - 1)
        same = next((i for i in range(limit) if kept.tokens[i] != prompt[i]), limit)
        return self.target.fork(kept.kv, same)


class _Timed:
    """Adds the time spent inside to ``phase`` of every split."""

    def __init__(self, splits: Seq[dict[str, float]], phase: str) -> None:
        self._splits, self._phase = splits, phase

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = perf_counter() - self._began
        for split in self._splits:
            split[self._phase] = split.get(self._phase, 0.0) + spent


def _grouped(items: Iterable[Item], key: Callable[[Item], K]) -> list[tuple[K, list[Item]]]:
    """Items by equal key (identity for parts, which do not define equality), in order of first appearance."""
    groups: dict[K, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


__all__ = ["Decoder", "Drafter", "Generation", "Logprob", "Request", "Round"]
