"""The transport bound against closed forms, and against the min-cut that is its dual."""

from __future__ import annotations

from itertools import chain, combinations, product as every

import numpy as np
import pytest

from outpace.certify.transport import draw_sets, draws_bound, optimal_acceptance

Sets = dict[frozenset[int], float]


def random_row(vocab: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(vocab))


def min_cut(p: np.ndarray, proposal_distribution: Sets) -> float:
    """min over A of p outside A plus the probability that a draw hits A: the most that can flow from sets to tokens."""
    tokens = range(len(p))
    subsets = chain.from_iterable(combinations(tokens, size) for size in range(len(p) + 1))
    return min(
        1
        - float(p[list(part)].sum())
        + sum(weight for drawn, weight in proposal_distribution.items() if drawn & set(part))
        for part in subsets
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("replacement", [True, False])
def test_the_bound_is_the_min_cut(seed: int, replacement: bool) -> None:
    vocab = 3 + seed % 3
    p, q = random_row(vocab, seed), random_row(vocab, seed + 50)
    for draws in (1, 2, 3):
        proposal_distribution = draw_sets(q, draws, replacement)
        assert optimal_acceptance(p, proposal_distribution) == pytest.approx(
            min_cut(p, proposal_distribution), abs=1e-9
        )


@pytest.mark.parametrize("seed", range(5))
def test_one_draw_is_the_overlap(seed: int) -> None:
    p, q = random_row(5, seed), random_row(5, seed + 9)
    for replacement in (True, False):
        assert optimal_acceptance(p, draw_sets(q, 1, replacement)) == pytest.approx(float(np.minimum(p, q).sum()))


def test_the_ends_of_the_scale() -> None:
    p = random_row(4, 1)
    assert optimal_acceptance(p, draw_sets(p, 1, True)) == pytest.approx(1)
    assert optimal_acceptance(np.array([1.0, 0, 0]), draw_sets(np.array([0, 0.5, 0.5]), 2, True)) == pytest.approx(0)
    assert optimal_acceptance(p, draw_sets(random_row(4, 2), 4, False)) == pytest.approx(1), "all tokens are drawn"
    assert optimal_acceptance(p, {frozenset({0, 2}): 1.0}) == pytest.approx(float(p[0] + p[2])), "a certain set"


@pytest.mark.parametrize("draws", [1, 2, 4])
def test_two_tokens_in_closed_form(draws: int) -> None:
    """Draws miss a token with (1 - q)^k; only what p has beyond the rest is out of reach."""
    for first, other in ((0.9, 0.2), (0.5, 0.45), (0.02, 0.7)):
        p, q = np.array([first, 1 - first]), np.array([other, 1 - other])
        lost = sum(max(0.0, p[token] - (1 - (1 - q[token]) ** draws)) for token in (0, 1))
        assert optimal_acceptance(p, draw_sets(q, draws, True)) == pytest.approx(1 - lost)


@pytest.mark.parametrize("seed", range(5))
def test_certain_tokens_and_one_sampled_in_closed_form(seed: int) -> None:
    p, q = random_row(5, seed), random_row(5, seed + 20)
    q[[0, 3]] = 0
    q /= q.sum()
    proposal_distribution = {frozenset({0, 3, token}): float(q[token]) for token in (1, 2, 4)}
    expected = p[0] + p[3] + np.minimum(p, q)[[1, 2, 4]].sum()
    assert optimal_acceptance(p, proposal_distribution) == pytest.approx(float(expected))


@pytest.mark.parametrize("replacement", [True, False])
def test_more_draws_never_hurt(replacement: bool) -> None:
    p, q = random_row(5, 3), random_row(5, 4)
    bounds = [optimal_acceptance(p, draw_sets(q, draws, replacement)) for draws in (1, 2, 3, 4)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]


def test_the_law_of_the_sets() -> None:
    q = np.array([0.5, 0.3, 0.2, 0.0])
    assert draw_sets(q, 1, True) == pytest.approx({frozenset({0}): 0.5, frozenset({1}): 0.3, frozenset({2}): 0.2})
    again = draw_sets(q, 2, True)
    assert again[frozenset({0})] == pytest.approx(0.25)
    assert again[frozenset({0, 1})] == pytest.approx(0.3)
    once = draw_sets(q, 2, False)
    assert once[frozenset({0, 1})] == pytest.approx(0.5 * 0.3 / 0.5 + 0.3 * 0.5 / 0.7)
    assert draw_sets(q, 9, False) == pytest.approx({frozenset({0, 1, 2}): 1.0}), "no more than there is"
    for draws, replacement in every((1, 2, 3), (True, False)):
        proposal_distribution = draw_sets(q, draws, replacement)
        assert sum(proposal_distribution.values()) == pytest.approx(1)
        assert all(3 not in drawn for drawn in proposal_distribution), "tokens without probability are not drawn"
        assert replacement or all(len(drawn) == draws for drawn in proposal_distribution)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("draws", "replacement"), [(1, True), (2, True), (3, True), (1, False), (2, False)])
def test_the_short_form_is_the_linear_program(seed: int, draws: int, replacement: bool) -> None:
    p, q = random_row(5, seed), random_row(5, seed + 30)
    if seed % 3 == 0:
        q[seed % 5] = 0.0
        q /= q.sum()
    expected = optimal_acceptance(p, draw_sets(q, draws, replacement))
    assert draws_bound(p, q, draws, replacement) == pytest.approx(expected, abs=1e-9)


def test_the_short_form_of_a_certain_draw() -> None:
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.0, 1.0, 0.0])
    for draws, replacement in ((1, True), (3, True), (2, False)):
        assert draws_bound(p, q, draws, replacement) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="without replacement"):
        draws_bound(p, p, 3, replacement=False)
