"""DynamicTreeBuilder: a draft model runs the rows that trees of :mod:`outpace.drafting.dynamic_tree` ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.candidate_tree import CandidateTree
from outpace.drafting.dynamic_tree import DynamicTree
from outpace.drafting.tree_builder import TreeBuilder
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class DynamicTreeBuilder(TreeBuilder):
    """A draft model runs the rows that ``candidates`` ask for.

    By default these are the most probable paths under the distribution that the request samples from (as SpecInfer,
    Miao et al. 2024, arXiv 2305.09781, expands by top-k), deterministic at every temperature.
    """

    asks_policy = True
    weighs_costs = True

    def __init__(
        self, sequence: Sequence, budget: Budget, chance: Chance, candidates: CandidateTree | None = None
    ) -> None:
        super().__init__(sequence, budget, chance)
        whole = range(sequence.sampler.vocab_size)
        self._candidates = candidates or DynamicTree(
            budget, None, whole, expand=budget.max_nodes, level=budget.level_steps
        )
        self._asked = [ROOT]
        """The nodes of ``_drafted`` that ran last."""

    def grow(self, logits: Tensor) -> bool:
        wanted = self._candidates.take(self._rows(logits))
        self._asked = [self._run_after(row - 1, token) for row, token in wanted]
        return bool(wanted)

    def _rows(self, logits: Tensor) -> Tensor:
        """Logits after every node that ran last, (n, V), to rank tokens by."""
        return self._ranking(self._distribution(logits), self._asked)

    def proposal(self) -> TokenTree:
        return self._candidates.tree()

    def learn(self, committed: Seq[int], target_row: Callable[[int], TokenDistribution] | None = None) -> None:
        self._candidates.learn(committed)  # by what was committed, at every temperature
