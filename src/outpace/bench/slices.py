"""Methods answer the same prompts in slices of time, so that a machine that slows down does so for all of them.

Where one method answers eight prompts and then the next one does, seconds lie between what is compared, in which other
users of the machine come and go. Here every method has its batch open, and the one with the fewest tokens goes on for a
short while. Then a difference between two methods is one between rounds that are tenths of a second apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import inf
from time import perf_counter
from typing import TypeVar

from outpace.bench.records import Answer, AnswerBatch
from outpace.core import machine

Key = TypeVar("Key", bound=Hashable)

SLICE = 0.1
"""Seconds. A change of turns costs what a cache of the second level takes to fill, about 0.1 ms."""
_SHARE = 4
"""All batches together may hold K/V in this part of the free memory."""


def in_slices(
    batches: Mapping[Key, AnswerBatch], on_slice: Callable[[Key], None] = lambda _: None
) -> dict[Key, list[Answer] | Exception]:
    """Step all batches until they have ended: the answers of each, or what ended it. The others go on then.

    In the order given, where tokens are equal. ``on_slice`` is called before every turn, with whose it is. Batches run
    one after the other where their K/V is too much for the memory together, or is not in main memory, and where one
    decodes groups, whose tokens are known at their end. All are closed, also where something else than a batch raises.
    """
    left, ended = dict(batches), dict[Key, list[Answer] | Exception]()
    seconds = SLICE if _fit(batches) else inf
    try:
        while left:
            key = min(left, key=lambda one: left[one].tokens)
            on_slice(key)
            try:
                if not _turn(left[key], seconds):
                    ended[key] = left[key].answers()
            except Exception as error:  # one method's fault must not cost the others their figures
                ended[key] = error
            if key in ended:
                left.pop(key).close()
    finally:
        for batch in left.values():
            batch.close()
    return ended


def _turn(batch: AnswerBatch, seconds: float) -> bool:
    """Steps for so many seconds; whether there are more."""
    costs = batch.decoder.target.costs
    machine.reset_peak_memory()
    measured, until = costs.measurements, perf_counter() + seconds
    while (running := batch.step()) and perf_counter() < until:
        pass
    batch.disturbed |= costs.measurements != measured
    batch.peak_memory_mb = max(batch.peak_memory_mb, machine.peak_memory_mb())
    return running


def _fit(batches: Mapping[Key, AnswerBatch]) -> bool:
    """Whether K/V of all batches, as long as their answers may become, leaves most of the main memory free: also for
    that of draft models."""
    needed = 0
    for batch in batches.values():
        target = batch.decoder.target
        if target.device.type != "cpu" or any(one.population is not None for one in batch.requests):
            return False
        rows = max((len(one.prompt) + one.max_new_tokens for one in batch.requests), default=0)
        needed += batch.at_once * target.kv_bytes(None, rows)
    return needed * _SHARE <= machine.free_memory()
