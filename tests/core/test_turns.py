"""Turns: re-entrant, and handed over in the order of asking."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from outpace.core.turns import Turns


def started(work: threading.Thread, turns: Turns, waiting: int) -> None:
    """Start a thread, and wait until it waits for its turn."""
    work.start()
    while len(turns._waiting) < waiting:
        pass


def test_waiting_threads_get_it_in_their_order() -> None:
    turns, order = Turns(), list[int]()

    def work(number: int) -> None:
        with turns:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with turns, turns:
        assert turns.held
        for at, thread in enumerate(threads, 1):
            started(thread, turns, at)
    assert not turns.held
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


def test_two_threads_alternate() -> None:
    """A plain lock would go back to the thread that released it."""
    turns, order = Turns(), list[str]()

    def work(name: str) -> None:
        for _ in range(5):
            with turns:
                order.append(name)
                while len(order) < 10 and not turns._waiting and other[name].is_alive():
                    pass

    one, two = threading.Thread(target=work, args=("one",)), threading.Thread(target=work, args=("two",))
    other = {"one": two, "two": one}
    with turns:
        started(one, turns, 1)
        started(two, turns, 2)
    one.join()
    two.join()
    assert order == ["one", "two"] * 5


def test_who_stops_waiting_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()

    class Interrupted:
        def __init__(self) -> None:
            self.asked = 0

        def acquire(self) -> bool:
            self.asked += 1
            if self.asked == 2:
                raise KeyboardInterrupt
            return True

    done: list[type[BaseException]] = []

    def work() -> None:
        try:
            with turns:
                pass
        except KeyboardInterrupt as error:
            done.append(type(error))

    with turns:
        stub = SimpleNamespace(Lock=Interrupted, get_ident=threading.get_ident)
        monkeypatch.setattr("outpace.core.turns.threading", stub)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert done == [KeyboardInterrupt]
    assert not turns._waiting
    assert turns._owner is None
