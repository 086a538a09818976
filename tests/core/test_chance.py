"""Random numbers: reproducible, independent by key, and exactly enumerable."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats

from outpace.core.chance import Chance, ChanceSource, Enumeration, SeededChance

WEIGHTS = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 2.0, 0.0])


def numbers(seed: int, position: int, purpose: str, count: int = 64) -> list[float]:
    stream = SeededChance(seed).at(position, purpose)
    return [stream.uniform() for _ in range(count)]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.sampled_from(["draft", "accept", ""]))
def test_a_stream_is_a_function_of_its_key(seed: int, position: int, purpose: str) -> None:
    assert numbers(seed, position, purpose, 4) == numbers(seed, position, purpose, 4)
    others = [(seed + 1, position, purpose), (seed, position + 1, purpose), (seed, position, purpose + "x")]
    for other in others:
        assert not set(numbers(*other, 4)) & set(numbers(seed, position, purpose, 4))


def test_the_key_of_a_request_is_its_seed_its_texts_and_its_number_in_the_namespace() -> None:
    """Whatever brings an earlier answer back, its numbers do not come back with it."""
    requests: list[tuple[int, tuple[tuple[int, ...], ...], int]] = [
        (0, ((1, 2, 3),), 0),
        (1, ((1, 2, 3),), 0),
        (0, ((1, 2, 3),), 1),
        (0, ((1, 2, 4),), 0),
        (0, ((1, 2, 3, 4),), 0),
        (0, ((1, 2), (3,)), 0),
        (0, ((1,), (2, 3)), 0),
        (0, ((1, 2, 3), ()), 0),
        (0, ((1, 2, 3), (5, 6)), 0),
        (0, ((1, 2, 3), (6, 5)), 0),
        (0, (), 10),
        (0, ((10,),), 1),
    ]
    assert len({SeededChance(*request).key for request in requests}) == len(requests)
    for seed, texts, earlier in requests:
        again = SeededChance(seed, tuple(map(list, texts)), earlier)
        assert again.key == SeededChance(seed, texts, earlier).key
        assert SeededChance(seed + 7, texts, earlier).reseeded(seed).key == again.key
    assert SeededChance(3, ((1,),)).at(5, "x").uniform() != SeededChance(3, ((2,),)).at(5, "x").uniform()


def test_streams_of_neighbouring_keys_are_uncorrelated_and_do_not_overlap() -> None:
    rows = [numbers(seed, position, purpose, 2000) for seed in (0, 1) for position in (0, 1, 2) for purpose in "ab"]
    assert len({number for row in rows for number in row}) == sum(len(row) for row in rows)
    correlation = torch.corrcoef(torch.tensor(rows, dtype=torch.float64)) - torch.eye(len(rows))
    assert correlation.abs().max() < 5 / math.sqrt(2000)
    first = [numbers(seed, 5, "draft", 1)[0] for seed in range(2000)]  # across requests, not only along a stream
    assert stats.kstest(first, "uniform").pvalue > 1e-4
    assert stats.kstest([numbers(3, position, "draft", 1)[0] for position in range(2000)], "uniform").pvalue > 1e-4


def test_frequencies_pass_chi_square() -> None:
    stream = SeededChance(11).at(0, "accept")
    counts = Counter(stream.categorical(WEIGHTS) for _ in range(20_000))
    support = [index for index, weight in enumerate(WEIGHTS.tolist()) if weight]
    assert set(counts) == set(support)
    expected = [20_000 * float(WEIGHTS[index]) / 10 for index in support]
    assert stats.chisquare([counts[index] for index in support], expected).pvalue > 1e-4
    heads = sum(stream.bernoulli(0.3) for _ in range(20_000))
    assert stats.binomtest(heads, 20_000, 0.3).pvalue > 1e-4
    assert stats.kstest(stream.gumbel(20_000).numpy(), "gumbel_r").pvalue > 1e-4


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.3, 1.0, 1e20]), min_size=1, max_size=12), st.integers(0, 50))
def test_categorical_never_returns_a_zero_weight(weights: list[float], seed: int) -> None:
    tensor = torch.tensor(weights, dtype=torch.float64)
    stream = SeededChance(seed).at(0, "x")
    if not any(weights):
        with pytest.raises(ValueError, match="not all zero"):
            stream.categorical(tensor)
        return
    assert all(weights[stream.categorical(tensor)] > 0 for _ in range(20))


class Extreme:
    """Stands for numpy's generator: the smallest and the largest number that it can give."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


@given(
    st.lists(st.sampled_from([0.0, 1e-12, 0.1, 1 / 3, 1.0]), min_size=1, max_size=9).filter(any),
    st.sampled_from([0.0, math.nextafter(1, 0)]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_categorical_at_the_ends_of_the_interval(weights: list[float], number: float, dtype: torch.dtype) -> None:
    from outpace.core.chance import _Stream

    stream = _Stream(SeededChance(0), "draft", 0)
    stream._generator = Extreme(number)  # type: ignore[assignment]
    tensor = torch.tensor(weights).to(dtype)
    assert float(tensor[stream.categorical(tensor)]) > 0


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0], [-1.0, 3.0], [3.0, -1.0]])
@pytest.mark.parametrize("enumerated", [False, True])
def test_weights_that_are_no_weights_are_refused(bad: list[float], enumerated: bool) -> None:
    def program(source: ChanceSource) -> int:
        return source.at(0, "x").categorical(torch.tensor(bad))

    with pytest.raises(ValueError, match="weights must be"):
        next(Enumeration.outcomes(program)) if enumerated else program(SeededChance(0))


