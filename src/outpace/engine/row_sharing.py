"""The rows of one forward are shared out over the drafts of a batch; what is not expected to gain is cut."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.controllers.base import Budget
from outpace.controllers.row_allocation import allot, mean_costs
from outpace.core.tree import TokenTree
from outpace.engine.request import Generation
from outpace.targets.base import Scores


def share_rows(active: Seq[Generation], budgets: Seq[Budget], trees: Seq[TokenTree]) -> list[TokenTree]:
    """The drafts of a round, cut to the draft tokens that raise the expected tokens per time of the whole batch.

    Each drafter has sized its drafts as if no other request drafted. Only deterministic drafts of requests whose
    controller states costs for a shared round are cut: sampled draft tokens and fixed lengths stay as they are, and so
    does what a part of this very forward has been run for.
    """
    sharing = [at for at, tree in enumerate(trees) if tree.tokens and _may_be_cut(active[at], budgets[at], tree)]
    if not sharing or reusable_forward(active) is not None:
        return list(trees)
    orders, probs = zip(*(trees[at].likeliest_first() for at in sharing), strict=True)
    rows = sum(len(tree) + len(tree.auxiliary_tokens) for tree in trees)
    counts, _ = allot(
        probs,
        mean_costs([budgets[at].relative_costs for at in sharing]),
        max(budgets[at].base_tokens for at in sharing),
        taken=rows - sum(map(len, orders)),
        spent=_spent([active[at] for at in sharing]),
    )
    out = list(trees)
    for at, order, count in zip(sharing, orders, counts, strict=True):
        if count < len(order):
            out[at] = trees[at].only(order[:count])
    return out


def reusable_forward(active: Seq[Generation]) -> Scores | None:
    """What a drafter that is alone in the batch has already run of this round's forward."""
    drafters = {id(one.drafter): one.drafter for one in active}
    if len(drafters) > 1:
        return None
    [drafter] = drafters.values()
    return drafter.reusable_forward([one.draft_state for one in active])


def _may_be_cut(one: Generation, budget: Budget, tree: TokenTree) -> bool:
    shared = budget.base_tokens > 1.0 and bool(budget.relative_costs)
    return shared and one.drafter.may_be_cut(tree, greedy=one.request.params.greedy)


def _spent(sharing: Seq[Generation]) -> float:
    """What drafting has cost, in autoregressive steps of the round."""
    drafters = {id(one.drafter): one.drafter for one in sharing}
    return sum(
        drafter.draft_steps([one.draft_state for one in sharing if one.drafter is drafter])
        for drafter in drafters.values()
    )
