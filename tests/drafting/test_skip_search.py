"""The search for what to skip: planted optima, limits, interruption."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from outpace.drafting.layer_skips import Mask, Skips
from outpace.drafting.skip_search import MaskSearch, _posterior

FLAGS = 24


def planted(seed: int) -> Callable[[Mask], float]:
    """What every flag is worth by itself, and what some pairs are worth together."""
    rng = np.random.default_rng(seed)
    alone = rng.normal(size=FLAGS)
    pairs = [(*rng.choice(FLAGS, 2, replace=False), rng.normal()) for _ in range(12)]
    return lambda mask: float(alone @ np.array(mask) + sum(v for a, b, v in pairs if mask[a] and mask[b]))


def best_of(worth: Callable[[Mask], float], trials: int, seed: int, *, bayesian: bool) -> float:
    search = MaskSearch(FLAGS, range(FLAGS), 4, 16, initial=8 if bayesian else trials, seed=seed)
    for _ in range(trials):
        mask = search.suggest()
        search.tell(mask, worth(mask))
    assert search.best is not None
    return search.tries[search.best]


@pytest.mark.parametrize("seed", range(3))
def test_planted_optima_are_found_faster_than_by_chance(seed: int) -> None:
    worth = planted(seed)
    assert best_of(worth, 40, seed, bayesian=True) > best_of(worth, 400, seed, bayesian=False)


def test_a_noisy_optimum_is_found_too() -> None:
    rng = np.random.default_rng(3)
    worth = planted(3)
    search = MaskSearch(FLAGS, range(FLAGS), 6, 6, initial=8)
    for _ in range(60):
        mask = search.suggest()
        search.tell(mask, worth(mask) + 0.3 * rng.normal())
    assert search.best is not None
    sixes = [tuple(np.isin(np.arange(FLAGS), rng.choice(FLAGS, 6, replace=False)).tolist()) for _ in range(400)]
    assert worth(search.best) > max(map(worth, sixes))


@given(
    st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 9), unique=True, min_size=7)
)
@settings(max_examples=25, deadline=None)
def test_every_mask_keeps_to_the_limits(seed: int, fewest: int, more: int, free: list[int]) -> None:
    search = MaskSearch(10, free, fewest, fewest + more, initial=3, seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        mask = search.suggest()
        assert fewest <= sum(mask) <= fewest + more
        assert all(index in free for index, flag in enumerate(mask) if flag)
        search.tell(mask, float(rng.normal()))


def test_an_interrupted_search_goes_on_as_if_it_had_not_been() -> None:
    worth = planted(1)

    def run(search: MaskSearch, count: int) -> list[Mask]:
        masks = []
        for _ in range(count):
            masks.append(search.suggest())
            search.tell(masks[-1], worth(masks[-1]))
        return masks

    whole = run(MaskSearch(FLAGS, range(FLAGS), 4, 16, initial=5), 20)
    again = MaskSearch(FLAGS, range(FLAGS), 4, 16, initial=5)
    for mask in whole[:12]:
        again.tell(mask, worth(mask))
    assert run(again, 8) == whole[12:]


def test_the_interval_decides_how_many_are_bayesian() -> None:
    """Between two Bayesian tries the masks are those of a search without any."""
    worth = planted(2)
    searches = [MaskSearch(FLAGS, range(FLAGS), 6, 6, initial=4, interval=interval) for interval in (3, 10**9)]
    same = []
    for _ in range(16):
        masks = [search.suggest() for search in searches]
        same.append(masks[0] == masks[1])
        for search in searches:
            search.tell(masks[1], worth(masks[1]))
    assert [index for index, equal in enumerate(same) if not equal] == [7, 10, 13]


def test_the_best_is_the_latest_word_on_each_mask() -> None:
    search = MaskSearch(3, range(3), 1, 1)
    first, second = (True, False, False), (False, True, False)
    assert search.tell(first, 1.0)
    assert not search.tell(second, 0.5)
    assert search.best == first
    assert search.tell(first, 0.1)
    assert search.best == second


def test_the_process_interpolates_what_is_known_and_doubts_what_is_far() -> None:
    rng = np.random.default_rng(0)
    masks = rng.random((30, 12)) < 0.5
    values = masks @ rng.normal(size=12)
    values = (values - values.mean()) / values.std()
    mean, deviation = _posterior(masks, values, masks)
    assert np.abs(mean - values).max() < 0.1
    unseen = rng.random((200, 12)) < 0.5
    nearest = (unseen[:, None] != masks[None]).sum(-1).min(1)
    _, doubt = _posterior(masks, values, unseen)
    assert doubt[nearest >= 3].mean() > doubt[nearest <= 1].mean()
    assert deviation.max() < doubt.max()


def test_masks_and_skips_say_the_same() -> None:
    skips = Skips.of((False, True, True, True, False, False))
    assert skips == Skips((1, 2), (0,), 3)
    assert skips.graph.skip_attention == {1, 2}
    assert skips.graph.skip_mlp == {0}
