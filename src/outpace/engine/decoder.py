"""Decoder: requests join and leave between rounds, and every round serves them all.

    decoder = Decoder(target, tokenizer)
    generation = decoder.submit(Request(prompt, method, max_new_tokens=64))
    decoder.run()
    print(generation.text)

Whatever their methods, one target forward scores the trees of all requests (:mod:`outpace.engine.round`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence as Seq
from time import perf_counter
from typing import TYPE_CHECKING

from outpace.acceptance.base import AcceptanceRule
from outpace.core.constraint import ShowsText
from outpace.core.errors import BadInput
from outpace.core.future_validity import Weighed
from outpace.core.sampling import Sampler
from outpace.core.shared_noise import SharedNoise
from outpace.core.text import TextStream, Tokenizer
from outpace.core.turns import ROUNDS
from outpace.engine import siblings
from outpace.engine.beginnings import Beginnings
from outpace.engine.future_validity import AnswerTrees, weighing
from outpace.engine.populations.group import Group
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.reading_order import ReadingOrder
from outpace.engine.request import Generation, Request
from outpace.engine.request_checks import check_request
from outpace.engine.round import grouped, run_round
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor


class Decoder:
    """Runs rounds over the active requests of one target."""

    def __init__(self, target: Target, tokenizer: Tokenizer | None = None, prefixes: PrefixCache | None = None) -> None:
        """``prefixes``: K/V of prompts' beginnings, for requests with a ``prefix_owner``."""
        self.target = target
        self.tokenizer = tokenizer
        self._beginnings = Beginnings(target, prefixes)
        self.active: list[Generation] = []
        self._joining: list[Generation] = []
        self._reading: list[Generation] = []
        """Those whose prompts have been read in part, or whose tokens are being weighted."""
        self._order = ReadingOrder()
        self._answer_trees = AnswerTrees()
        self._weighing: dict[Generation, Generator[None, None, Weighed | None]] = {}
        """Of requests whose prompts have been read: the steps to the weights of their tokens."""

    def check(self, request: Request) -> AcceptanceRule:
        """The rule that will judge its drafts. Raises BadInput for a request that cannot be honoured."""
        return check_request(request.prepared(), self.target, self.tokenizer)

    def submit(self, request: Request) -> Generation:
        """Let a request join at the next round. Raises BadInput for a request that cannot be honoured."""
        with ROUNDS:
            return self._submit(request)

    def _submit(self, request: Request) -> Generation:
        request = request.prepared()
        rule = check_request(request, self.target, self.tokenizer)
        sequence = self.target.sequence(
            request.prompt,
            request.params,
            earlier=request.method.drafter.earlier.add(request.namespace, request.params),
            references=request.references,
            namespace=request.namespace,
            stop_ids=request.stop_ids,
        )
        sequence.repeats = request.repeats
        sequence.depends_on_drafts = bool(request.method.departs) or not rule.lossless
        sequence.most_tokens = min(len(request.prompt) + request.max_new_tokens, self.target.context_length)
        if rule.shares_noise:
            sequence.noise = SharedNoise()
        if request.kept is not None:
            self._beginnings.share(sequence, request.kept, request.method.drafter.prefill_layers)
        generation = Generation(
            request=request,
            sequence=sequence,
            rule=rule,
            rule_state=rule.begin(sequence),
            stream=self._stream(request),
            started=perf_counter(),
        )
        generation.metrics.prompt_tokens = len(request.prompt)
        generation.metrics.sampled = not request.params.greedy
        if (population := request.population) is not None:
            generation.group = Group(request, population, sequence, self.target.context_length, self.tokenizer)
        self._joining.append(generation)
        return generation

    def _stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        constraint = request.params.constraint
        shown = constraint.shown() if isinstance(constraint, ShowsText) else None
        return TextStream(self.tokenizer, request.stop_strings, shown)

    def run(self) -> None:
        """Run rounds until no request is left."""
        while self.step():
            pass

    def stream(self, generation: Generation) -> Iterator[str]:
        """Run rounds until ``generation`` ends, yielding its text as it is released.

        Rounds serve every request: several streams may be read in any order.
        """
        if generation.finish_reason is None and generation not in [*self.active, *self._reading, *self._joining]:
            raise ValueError("this generation belongs to another decoder")
        while True:
            if piece := generation.take_text():
                yield piece
            if generation.finish_reason is not None:
                return
            self.step()

    def step(self, prefill_rows: int | None = None) -> bool:
        """Let requests leave and join, then run one round over all. False when there is nothing left to do.

        ``prefill_rows``: most rows of prompts that are read before the round; None: all that there are.
        """
        with ROUNDS, self.target.round():
            self.admit(prefill_rows)
            if self.active:
                self.round(self.active)
                self._leave_finished()
            return bool(self.active or self._reading or self._joining)

    def admit(self, prefill_rows: int | None = None) -> None:
        """Let requests that ended leave, and those join that were submitted and whose prompts have been read."""
        self._leave_finished()
        self._join(prefill_rows)
        self._leave_finished()  # what cannot be weighted has ended before its first round

    def preempt(self, one: Generation) -> None:
        """Take a request out and release its K/V. Its answer goes on after :meth:`resume`, with the same draft state:
        what a drafter has learned is not lost."""
        with ROUNDS:
            if one in self._reading and not one.prompt_read:
                self._end_draft(one)  # it has seen a part of the prompt's states
            for where in (self.active, self._reading, self._joining):
                if one in where:
                    where.remove(one)
            self.target.close(one.sequence.kv)
            one.sequence.kv = None
            if one.group is not None:
                one.group.suspend(self.target)
            if not one.prompt_read:
                one.sequence.states = None

    def resume(self, one: Generation) -> None:
        """Let a request that was preempted join again: the K/V of all its tokens is computed anew."""
        with ROUNDS:
            one.sequence.kv = self.target.open()
            one.resumed = one.prompt_read
            self._joining.append(one)

    def drop(self, one: Generation) -> None:
        """Take out a request that does not go on, wherever it is, and release all that is held of it."""
        with ROUNDS:
            for where in (self.active, self._reading, self._joining):
                if one in where:
                    where.remove(one)
            try:
                self._end_draft(one)
            finally:
                self._release(one)

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
                validity = sequence.sampler.validity
                sequence.sampler = Sampler(
                    sequence.params, one.request.prompt, target.vocab_size, stops, target.open_rows
                )
                if validity is not None:
                    sequence.sampler.weigh(validity)
                sequence.sampler.extend(one.tokens)
            if sequence.noise is not None:
                sequence.noise.forget()
            one.rule_state = one.rule.begin(sequence)
            one.draft_state = one.drafter.rewind(one.draft_state, sequence, kept)
        self._prefill([one for one, _ in moved])

    def round(self, active: Seq[Generation]) -> None:
        """One round over some of the active requests."""
        groups = [one for one in active if one.group is not None]
        if groups:
            run_round(self.target, [one for one in active if one.group is None], groups)
        else:
            run_round(self.target, active)

    def _join(self, prefill_rows: int | None) -> None:
        joining = [one for one in self._joining if one.finish_reason is None]
        for one in self._joining:
            if one.finish_reason is not None:
                self._release(one)
        self._joining.clear()
        waiting = self._begin(joining)
        if self._reading:
            self._read(prefill_rows)
        if waiting:
            self._joining += self._begin(waiting)
            self._read(0)

    def _begin(self, joining: Seq[Generation]) -> list[Generation]:
        """Let requests begin with what K/V there is for them. Returns those that wait for a sibling's."""
        waiting = []
        for one in joining:
            if one.resumed:
                self._beginnings.borrow(one, ())
                self._reading.append(one)
                continue
            lender = siblings.lender(one, self.active) if one.request.siblings is not None else None
            if lender is None and siblings.read_now(one, self._reading):
                waiting.append(one)
                continue
            one.draft_state = one.drafter.begin(one.sequence)
            one.drafting = True
            layers = one.drafter.prefill_layers
            if lender is not None:
                self._beginnings.share(one.sequence, lender.sequence, layers)
                one.metrics.cached_tokens = lender.metrics.cached_tokens
            self._beginnings.borrow(one, layers)
            self._beginnings.recall(one)
            self._reading.append(one)
        return waiting

    def _read(self, prefill_rows: int | None) -> None:
        """Read prompts, ``prefill_rows`` of their rows at most; requests whose prompt has been read become active."""
        self._prefill(self._order.next(self._reading, self._unread) if prefill_rows else self._reading, prefill_rows)
        for one in [one for one in self._weighing if one not in self._reading]:
            self._weighing.pop(one).close()  # it has ended, or was taken out
        for one in [one for one in self._reading if self._is_read(one)]:
            if not one.prompt_read and not self._weigh(one):
                continue
            self._reading.remove(one)
            self.active.append(one)
            one.prompt_read, one.resumed = True, False
            self._beginnings.keep(one)
            if one.group is not None:
                one.group.open(self.target)

    def _weigh(self, one: Generation) -> bool:
        """One step to the weights of the tokens that its grammar allows; whether that was the last.

        A request that demands too much ends."""
        steps = self._weighing.setdefault(
            one, weighing(self.target, one.sequence, self._answer_trees, one.request.tenant)
        )
        try:
            next(steps)
        except StopIteration as ended:
            one.weighed = ended.value
            if (kind := one.constraint_figures["constraint_weighting"]) is not None:
                one.metrics.weighting = {kind: 1}
        except BadInput as error:
            one.fail(error)
        else:
            return False
        del self._weighing[one]
        return True

    def _is_read(self, one: Generation) -> bool:
        return self._unread(one) == 0

    def _unread(self, one: Generation) -> int:
        """Tokens, all but the last, of which there is no K/V yet."""
        return max(0, len(one.sequence.tokens) - 1 - self.target.length(one.sequence.kv))

    def _prefill(self, generations: Seq[Generation], most: int | None = None) -> None:
        """K/V of all their tokens but the last, ``most`` of them, in this order; None: all."""
        rows, left = dict[int, int](), most
        for one in generations:
            rows[id(one)] = self._unread(one) if left is None else min(self._unread(one), left)
            left = None if left is None else left - rows[id(one)]
        for layers, members in grouped([one for one in generations if rows[id(one)]], _layers_to_read):
            owners = {id(one.sequence): one for one in members}

            def hand_over(
                sequence: Sequence, position: int, states: Mapping[int, Tensor], to: dict[int, Generation] = owners
            ) -> None:
                one = to[id(sequence)]
                one.drafter.on_prefill(one.draft_state, position, states)
                if sequence.states is not None:
                    sequence.states.add(states)

            # Only the last in order may be read in part: of a group's rows each member gets its own.
            share = None if most is None else sum(rows[id(one)] for one in members)
            self.target.prefill([one.sequence for one in members], layers, hand_over if layers else None, share)

    def _leave_finished(self) -> None:
        self._leave([one for one in (*self.active, *self._reading) if one.finish_reason is not None])

    def _leave(self, leaving: Seq[Generation]) -> None:
        for one in leaving:
            self._beginnings.keep(one)
            self._end_draft(one)
            (self.active if one in self.active else self._reading).remove(one)
            self._release(one)

    def _release(self, one: Generation) -> None:
        """Close its K/V, once, unless somebody goes on with it."""
        if one.left:
            return
        one.left = True
        if one.group is not None:
            one.group.close(self.target)
        if not one.keeps and one.sequence.kv is not None:
            self.target.close(one.sequence.kv)

    @staticmethod
    def _end_draft(one: Generation) -> None:
        """Note what its drafter has to say of it, and release what the drafter holds."""
        if not one.drafting:
            return
        one.drafting = False
        one.metrics.caches = one.drafter.caches(one.draft_state)
        for name, rounds in one.drafter.drafting(one.draft_state).items():
            one.metrics.parts[name] = one.metrics.parts.get(name, 0) + rounds
        one.drafter.end(one.draft_state)


def _layers_to_read(one: Generation) -> tuple[int, ...]:
    """Layers whose hidden states its drafter has not seen yet."""
    return () if one.resumed else one.drafter.prefill_layers
