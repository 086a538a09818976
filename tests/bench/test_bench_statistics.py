from collections.abc import Sequence

import numpy as np
import pytest

from outpace.bench.statistics import Rate, difference_interval, repeated_ngrams, speedup, speedup_interval


def bounds(ours: Sequence[Rate], plain: Sequence[Rate], seed: int = 0, resamples: int = 1000) -> tuple[float, float]:
    found = speedup_interval(ours, plain, seed=seed, resamples=resamples)
    assert found is not None
    return found


def test_speedup_is_the_ratio_of_total_rates() -> None:
    assert speedup([(10, 1), (30, 1)], [(10, 2), (10, 2)]) == pytest.approx(20 / 5)
    assert speedup([(0, 0)], [(10, 1)]) is None
    assert speedup([(10, 1)], [(0, 1)]) is None
    assert speedup([], []) is None


def test_interval_is_undefined_for_one_prompt_and_exact_without_spread() -> None:
    assert speedup_interval([(10, 1)], [(10, 2)]) is None
    assert speedup_interval([(10, 1)] * 5, [(10, 2)] * 5) == pytest.approx((2, 2))
    assert speedup_interval([(0, 0)] * 3, [(0, 0)] * 3) is None


def test_interval_is_reproducible_and_survives_prompts_without_a_rate() -> None:
    ours, plain = [(0, 0), (20, 1), (30, 2)], [(0, 0), (20, 2), (30, 3)]
    low, high = bounds(ours, plain, seed=3)
    middle = speedup(ours, plain)
    assert middle is not None and low <= middle <= high
    assert (low, high) == speedup_interval(ours, plain, seed=3)


def test_pairing_removes_what_prompts_have_in_common() -> None:
    rng = np.random.default_rng(0)
    hardness = rng.uniform(1, 10, size=40)
    ours, plain = [(100, h) for h in hardness], [(100, 1.5 * h) for h in hardness]
    low, high = bounds(ours, plain)
    assert high - low < 1e-9


def test_the_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    hits, trials, truth = 0, 200, 1.4
    for trial in range(trials):
        seconds = rng.uniform(1, 3, size=40)
        noise = rng.lognormal(0, 0.3, size=40)
        noise /= np.exp(0.3**2 / 2)  # mean one, so that the ratio of totals tends to the truth
        ours = [(100.0, s * n / truth) for s, n in zip(seconds, noise, strict=True)]
        low, high = bounds(ours, [(100.0, s) for s in seconds], seed=trial, resamples=600)
        hits += low <= truth <= high
    assert 0.88 <= hits / trials <= 0.99


def test_many_prompts_are_resampled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.bench.statistics._CELLS", 50)
    low, high = bounds([(10, 1)] * 20, [(10, 2)] * 20, resamples=101)
    assert (low, high) == pytest.approx((2, 2))


def test_repeated_ngrams() -> None:
    assert repeated_ngrams([1, 2, 3]) == (0, 0)
    assert repeated_ngrams([1, 2, 3, 4, 5]) == (0, 2)
    assert repeated_ngrams([7] * 8) == (4, 5)
    assert repeated_ngrams([1, 2, 1, 2, 1], n=2) == (2, 4)


@pytest.mark.parametrize(("size", "least"), [(3, 0.86), (5, 0.88), (12, 0.9)])
def test_the_interval_of_few_prompts_is_as_wide_as_few_prompts_say(size: int, least: float) -> None:
    """A plain bootstrap of three has the truth in it three times of four."""
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(300):
        times = rng.lognormal(0, 0.2, size=size)
        times /= np.exp(0.2**2 / 2)
        low, high = bounds([(10.0, float(time)) for time in times], [(10.0, 1.0)] * size, seed=trial, resamples=400)
        hits += low <= 1.0 <= high
    assert least <= hits / 300 <= 1.0


def test_differences_are_widened_too() -> None:
    ours, theirs = [(4.0, 1.0), (6.0, 1.0), (5.0, 1.0)], [(2.0, 1.0), (2.5, 1.0), (3.0, 1.0)]
    found = difference_interval(ours, theirs)
    assert found is not None
    assert found[0] < 2.0 and found[1] > 3.5  # the differences are 2, 3.5 and 2: no resample has others
    assert difference_interval(ours[:1] * 4, theirs[:1] * 4) == pytest.approx((2.0, 2.0))
