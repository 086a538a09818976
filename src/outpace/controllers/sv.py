"""``sv``: a companion scores the draft, and as much of it is verified as is expected to gain (Kim et al. 2025, arXiv
2509.24328, Speculative Verification).

The companion is a second draft model. Where it agrees with the drafter, the target is likely to agree, too: the overlap
of their distributions, sum of min(p_d, p_c), and the ratio min(1, p_c / p_d) at the drafted token index a table of how
often the target accepted. From these rates follows the verification length with the most expected tokens per time of
the batch. The table is calibrated by the verdicts of the namespace.

A sampled draw may be cut only by what does not depend on it: its ratio, and everything after it, would bias the output.
So sampled chains are cut by the overlap alone, one draw after the other. Of deterministic draft tokens any may be cut;
their p_d is one-hot, so that overlap and ratio are both the companion's probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence as Seq
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.acceptance_record import AcceptanceRecord
from outpace.controllers.base import Budget
from outpace.controllers.cost_model import CostModel
from outpace.controllers.named import NamedController, Setup
from outpace.controllers.policy import DraftPolicy
from outpace.controllers.predictor import ModelDraft
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import ROOT, TokenTree
from outpace.core.validation import StrictModel

_BUCKETS = 10


class SvSettings(StrictModel):
    """Settings of ``sv``."""

    companion: str = Field(
        "", description="name of the draft model that scores drafts; by default the first that the method does not use"
    )
    max_draft_tokens: int = Field(16, ge=1, le=128, description="maximum draft length")


class AgreementTable:
    """Target acceptance by how far companion and drafter agree. One for each namespace."""

    def __init__(self) -> None:
        self._records: dict[Hashable, AcceptanceRecord] = {}

    def _record(self, kind: tuple[bool, int]) -> AcceptanceRecord:
        # Before anything was observed the companion stands for the target: the overlap is the acceptance rate.
        return self._records.setdefault(kind, AcceptanceRecord((kind[1] + 0.5) / _BUCKETS))

    def rate(self, kind: tuple[bool, int], depth: int, rank: int = 0) -> float:
        """Acceptance of a draft token of this kind at this depth, given those before it. ``rank``: among siblings."""
        return self._record(kind).rate(depth, rank)

    def learn(self, kind: tuple[bool, int], rank: int, depth: int, *, hit: bool) -> None:
        """One was accepted, or not."""
        self._record(kind).add(hit, depth, rank)


def kind_of(agreement: float, likeliest: bool) -> tuple[bool, int]:
    """The table's index. ``agreement``: the overlap, or of a deterministic token the companion's probability, of which
    it is the ``likeliest``."""
    return likeliest, min(_BUCKETS - 1, int(_BUCKETS * agreement))


class VerificationPolicy(DraftPolicy):
    """Which of a request's draft tokens the target verifies: those with which the round commits most tokens per time,
    what the draft has taken included. ``spent(budget)``: that, in autoregressive steps, for the longest draft, since
    the length of a sampled one must not decide."""

    def __init__(self, table: AgreementTable, spent: Callable[[Budget], float]) -> None:
        self._table, self._spent = table, spent
        self._budget = Budget(0)
        self._kinds: list[tuple[tuple[bool, int], int]] = []
        """Of the tokens that the companion has scored, with their ranks as drafted: by node, of sampled chains by
        depth."""
        self._prob, self._tokens = 1.0, 1.0

    def budget(self, budget: Budget) -> Budget:
        self.spent = self._spent(budget)
        self._budget, self._kinds = budget.after(self.spent), []
        self._prob, self._tokens = 1.0, budget.base_tokens
        return budget

    def keeps(self, depth: int, overlap: float) -> bool:
        """Whether to verify the draw at ``depth`` of a sampled chain, and so to look at the next one. ``overlap``: of
        drafter and companion before it, which does not depend on the draw."""
        kind, costs = kind_of(overlap, likeliest=False), self._budget.relative_costs
        prob = self._prob * self._table.rate(kind, depth)
        if depth > 1:  # one is always verified: without it nothing would be learned
            count = depth - 1
            rest = costs[count:]
            row = min(((cost - rest[0]) / more for more, cost in enumerate(rest[1:], start=1)), default=math.inf)
            if costs and prob <= self._tokens / costs[min(count, len(costs) - 1)] * row:
                return False
        self._kinds.append((kind, 0))
        self._prob = prob
        self._tokens += prob
        return True

    def kept(self, tree: TokenTree, agreement: Seq[tuple[float, bool]]) -> TokenTree:
        """The part of a deterministic tree to verify. ``agreement[node]``: the companion's probability of its token,
        and whether that is its likeliest."""
        kinds = [
            (kind_of(*one), tree.children(parent).index(node))
            for node, (one, parent) in enumerate(zip(agreement, tree.parents, strict=True))
        ]
        probs: list[float] = []
        for node, parent in enumerate(tree.parents):
            before = 1.0 if parent == ROOT else probs[parent]
            kind, rank = kinds[node]
            probs.append(before * self._table.rate(kind, tree.depths[node], rank))
        tree.path_acceptance_probs[:] = probs
        order, ranked = tree.likeliest_first()
        size = max(1, self._budget.best_draft_size(ranked))
        self._kinds = [kinds[node] for node in order[:size]]
        return tree.only(order[:size])

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        if len(self._kinds) < len(tree):
            return
        node = ROOT
        for depth, token in enumerate(committed, start=1):
            right = tree.child(node, token)
            for child in tree.children(node):
                self._table.learn(*self._kinds[child], depth, hit=child == right)
            if right is None:
                return
            node = right


class SpeculativeVerification(NamedController):
    """Verifies the part of a draft that a companion expects to be accepted."""

    name = "sv"
    aliases = ("speculative-verification",)
    paper = "Kim et al. 2025, arXiv 2509.24328"
    summary = "A second draft model scores the draft; what it expects to be rejected is not verified."
    fits = "methods that draft chains or deterministic trees; it needs a second draft model"
    Settings = SvSettings
    companion = True

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, SvSettings)
        self._most = settings.max_draft_tokens
        self._costs = CostModel(setup.target, self._most)

    @classmethod
    def check(cls, setup: Setup) -> None:
        proposal = setup.proposal
        if proposal.sampled and proposal.tree:
            raise cls.refuse(setup, "it samples trees, and what was sampled may not be cut by what the companion finds")
        if proposal.keeps_unverified_draws:
            raise cls.refuse(setup, "it keeps draft tokens for later rounds, so none of them may be left out")

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        shape, known = self.setup.shape(metrics, batch, repeatable), self._costs.budget(metrics, batch, repeatable)
        limited = self.setup.of_length(shape, min(shape.depth, self._most))
        return replace(limited, relative_costs=known.relative_costs, base_tokens=known.base_tokens)

    def memory(self) -> AgreementTable:
        return AgreementTable()

    def policy(self, memory: Any, *, sampled: bool) -> VerificationPolicy:
        return VerificationPolicy(memory, self._drafting)

    def _drafting(self, budget: Budget) -> float:
        """What the draft's levels take, and the companion's forward over them."""
        if budget.depth <= 0:
            return 0.0
        batch, companion = max(1, int(budget.base_tokens)), self.setup.companion
        drafting = max(self.setup.drafting.levels([1] * budget.depth, batch), default=0.0)
        if companion is None:
            return drafting
        return drafting + ModelDraft(self.setup.target, [companion]).level(budget.depth, batch)
