"""Merged trees: every draw kept, deterministic nodes cut where they stop paying, and the law exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outpace.certify.exact import certify_exact
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.fixed import Fixed
from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.metrics import RequestMetrics
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.merged import Merge, cut
from outpace.methods.registry import build
from outpace.targets.base import Scores, Sequence, TreeScores
from outpace.targets.table import TableTarget
from test_combined import FEW, Witness


@st.composite
def certain_trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree()
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(ROOT, len(tree) - 1))
        above = 1.0 if parent == ROOT else tree.path_acceptance_probs[parent]
        tree.add(parent, draw(st.integers(0, 3)), path_acceptance_prob=above * draw(st.floats(0.05, 1.0)))
    return tree


@given(st.lists(certain_trees(), min_size=1, max_size=3), st.integers(0, 15), st.floats(0.0, 0.5))
@settings(max_examples=100, deadline=None)
def test_the_cut_keeps_the_likeliest_paths_that_pay(trees: list[TokenTree], nodes: int, relative_cost: float) -> None:
    whole = TokenTree.merge(trees)
    relative_costs = tuple(1.0 + relative_cost * count for count in range(40)) if relative_cost > 0.1 else ()
    kept = cut(whole, Budget(9, nodes, relative_costs=relative_costs))
    paths = {tuple(whole.path_tokens(node)): whole.path_acceptance_probs[node] for node in range(len(whole))}
    left = {tuple(kept.path_tokens(node)): kept.path_acceptance_probs[node] for node in range(len(kept))}
    assert all(paths[path] == path_acceptance_prob for path, path_acceptance_prob in left.items())
    assert len(kept) <= nodes
    out = [path_acceptance_prob for path, path_acceptance_prob in paths.items() if path not in left]
    if not relative_costs:
        assert len(kept) == min(nodes, len(whole))
    else:  # no node beyond the cut, nor any fewer, would have promised more tokens for the price
        best = sorted(paths.values(), reverse=True)[:nodes]
        pace = [(1.0 + sum(best[:count])) / relative_costs[count] for count in range(len(best) + 1)]
        assert (1.0 + sum(left.values())) / relative_costs[len(left)] == pytest.approx(max(pace))
    reachable = min(left.values(), default=1.0)
    assert all(path_acceptance_prob <= reachable or nodes == 0 for path_acceptance_prob in out) or not left


def united(merge: Merge, sequence: Sequence, budget: Budget) -> TokenTree:
    return merge.propose_batch([merge.begin(sequence)], [budget])[0]


def test_a_union_is_cut_as_one_and_sampled_draws_never() -> None:
    class Sampled(Witness):
        def propose_batch(self, states: Any, budgets: Any) -> list[TokenTree]:
            row = QRow(torch.ones(9))
            return [TokenTree.chain([self.token, 0], [row, row]) for _ in states]

    one, two = Witness(1, path_acceptance_prob=0.9), Witness(2, path_acceptance_prob=0.1)
    sequence = TableTarget(9).sequence([0])
    budget = Budget(1, 8, relative_costs=(1.0, 1.2, 1.4), parts=(Budget(1), Budget(1)))
    assert united(Merge([one, two], ["a", "b"]), sequence, budget).tokens == [1]
    assert united(Merge([two, one], ["b", "a"]), sequence, budget).tokens == [1]
    free = Budget(1, 8, parts=(Budget(1), Budget(1)))
    assert sorted(united(Merge([two, one], ["b", "a"]), sequence, free).tokens) == [1, 2]
    three = Sampled(3)
    three.proposal = Proposal(sampled=True)
    dear = Budget(2, 8, relative_costs=(1.0, 9.0, 9.0, 9.0), parts=(Budget(1), Budget(2)))
    assert united(Merge([one, three], ["a", "c"]), sequence, dear).tokens == [3, 0]


def test_side_nodes_come_along() -> None:
    class Looking(Witness):
        def propose_batch(self, states: Any, budgets: Any) -> list[TokenTree]:
            trees = super().propose_batch(states, budgets)
            for tree in trees:
                tree.auxiliary_tokens.append(AuxiliaryToken(5, 2, (ROOT, 0), owner=self))
            return trees

    one, two, three = Looking(1), Looking(2), Witness(3)
    merge = Merge([one, two, three], ["a", "b", "c"])
    target = TableTarget(9)
    sequence = target.sequence([0])
    budget = CombinedController([Fixed(1)] * 3, united=True).budget(RequestMetrics(), 1)
    tree = united(merge, sequence, budget)
    scores = target.score([(sequence, tree)])[0]
    for part in (one, two):
        [row] = scores.auxiliary_rows(part)
        assert scores.logits[row].equal(target.table((0, part.token, 5)))


def test_a_pass_is_handed_on_where_the_union_begins_with_its_draft() -> None:
    class Passing(Witness):
        done = 1

        def reusable_forward(self, states: Any) -> Scores | None:
            tree = TokenTree.chain([self.token])
            return Scores([TreeScores(states[0].sequence, tree, None, {})], self.token)  # type: ignore[arg-type]

    sequence = TableTarget(9).sequence([0])
    budget = Budget(1, 8, parts=(Budget(1), Budget(1)))
    for parts, expected in (([Passing(1), Witness(2)], 1), ([Witness(2), Passing(1)], None)):
        merge = Merge(parts, ["a", "b"])
        state = merge.begin(sequence)
        assert merge.reusable_forward([state]) is None
        merge.propose_batch([state], [budget])
        start = merge.reusable_forward([state])
        assert (None if start is None else start.forward_state) == expected


COMBINATIONS: list[dict[str, Any]] = [
    {
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 2}},
    },
    {
        "parts": ("draft-model", "sam"),
        "settings": {"draft-model": {"num_draft_tokens": 2}, "sam": {"num_draft_tokens": 2}},
    },
    {"parts": ("rsd", "sam"), "settings": {"rsd": {"branching": (2,)}, "sam": {"num_draft_tokens": 1}}},
    {"parts": ("rsd", "draft-model"), "settings": {"rsd": {"branching": (2,)}, "draft-model": {"num_draft_tokens": 1}}},
    {
        "parts": ("pld", "sampled-tree"),
        "settings": {"sampled-tree": {"branching": (2,)}, "pld": {"num_draft_tokens": 1}},
    },
    {"parts": ("sam", "sampled-tree"), "settings": {"sampled-tree": {"branching": (2,), "draws": "greedy"}}},
]


@pytest.mark.parametrize("rule", [None, "recursive-rejection"])
@pytest.mark.parametrize("settings", COMBINATIONS, ids=lambda one: "+".join(one["parts"]))
def test_exact_with_parts_of_every_kind(settings: dict[str, Any], rule: str | None) -> None:
    certificate = certify_exact(
        "merge", lambda context: build("merge", context, settings, rule), FEW[2:] if rule else FEW[1:]
    )
    assert certificate.lossless, certificate.verdict