def test_enumeration_of_nested_choices_is_exact() -> None:
    def program(source: ChanceSource) -> str:
        stream = source.at(3, "accept")
        if stream.bernoulli(0.25):
            return "heads" + "abc"[stream.categorical(torch.tensor([1.0, 0.0, 3.0]))]
        return "tails" + ("!" if source.at(4, "accept").bernoulli(0.5) else "")

    proposal_distribution: dict[str, float] = defaultdict(float)
    for outcome, weight in Enumeration.outcomes(program):
        proposal_distribution[outcome] += weight
    assert proposal_distribution == pytest.approx({"headsa": 0.0625, "headsc": 0.1875, "tails": 0.375, "tails!": 0.375})


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4).filter(any), min_size=1, max_size=4))
def test_enumeration_finds_every_outcome_once_and_weights_sum_to_one(rows: list[list[float]]) -> None:
    def program(source: ChanceSource) -> tuple[int, ...]:
        stream = source.at(0, "x")
        return tuple(stream.categorical(torch.tensor(row, dtype=torch.float64)) for row in rows)

    found = list(Enumeration.outcomes(program))
    assert sum(weight for _, weight in found) == pytest.approx(1)
    assert len({outcome for outcome, _ in found}) == len(found)
    for outcome, weight in found:
        expected = math.prod(row[index] / sum(row) for index, row in zip(outcome, rows, strict=True))
        assert weight == pytest.approx(expected, abs=1e-9)
    missing = math.prod(sum(value / sum(row) > 1e-12 for value in row) for row in rows)
    assert missing <= len(found) <= math.prod(sum(value > 0 for value in row) for row in rows)


def test_a_stream_opened_twice_repeats_its_numbers_in_the_enumeration_too() -> None:
    """What shares a number in the field is correlated in the enumeration: certification sees it."""

    def program(source: ChanceSource) -> tuple[bool, int, bool]:
        again: Chance = source.at(0, "x")
        first = source.at(0, "x").bernoulli(0.5)
        return first, again.categorical(torch.tensor([0.25, 0.5, 0.25])), source.at(1, "x").bernoulli(0.5)

    proposal_distribution = dict(Enumeration.outcomes(program))
    assert {key: proposal_distribution[key] for key in proposal_distribution if key[2]} == pytest.approx(
        {(True, 0, True): 0.125, (True, 1, True): 0.125, (False, 1, True): 0.125, (False, 2, True): 0.125}
    )
    seen = Counter(program(SeededChance(seed)) for seed in range(4000))
    assert set(seen) == set(proposal_distribution)
    assert (
        stats.chisquare(
            [seen[key] for key in proposal_distribution],
            [4000 * proposal_distribution[key] for key in proposal_distribution],
        ).pvalue
        > 1e-4
    )


def test_enumeration_gives_up_in_words() -> None:
    def coin(source: ChanceSource) -> tuple[bool, ...]:
        stream = source.at(0, "x")
        return tuple(stream.bernoulli(0.5) for _ in range(4))

    with pytest.raises(RuntimeError, match="more than 10 branches"):
        list(Enumeration.outcomes(coin, limit=10))
    with pytest.raises(NotImplementedError, match="statistically"):
        list(Enumeration.outcomes(lambda source: source.at(0, "x").uniform()))
    with pytest.raises(NotImplementedError, match="statistically"):
        list(Enumeration.outcomes(lambda source: source.at(0, "x").gumbel(2)))


@pytest.mark.parametrize("uneven", [False, True])
def test_branches_are_counted_from_a_few_walks(uneven: bool) -> None:
    def program(source: ChanceSource) -> None:
        """Three choices of four, or as many more as the first says; a certain one changes nothing."""
        stream = source.at(0, "x")
        more = stream.categorical(torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1]))
        stream.bernoulli(1.0)
        for _ in range(more if uneven else 2):
            stream.categorical(torch.tensor([0.1, 0.2, 0.3, 0.4]))

    branches = sum(1 for _ in Enumeration.outcomes(program))
    assert branches == (1 + 4**2 + 4**3 + 4**4 if uneven else 4 * 4**2)
    found = Enumeration.size(program, walks=400)
    assert found == pytest.approx(branches, rel=0.2 if uneven else 1e-12)


def test_certain_decisions_do_not_branch() -> None:
    def program(source: ChanceSource) -> tuple[bool, bool, int]:
        stream = source.at(0, "x")
        return stream.bernoulli(0.0), stream.bernoulli(1.5), stream.categorical(torch.tensor([0.0, 2.0]))

    assert list(Enumeration.outcomes(program)) == [((False, True, 1), 1.0)]


def test_a_bound_spares_the_probability_and_changes_no_decision() -> None:
    asked: list[float] = []

    def p(value: float) -> Callable[[], float]:
        def ask() -> float:
            asked.append(value)
            return value

        return ask

    probs = [0.3, 0.0, 1.0, 0.05] * 50
    plain, bounded = (SeededChance(5).at(3, "accept") for _ in range(2))
    decided = [bounded.bernoulli_at_most(min(1.0, 2 * one), p(one)) for one in probs]
    assert decided == [plain.bernoulli(one) for one in probs]
    assert len(asked) < 0.6 * len(probs)
    with pytest.raises(RuntimeError, match="at most"):
        list(Enumeration.outcomes(lambda chance: chance.at(0, "x").bernoulli_at_most(0.1, lambda: 0.2)))
