"""What the bound level has found of one rule: the largest values, and where a promise was broken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.bounds import EXCESS_NLL, MEASURES, total_variation, view
from outpace.certify.certificate import BoundCheck
from outpace.certify.exact import TOLERANCE
from outpace.core.tree import ROOT
from outpace.core.tree_distribution import TreeDistribution
from outpace.targets.base import TreeScores


@dataclass
class RuleFindings:
    """What was found of one rule so far. ``worst``: the largest excess over a limit, and where."""

    rule: AcceptanceRule
    nodes: int = 0
    outputs: int = 0
    """Settings in which whole outputs were enumerated whose drafts the rule judged."""
    largest: float | None = None
    nearest: dict[str, float] = field(default_factory=dict)
    """The largest share of a limit that was reached, by measure."""
    worst: float = 0.0
    where: str = ""
    total_variation: float = 0.0
    notes: list[str] = field(default_factory=list)

    def see(self, scores: TreeScores, h: Tensor, where: str) -> None:
        """Compare the distribution of the committed token after the root with the target's."""
        bound = self.rule.bound
        if not h.isfinite().all():
            self.fail(math.inf, f"{where}: a probability that is no finite number")
            return
        probs, committed = _possible(scores), h > TOLERANCE
        if bool((probs[committed] == 0.0).any()):
            self.fail(math.inf, f"{where}: a token that cannot follow is committed")
            return
        if bound is None:
            return
        node = view(scores, ROOT)
        if scores.sequence.params.greedy:
            value = float((probs.max() / probs[committed].min()).log())
            limit, measure = self.rule.greedy_limit(node), EXCESS_NLL
        else:
            value, limit = MEASURES[bound.measure](h, probs), self.rule.limit(node)
            measure = bound.measure
            self.largest = max(value, self.largest or 0.0)
            if self.rule.exact and (off := total_variation(h, probs)) > TOLERANCE:
                # Other divergences are squares of it: what is within rounding of 0 there may not be here.
                self.fail(off, f"{where}: settings that mean lossless, but a total variation of {off:.2g}")
        self.nodes += 1
        if math.isnan(limit):
            self.fail(math.inf, f"{where}: a limit that is no number")
        if value > limit * (1.0 + TOLERANCE) + TOLERANCE and value - limit > self.worst:
            self.worst = value - limit
            self.where = f"{where}: {measure} {value:.4g}, limit {limit:.4g}"
        if limit > TOLERANCE:
            self.nearest[measure] = max(value / limit, self.nearest.get(measure, 0.0))  # of an infinite one, 0

    def fail(self, size: float, where: str) -> None:
        """Something that needs no limit is wrong."""
        if size > self.worst:
            self.worst, self.where = size, where

    def check(self) -> BoundCheck:
        bound = self.rule.bound
        promised = bound is not None or self.rule.exact
        return BoundCheck(
            rule=self.rule.described,
            measure=None if bound is None else bound.measure,
            limit=None if bound is None else bound.limit,
            lossless=self.rule.exact and not self.worst and self.outputs > 0,
            holds=not self.worst if promised or self.worst else None,
            nodes=self.nodes,
            largest=self.largest,
            outputs=self.outputs,
            nearest=tuple(self.nearest.values()),
            total_variation=self.total_variation,
            where=self.where,
            note="; ".join(self.notes),
        )


def _possible(scores: TreeScores) -> Tensor:
    """The distribution after the root; of a greedy request the model's at temperature 1, by another way than that of
    rules."""
    if not scores.sequence.params.greedy:
        return scores.p(ROOT)
    sampler = scores.sequence.sampler.fork()
    sampler.params = replace(sampler.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return TreeDistribution(sampler, scores.tree, scores.logits).p(ROOT)
