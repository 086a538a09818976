"""The distribution that a rule commits a token from after a node, in closed form, for the rules that have one.

At most one draft token is sampled there. What is returned is the distribution over the draw as well: every token that
the drafter could have drawn counts with its probability. Of ``target-first``, which judges a token by what was drafted
below it, it is the distribution given the whole draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.bounds import view
from outpace.acceptance.forgiving import Forgiving
from outpace.acceptance.grouped import Grouped
from outpace.acceptance.relaxed_target import Proposed, RelaxedTarget
from outpace.acceptance.target_first import TargetFirst
from outpace.acceptance.typical import Typical
from outpace.core.token_distribution import DenseDistribution
from outpace.core.tree import DETERMINISTIC, ROOT
from outpace.targets.base import TreeScores

_LOOKED_AT = 2048
"""Tokens of a sampled row for which a rule is asked whether it accepts them: the most probable ones."""


def closed_form(rule: AcceptanceRule, scores: TreeScores, node: int) -> Tensor | None:
    """The committed token's distribution after ``node``, (V,) float64, above temperature 0; None: none is known."""
    draws = scores.tree.draws_at(node)
    if isinstance(rule, TargetFirst):
        return rule.first_distribution(scores) if node == ROOT else scores.p(node).double()
    if isinstance(rule, RelaxedTarget):
        return _relaxed_target(rule, scores, node)
    if len(draws) != 1 or draws[0].q_row == DETERMINISTIC:
        return None
    p = scores.p(node).double()
    q = scores.tree.q_rows[draws[0].q_row].distribution(DenseDistribution(p)).dense().to(p)
    if isinstance(rule, Forgiving):
        kept, rest = torch.minimum(q, p), (p - q).clamp(min=0.0)
        if not rule.exact:
            accepted = rule.accepted(view(scores, node))
            top = q.topk(min(_LOOKED_AT, len(q))).indices
            forgiven = [token for token in top[(q[top] > 0) & (p[top] > 0)].tolist() if accepted(token)]
            kept[forgiven] = q[forgiven]
    elif isinstance(rule, Grouped):
        kept, rest = _of_groups(rule.groups(p), p, q)
    elif isinstance(rule, Typical):
        kept = q * (p > rule.threshold(view(scores, node)))
        rest = torch.zeros_like(p).index_fill_(0, p.argmax(), 1.0) if rule.settings.greedy_first else p
    else:
        return None
    total = float(rest.sum())
    return kept + max(0.0, 1.0 - float(kept.sum())) * (rest / total if total > 0.0 else p)


def _relaxed_target(rule: RelaxedTarget[Any], scores: TreeScores, node: int) -> Tensor:
    """What such a rule verifies against exactly, which is the committed token's distribution whatever is drawn."""
    p, draws = scores.distribution.at(node), scores.tree.draws_at(node)
    relaxed = None if rule.exact or not draws else rule.relaxed(p.dense(), Proposed.of(scores.tree, draws, p))
    found = (p.dense() if relaxed is None else relaxed).double()
    return found / found.sum()


def _of_groups(groups: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """What is accepted of q where groups are verified, and the residual: groups of max(0, p - q), p's shares within."""
    size = int(groups.max()) + 1
    p_groups, q_groups = (p.new_zeros(size).index_add_(0, groups, one) for one in (p, q))
    accepted = (p_groups / q_groups.clamp(min=1e-300)).clamp(max=1.0)[groups]
    rest = p * ((p_groups - q_groups).clamp(min=0.0) / p_groups.clamp(min=1e-300))[groups]
    return q * accepted * (p > 0), rest
