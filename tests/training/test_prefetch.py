"""Batches that are made ahead: the same, in the same order, and the thread ends with who reads them."""

import threading
import time
from collections.abc import Iterator

import pytest

from outpace.training.prefetch import prefetched


def threads() -> int:
    return sum(one.name == "prefetch" for one in threading.enumerate())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_same_items_in_the_same_order(count: int) -> None:
    assert list(prefetched(iter(range(20)), count)) == list(range(20))
    assert list(prefetched(iter(()), count)) == []
    assert threads() == 0


def test_so_many_are_made_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    reading = prefetched(items(), 2)
    assert next(reading) == 0
    deadline = time.monotonic() + 5.0
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]  # one was taken, two wait, one is in the thread's hands
    reading.close()  # type: ignore[attr-defined]
    assert threads() == 0


def test_an_error_comes_where_its_item_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("a damaged shard")

    reading = prefetched(items(), 2)
    assert next(reading) == 1
    with pytest.raises(ValueError, match="a damaged shard"):
        next(reading)
    assert threads() == 0
