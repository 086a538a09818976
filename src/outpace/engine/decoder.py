"""Decoder: requests join and leave between rounds, and every round serves them all.

    decoder = Decoder(target, tokenizer)
    generation = decoder.submit(Request(prompt, method, max_new_tokens=64))
    decoder.run()
    print(generation.text)

Whatever their methods, one target forward scores the trees of all requests (:mod:`outpace.engine.round`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from time import perf_counter
from typing import TYPE_CHECKING

from outpace.acceptance.base import AcceptanceRule
from outpace.core.errors import BadInput
from outpace.core.sampling import Sampler, check_logit_bias
from outpace.core.shared_noise import SharedNoise
from outpace.core.text import TextStream, Tokenizer
from outpace.core.turns import ROUNDS
from outpace.engine.request import Generation, Request, check_references
from outpace.engine.round import grouped, run_round
from outpace.targets.base import Sequence, Target
from outpace.targets.states import States

if TYPE_CHECKING:
    from torch import Tensor


class Decoder:
    """Runs rounds over the active requests of one target."""

    def __init__(self, target: Target, tokenizer: Tokenizer | None = None) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.active: list[Generation] = []
        self._joining: list[Generation] = []

    def check(self, request: Request) -> AcceptanceRule:
        """The rule that will judge its drafts. Raises BadInput for a request that cannot be honoured."""
        if request.max_new_tokens < 1:
            raise BadInput(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        if request.stop_strings and self.tokenizer is None:
            raise BadInput("stop strings need a tokenizer; load the model with one, or use stop_ids")
        if "" in request.stop_strings:
            raise BadInput("an empty stop string would stop everything; leave it out")
        self.target.check_prompt(request.prompt)
        check_logit_bias(request.params, self.target.vocab_size)
        check_references(request.references)
        return request.method.rule_for(request.params)

    def submit(self, request: Request) -> Generation:
        """Let a request join at the next round. Raises BadInput for a request that cannot be honoured."""
        with ROUNDS:
            return self._submit(request)

    def _submit(self, request: Request) -> Generation:
        rule = self.check(request)
        sequence = self.target.sequence(
            request.prompt,
            request.params,
            earlier=request.method.drafter.earlier.add(request.namespace, request.params),
            references=request.references,
            namespace=request.namespace,
            stop_ids=request.stop_ids,
        )
        if rule.shares_noise:
            sequence.noise = SharedNoise()
        if request.kept is not None:
            self._continue(sequence, request.kept, request.method.drafter.prefill_layers)
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
        with ROUNDS, self.target.round():
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
                stops, target = sequence.sampler.stop_ids, self.target
                sequence.sampler = Sampler(
                    sequence.params, one.request.prompt, target.vocab_size, stops, target.open_rows
                )
                sequence.sampler.extend(one.tokens)
            if sequence.noise is not None:
                sequence.noise.forget()
            one.rule_state = one.rule.begin(sequence)
            one.draft_state = one.drafter.rewind(one.draft_state, sequence, kept)
        self._prefill([one for one, _ in moved])

    def round(self, active: Seq[Generation]) -> None:
        """One round over some of the active requests."""
        run_round(self.target, active)

    def _join(self) -> None:
        joining = [one for one in self._joining if one.finish_reason is None]
        for one in self._joining:
            if one.finish_reason is not None and not one.keeps:
                self.target.close(one.sequence.kv)
        self._joining.clear()
        if not joining:
            return
        for one in joining:
            one.draft_state = one.drafter.begin(one.sequence)
            self._recall(one)
        self._prefill(joining)
        self.active.extend(joining)

    @staticmethod
    def _recall(one: Generation) -> None:
        """Show the drafter the states of the K/V that a kept sequence lent; keep those to come if that is asked."""
        drafter, sequence = one.drafter, one.sequence
        if sequence.states is not None:
            for position, states in sequence.states.chunks():
                drafter.on_prefill(one.draft_state, position, states)
        if not one.request.keep or not drafter.prefill_layers:
            sequence.states = None
        elif sequence.states is None:
            sequence.states = States(drafter.prefill_layers)

    def _prefill(self, generations: Seq[Generation]) -> None:
        """K/V of all their tokens but the last."""
        for layers, members in grouped(generations, lambda one: one.drafter.prefill_layers):
            owners = {id(one.sequence): one for one in members}

            def hand_over(
                sequence: Sequence, position: int, states: Mapping[int, Tensor], to: dict[int, Generation] = owners
            ) -> None:
                one = to[id(sequence)]
                one.drafter.on_prefill(one.draft_state, position, states)
                if sequence.states is not None:
                    sequence.states.add(states)

            self.target.prefill([one.sequence for one in members], layers, hand_over if layers else None)

    def _leave(self, leaving: Seq[Generation]) -> None:
        for one in leaving:
            one.metrics.caches = one.drafter.caches(one.draft_state)
            one.metrics.parts = one.drafter.drafting(one.draft_state)
            one.drafter.end(one.draft_state)
            self.active.remove(one)
            if not one.keeps:
                self.target.close(one.sequence.kv)

    def _continue(self, sequence: Sequence, kept: Sequence, prefill_layers: tuple[int, ...]) -> None:
        """Begin with the K/V of the longest common beginning with a kept sequence; its last token is always scored.

        A drafter that reads hidden states is shown those of the beginning: K/V without them are of no use to it.
        """
        limit = min(self.target.length(kept.kv), len(sequence.tokens) - 1)
        if prefill_layers:
            limit = min(limit, 0 if kept.states is None else kept.states.length(prefill_layers))
        same = next((i for i in range(limit) if kept.tokens[i] != sequence.tokens[i]), limit)
        self.target.close(sequence.kv)
        sequence.kv = self.target.fork(kept.kv, same)
        if prefill_layers and kept.states is not None:
            sequence.states = kept.states.first(same, prefill_layers)
