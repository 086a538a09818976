"""How likely draft tokens are that a copying and a reading drafter propose together."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.agreement import mixed

Level = dict[int, float]
ALL = Budget(8)


def tree(first: Level, second: Level | None = None) -> TokenTree:
    """Draft tokens after the root, and others after the first of them, with probabilities given what is before."""
    found = TokenTree()
    for token, prob in first.items():
        found.add(ROOT, token, path_acceptance_prob=prob)
    before = next(iter(first.values()), 1.0)
    for token, prob in (second or {}).items():
        found.add(0, token, path_acceptance_prob=before * prob)
    return found


def probs(copied: TokenTree, other: TokenTree) -> dict[tuple[int, ...], float]:
    union = mixed(copied, other, ALL)
    return {tuple(union.path_tokens(node)): union.path_acceptance_probs[node] for node in range(len(union))}


def test_a_copied_token_that_the_other_lacks_is_rarely_right_and_one_that_it_has_more_often_than_it_says() -> None:
    found = probs(tree({1: 0.6}), tree({1: 0.2, 2: 0.5}))
    assert found[(1,)] == pytest.approx(0.64 * 0.2 + 0.36)
    assert found[(2,)] == pytest.approx(0.64 * 0.5)
    assert probs(tree({1: 0.2}), tree({2: 0.5}))[(1,)] == pytest.approx(0.04)


def test_where_only_one_drafts_its_probabilities_stand() -> None:
    found = probs(tree({1: 0.5}, {7: 0.8}), tree({2: 0.5}, {9: 0.4}))
    assert found[(1, 7)] == pytest.approx(found[(1,)] * 0.8)
    assert found[(2, 9)] == pytest.approx(found[(2,)] * 0.4)
    assert probs(TokenTree(), tree({2: 0.5}, {9: 0.4})) == pytest.approx({(2,): 0.5, (2, 9): 0.2})


LEVELS = st.dictionaries(st.integers(0, 6), st.floats(0.0, 1.0), max_size=4).map(
    lambda level: {token: prob / max(1.0, sum(level.values())) for token, prob in level.items()}
)


@given(LEVELS, LEVELS, LEVELS, LEVELS)
def test_probabilities_of_siblings_add_up_to_at_most_their_parents(a: Level, b: Level, c: Level, d: Level) -> None:
    copied, other = tree(a, b if a else None), tree(c, d if c else None)
    union = mixed(copied, other, ALL)
    stated = union.path_acceptance_probs
    whole = TokenTree.merge((copied, other))
    assert sorted(map(union.path_tokens, range(len(union)))) == sorted(map(whole.path_tokens, range(len(whole))))
    assert union.is_deterministic and len(union.draws) == len(union)
    for node in (ROOT, *range(len(union))):
        before = 1.0 if node == ROOT else stated[node]
        assert sum(stated[child] for child in union.children(node)) <= before + 1e-9
    assert all(prob >= 0.0 for prob in stated)
