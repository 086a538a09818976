"""Winners of races that share their noise: exact probabilities, against their definition and against sampling."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from outpace.core.chance import ChanceSource, Enumeration, SeededChance
from outpace.core.races import probability
from outpace.core.shared_noise import SHARED_NOISE, SharedNoise

ROWS: dict[int, list[tuple[float, ...]]] = {
    2: [(0.3, 0.7), (0.6, 0.4)],
    3: [(0.2, 0.3, 0.5), (0.5, 0.5, 0.0), (0.1, 0.2, 0.7)],
    4: [(0.1, 0.2, 0.3, 0.4), (0.4, 0.3, 0.2, 0.1), (0.25, 0.0, 0.25, 0.5)],
    5: [(0.1, 0.3, 0.2, 0.25, 0.15), (0.3, 0.1, 0.2, 0.0, 0.4)],
}


@pytest.mark.parametrize("size", ROWS)
def test_joint_probabilities_are_those_of_sampled_noise(size: int) -> None:
    rows = ROWS[size]
    samples = 200_000
    times = np.random.default_rng(size).standard_exponential((samples, size))
    counts = Counter(zip(*[(np.array(row) / times).argmax(1).tolist() for row in rows], strict=True))
    supports = [[index for index, weight in enumerate(row) if weight] for row in rows]
    total = 0.0
    for winners in product(*supports):
        p = probability(tuple(zip(rows, winners, strict=True)))
        total += p
        assert counts[winners] / samples == pytest.approx(p, abs=5 * np.sqrt(p / samples) + 1e-9)
    assert total == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("size", ROWS)
def test_two_races_agree_as_the_paper_says(size: int) -> None:
    """Daliri et al. 2024: both pick x with probability 1 / sum_j max(p_j / p_x, q_j / q_x)."""
    p, q = ROWS[size][:2]
    for x in range(size):
        if p[x] and q[x]:
            expected = 1 / sum(max(p[j] / p[x], q[j] / q[x]) for j in range(size))
            assert probability(((p, x), (q, x))) == pytest.approx(expected, abs=1e-12)


def test_equal_and_proportional_weights_have_one_winner() -> None:
    p = (0.2, 0.3, 0.5)
    for x, y in product(range(3), repeat=2):
        expected = p[x] if x == y else 0.0
        assert probability(((p, x), (p, y))) == pytest.approx(expected, abs=1e-12)
        assert probability(((p, x), (tuple(3 * one for one in p), y))) == pytest.approx(expected, abs=1e-9)


def test_certain_winners() -> None:
    """top-k 1, or top-p on a sharp row, leaves one token: alone, beside another such race, and beside an open one."""
    first, last, p = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.2, 0.3, 0.5)
    assert probability(((first, 0),)) == 1.0
    assert probability(((last, 2), (first, 0))) == pytest.approx(1.0)
    assert probability(((last, 2), (last, 2))) == pytest.approx(1.0)
    for x in range(3):
        assert probability(((last, 2), (p, x))) == pytest.approx(p[x])


def test_the_enumeration_runs_the_races_of_a_stream_with_one_noise() -> None:
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ROWS[3][:2])

    def program(source: ChanceSource) -> tuple[int, int, int, int]:
        noise = SharedNoise()
        return (
            noise.at(source, 4).race(q),
            source.at(4, SHARED_NOISE).race(p),
            noise.at(source, 4).race(q),
            noise.at(source, 5).race(p),
        )

    found = dict(Enumeration.outcomes(program))
    assert sum(found.values()) == pytest.approx(1.0)
    for (drafted, token, again, other), weight in found.items():
        joint = probability(((ROWS[3][1], drafted), (ROWS[3][0], token)))
        assert again == drafted
        assert weight == pytest.approx(joint * ROWS[3][0][other], abs=1e-9)
    samples = 4000
    counts = Counter(program(SeededChance(seed)) for seed in range(samples))
    assert set(counts) <= set(found)
    for outcome, weight in found.items():
        assert counts[outcome] / samples == pytest.approx(weight, abs=5 * np.sqrt(weight / samples))


def test_seeded_races_are_of_their_weights_and_never_won_without_one() -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 2.0, 0.0])
    counts = Counter(SeededChance(1).at(position, SHARED_NOISE).race(weights) for position in range(8000))
    assert set(counts) == {1, 2, 4, 5}
    for index, count in counts.items():
        p = float(weights[index]) / 10
        assert count / 8000 == pytest.approx(p, abs=5 * np.sqrt(p / 8000))
    for bad in ([0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="weights must be"):
            SeededChance(0).at(0, SHARED_NOISE).race(torch.tensor(bad))


def test_noise_that_was_forgotten_comes_back_the_same() -> None:
    source, noise, weights = SeededChance(3), SharedNoise(), torch.rand(50)
    before = [noise.at(source, position).race(weights) for position in range(9)]
    held = noise.at(source, 7)
    noise.forget(5)
    assert noise.at(source, 7) is held
    assert [noise.at(source, position).race(weights) for position in range(9)] == before
    noise.forget()
    assert noise.at(source, 7) is not held
    assert [noise.at(source, position).race(weights) for position in range(9)] == before
