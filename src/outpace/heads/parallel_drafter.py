"""Drafts of parallel heads: each scores one of the next positions from the target's last known state.

The newest state is that of the token before the last: the last committed token came out of it and has none yet. So the
first head, which predicts two positions behind its state, predicts the first draft token.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.drafting.calibration import Calibration
from outpace.drafting.marginals import FromMarginals
from outpace.drafting.namespaces import Namespaces
from outpace.heads.lm_head import LmHead
from outpace.heads.parallel_heads import ParallelHeads
from outpace.targets.base import Sequence, Target, TreeScores

RECENT = 32
"""States of a request's last tokens that are kept: a decoder inside a drafter takes some of its tokens back."""


class LastStates:
    """The states of the last tokens that have one. ``end``: the first token without."""

    def __init__(self) -> None:
        self.end = 0
        self._rows: list[Tensor] = []

    def put(self, position: int, rows: Tensor) -> None:
        """States (n, hidden) of the tokens from ``position`` on; what was kept of these is replaced."""
        self.cut(position)
        if self.end != position:
            self._rows.clear()
        self._rows = [*self._rows, *rows][-RECENT:]
        self.end = position + len(rows)

    def cut(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        if length < self.end:
            del self._rows[max(0, len(self._rows) - (self.end - length)) :]
            self.end = length

    def at(self, position: int) -> Tensor | None:
        """(hidden,), or None where it is not known."""
        index = position - self.end + len(self._rows)
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def copy(self) -> LastStates:
        """The same states, kept apart."""
        twin = LastStates()
        twin.end, twin._rows = self.end, list(self._rows)
        return twin


class HeadsDrafter(FromMarginals):
    """Drafts what parallel heads say of the target's newest state: trees of ``k`` tokens a head, or chains."""

    def __init__(self, head: ParallelHeads, target: Target, k: int, *, by_rank: bool = False) -> None:
        super().__init__(head.draft_vocabulary.d2t, k)
        self.target = target
        self.heads: int = head.options.heads
        (self._tap,) = self.aux_hidden_state_layers = head.config.aux_hidden_state_layers
        self._network, self._lm_head = head.beside(target), LmHead(head, target)
        self._states: dict[Sequence, LastStates] = {}
        if by_rank:
            self._calibrations = Namespaces(lambda: ByRank(rank_prior))

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._states[sequence] = LastStates()

    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        rows = hidden_states[self._tap]
        last = rows[-RECENT:].clone()  # what is kept must not keep the whole chunk
        self._states[sequence].put(position + len(rows) - len(last), last)

    @torch.inference_mode()
    def rows(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Tensor | None]:
        states = [self._states[one].at(len(one.tokens) - 2) for one in sequences]
        known = [state for state in states if state is not None]
        if not known:
            return [None] * len(states)
        count = min(self.heads, max(depths))
        said = self._network(self.target.final_norm(torch.stack(known)).float())[:, :count]
        logits = iter(torch.split(self._lm_head(said.flatten(0, 1)), count))
        return [None if state is None else next(logits) for state in states]

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        for sequence, part, verdict in zip(sequences, scores, verdicts, strict=True):
            # An answer that ended may have been cut short of the path; its last token has no state.
            path = verdict.path[: max(0, len(sequence.tokens) - part.length - 1)]
            self._states[sequence].put(
                part.length - 1, part.hidden_states[self._tap][[0, *(1 + node for node in path)]]
            )

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        self._states[twin] = self._states[sequence].copy()

    def rewind(self, sequence: Sequence, kept: int) -> None:
        super().rewind(sequence, kept)
        self._states[sequence].cut(kept)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._states.pop(sequence, None)


class ByRank(Calibration):
    """Rates by head and rank alone, however sure the head is: what the paper chooses its tree by."""

    def rate(self, kind: Any) -> float:
        return super().rate(kind[:2])

    def learn(self, kind: Any, hit: bool) -> None:
        super().learn(kind[:2], hit)


def rank_prior(kind: Any) -> float:
    """Of a head (from 0) and a rank, before anything is known."""
    depth, rank = kind
    return float(0.5 * 0.85**depth * 0.4**rank)
