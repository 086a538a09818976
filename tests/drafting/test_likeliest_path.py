"""The likeliest path alone, for engines that verify no more: the same path as among all successors, found sooner."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

from outpace.controllers.base import Budget
from outpace.core.tree import TokenTree
from outpace.drafting.best_first import FLOOR, BestFirst, grow, grow_path
from outpace.drafting.calibration import Calibration
from outpace.methods.lookup.recycling import Recycling, RecyclingState
from outpace.targets.table import TableTarget
from test_calibration import TARGET, Tabled, candidate_trees

VOCAB = 9


@given(candidate_trees(), st.integers(0, 4), st.integers(0, 6))
def test_it_is_the_tree_of_the_best_successors(candidates: Tabled, depth: int, nodes: int) -> None:
    state = candidates.begin(TARGET.sequence([1, 2]))

    def best(place: object) -> list[object]:
        found = candidates.likeliest(state, place)
        return [] if found is None else [found]

    tree, kinds = grow((), best, depth, nodes, FLOOR)  # type: ignore[arg-type]
    path = grow_path((), lambda place: candidates.likeliest(state, place), min(depth, nodes), FLOOR)
    assert (path.tokens, path.kinds) == (tree.tokens, kinds)
    assert path.path_acceptance_probs == pytest.approx(tree.path_acceptance_probs)
    assert tree.is_chain


@given(candidate_trees(), st.floats(0.01, 0.8))
def test_as_much_of_it_is_drafted_as_gains_and_all_of_it_teaches(candidates: Tabled, cost: float) -> None:
    candidates.single_path = True
    state = candidates.begin(TARGET.sequence([1, 2]))
    whole = candidates.propose(state, Budget(4, 4))
    budget = Budget(4, 4, relative_costs=tuple(1.0 + cost * count for count in range(5)))
    drafted = candidates.propose(state, budget)
    assert drafted.tokens == whole.tokens[: budget.best_draft_size(whole.path_acceptance_probs)]
    assert drafted.is_chain
    assert state.path is not None
    assert state.path.tokens == whole.tokens


@given(candidate_trees(), st.lists(st.integers(0, 2), max_size=5))
def test_it_teaches_as_a_tree_would(candidates: Tabled, committed: list[int]) -> None:
    kinds = [kind for entries in candidates.edges.values() for _, kind in entries]
    state = candidates.begin(TARGET.sequence([1, 2]))
    tokens, probs, found = grow_path((), lambda place: candidates.likeliest(state, place), 4, FLOOR)
    prior = dict(enumerate(map(candidates.rates.rate, range(5))))
    one, other = Calibration(prior.__getitem__), Calibration(prior.__getitem__)
    one.learn_path(tokens, found, committed)
    other.learn_tree(TokenTree.chain(tokens, path_acceptance_probs=probs), found, committed)
    assert [one.rate(kind) for kind in kinds] == [other.rate(kind) for kind in kinds]


@st.composite
def learned(draw: st.DrawFn) -> tuple[Recycling, RecyclingState]:
    """Token recycling with rows from text and from scores, at rates that observations have moved."""
    rng = Random(draw(st.integers(0, 10_000)))
    drafter = Recycling(topk=4, context=draw(st.integers(1, 3)))
    text = [rng.randrange(VOCAB) for _ in range(draw(st.integers(4, 60)))]
    state = drafter.begin(TableTarget(VOCAB).sequence(text))
    for key, row in state.rows.items():
        if rng.random() < 0.5:  # as if the target had scored it: certainties descend
            tokens = rng.sample(range(VOCAB), len(row))
            certainties = sorted((rng.randrange(4) for _ in row), reverse=True)
            state.rows.put(key, list(zip(tokens, certainties, strict=True)))
    for _ in range(40):
        state.calibration.learn((rng.randrange(1, 4), rng.choice((0, 1, 2, 3, 11))), rng.random() < 0.5)
    return drafter, state


@given(learned())
def test_recycling_finds_it_without_the_others(case: tuple[Recycling, RecyclingState]) -> None:
    drafter, state = case
    place = drafter.root(state)
    for _ in range(6):
        found = drafter.likeliest(state, place)
        assert found == BestFirst.likeliest(drafter, state, place)
        if found is None:
            return
        place = found[1].place
