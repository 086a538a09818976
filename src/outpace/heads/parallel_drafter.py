"""Drafts of parallel heads: each scores one of the next positions from the target's newest hidden state.

The newest hidden state is that of the token before the last: the last committed token was drawn from it and has none
yet. So the first head, which predicts the token two positions after its state, predicts the first draft token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.drafting.calibration import Calibration
from outpace.drafting.marginals import FromMarginals, MarginalState
from outpace.drafting.namespaces import Namespaces
from outpace.heads.lm_head import LmHead
from outpace.heads.parallel_heads import ParallelHeads
from outpace.targets.base import Sequence, Target


@dataclass(slots=True)
class ParallelState(MarginalState):
    """What parallel heads keep of one request: ``hidden`` (hidden,), the target's newest state, at ``position``."""

    position: int = -1
    hidden: Tensor | None = None

    @property
    def newest(self) -> Tensor | None:
        """The hidden state of the token before the last, or None where the target has not been asked for it."""
        return self.hidden if self.position == len(self.sequence.tokens) - 2 else None


class HeadsDrafter(FromMarginals[ParallelState]):
    """Drafts from the target's newest hidden state: trees of ``topk`` tokens a head, or chains (``topk`` = 1).

    ``by_rank``: trees are chosen by head and rank of their tokens alone. ``accuracies``: by these measured rates, which
    are never changed (:mod:`outpace.heads.typical_tree`).
    """

    def __init__(
        self, head: ParallelHeads, target: Target, topk: int, *, by_rank: bool = False, accuracies: Seq[Seq[float]] = ()
    ) -> None:
        super().__init__(head.draft_vocabulary.d2t, topk)
        self.target = target
        self.heads: int = head.options.heads
        self.aux_hidden_state_layers = head.config.aux_hidden_state_layers
        self._network, self._lm_head = head.beside(target), LmHead(head, target)
        if accuracies:
            self._calibrations = Namespaces(lambda: Measured(accuracies))
        elif by_rank:
            self._calibrations = Namespaces(lambda: ByRank(rank_prior))

    def begin(self, sequence: Sequence) -> ParallelState:
        return ParallelState(sequence, self.calibration_of(sequence))

    def on_prefill(self, state: ParallelState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        [rows] = (hidden_states[layer] for layer in self.aux_hidden_state_layers)
        state.position, state.hidden = position + len(rows) - 1, rows[-1].clone()  # a view would keep the whole chunk

    @torch.inference_mode()
    def rows(self, states: Seq[ParallelState], depths: Seq[int]) -> list[Tensor | None]:
        newest = [state.newest for state in states]
        known = [one for one in newest if one is not None]
        if not known:
            return [None] * len(states)
        count = min(self.heads, max(depths))
        predicted = self._network(self.target.final_norm(torch.stack(known)).float())[:, :count]
        logits = iter(torch.split(self._lm_head(predicted.flatten(0, 1)), count))
        return [None if one is None else next(logits) for one in newest]

    def observe(self, state: ParallelState, verdict: Verdict) -> None:
        super().observe(state, verdict)
        rows = verdict.hidden_states(self.aux_hidden_state_layers)
        state.position, state.hidden = verdict.scores.length + len(rows) - 2, rows[-1]


class ByRank(Calibration):
    """Rates by head and rank alone, whatever the head's probability: what Medusa's paper chooses its tree by."""

    def rate(self, kind: Any) -> float:
        return super().rate(kind[:2])

    def learn(self, kind: Any, hit: float) -> None:
        super().learn(kind[:2], hit)


class Measured(Calibration):
    """Rates by head and rank that were measured once: the tree is the same in every round."""

    def __init__(self, accuracies: Seq[Seq[float]]) -> None:
        super().__init__(rank_prior)
        self._accuracies = accuracies

    def rate(self, kind: Any) -> float:
        head, rank = kind[:2]
        rates = self._accuracies[head] if head < len(self._accuracies) else ()
        return rates[rank] if rank < len(rates) else 0.0

    def learn(self, kind: Any, hit: float) -> None:
        """Nothing: what was measured stays."""


def rank_prior(kind: Any) -> float:
    """The acceptance rate of (head from 0, rank), before anything was observed."""
    depth, rank = kind
    return float(0.5 * 0.85**depth * 0.4**rank)
