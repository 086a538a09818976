"""Batches that are made in another thread while the one before is trained on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
_PATIENCE = 0.1
"""Seconds after which the thread looks whether anybody still wants what it makes."""


def prefetched(items: Iterator[T], count: int) -> Iterator[T]:
    """The same items in the same order, up to ``count`` of them made ahead; 0: none, in the caller's own thread.

    An error in ``items`` is raised where its item would have been. The thread ends with the iterator.
    """
    return _prefetched(items, count) if count else items


def _prefetched(items: Iterator[T], count: int) -> Iterator[T]:
    made: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(count)
    unwanted = threading.Event()

    def hand_over(one: tuple[T | None, BaseException | None, bool]) -> None:
        while not unwanted.is_set():
            try:
                made.put(one, timeout=_PATIENCE)
            except queue.Full:
                continue
            return

    def work() -> None:
        try:
            for item in items:
                hand_over((item, None, False))
                if unwanted.is_set():
                    return
        except BaseException as error:  # it belongs to the caller's thread
            hand_over((None, error, True))
        else:
            hand_over((None, None, True))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error, over = made.get()
            if error is not None:
                raise error
            if over:
                return
            assert item is not None
            yield item
    finally:
        unwanted.set()
        thread.join()
