"""A probe: rounds with a known number of draft tokens.

It drafts known tokens, and the target scores them in the rounds of the user's own prompts: cold caches, sampling and
the commit are part of what a round takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from itertools import chain, count

import numpy as np

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.method import Method
from outpace.engine.round_records import RoundRecord, RoundRecorder
from outpace.targets.base import Sequence, Target

MOST_DRAFT_TOKENS = 24
"""Of one request."""
_TRIES = 3
"""Rounds that are run for one size until the batch takes as many draft tokens; near the end of answers it does not."""


class ProbeRounds:
    """Rounds of ``batch`` requests on the contexts of ``answers``, by turns of a few. ``weigh``: how many times as long
    a round takes as with usual contexts. Close them."""

    def __init__(
        self, target: Target, answers: Seq[KnownAnswer], batch: int, weigh: Callable[[RoundRecord], float]
    ) -> None:
        self._probe = Probe({one.prompt: one.tokens for one in answers}, target.vocab_size)
        lengths = Fixed(MOST_DRAFT_TOKENS, max_nodes=MOST_DRAFT_TOKENS)
        method = Method("probe", self._probe, RecursiveRejection(), lengths)
        self._recorder = RoundRecorder(target, [one.request(method) for one in answers], batch)
        self._weigh = weigh

    def turn(self, size: int, run: int) -> float:
        """Seconds of a round of ``size`` draft tokens in all and usual contexts, but for drafting: the median of
        ``run`` rounds but the first, which finds caches and threads as another size has left them."""
        self._probe.tokens = size
        found: list[float] = []
        for tried in range(_TRIES * run):
            one = self._recorder.step()
            if tried and (one.draft_tokens == size or tried >= _TRIES * run - 1):
                found.append(one.verify_seconds / self._weigh(one))
            if len(found) == run - 1:
                break
        return float(np.median(found))

    def close(self) -> None:
        """End the requests that still run."""
        self._recorder.close()


class Probe(Drafter[DraftState]):
    """Drafts ``tokens`` tokens for all requests together, the first half of each draft right as far as known."""

    def __init__(self, answers: Mapping[tuple[int, ...], tuple[int, ...]], vocab_size: int) -> None:
        self._answers, self._vocab_size = answers, vocab_size
        self.tokens = 0

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose_batch(self, states: Seq[DraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        # Those that have room take what the others cannot.
        left, found = self.tokens, {}
        order = sorted(range(len(states)), key=lambda at: budgets[at].depth)
        for place, at in enumerate(order):
            share = -(-left // (len(order) - place)) if left else 0
            found[at] = min(share, budgets[at].depth)
            left -= found[at]
        return [TokenTree.chain(self._draft(state, found[at])) for at, state in enumerate(states)]

    def _draft(self, state: DraftState, size: int) -> Iterator[int]:
        sequence = state.sequence
        prompt = tuple(sequence.tokens[: sequence.prompt_length])
        coming = self._answers[prompt][len(sequence.tokens) - sequence.prompt_length :]
        right = coming[: (size + 1) // 2]
        filler = ((7 * token + 3) % self._vocab_size for token in count(len(sequence.tokens)))
        return (token for token, _ in zip(chain(right, filler), range(size), strict=False))
