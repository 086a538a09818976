"""The order of all suffixes of a text by their first tokens: prefix doubling (Manber and Myers 1990), in chunks.

Suffixes are first sorted by as many tokens as fit into 64 bits. Each pass then doubles what they are sorted by: of two
that are equal so far, the rank of what comes after that part decides. Only groups that are still equal are sorted, a
chunk of whole groups at a time, so that what a pass needs beside its arrays (14 bytes a token) stays the same for
every text; only a group larger than a chunk takes more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 21
"""Suffixes that are sorted at once: about 150 MB."""

Ids = npt.NDArray[Any]
Places = npt.NDArray[np.uint32]
Advance = Callable[[int, int], None]
"""Called with suffixes sorted so far, over all passes, and in all."""


def suffix_order(text: Ids, depth: int, *, chunk: int = CHUNK, advance: Advance | None = None) -> Places:
    """Places in ``text`` (n,), sorted by the ``depth`` tokens from there on; of equals the first place first.

    ``text`` holds uint16 or uint32 and must end with a token that stands for its end, whatever lies beyond: what is
    compared after that token is arbitrary. Returns (n,) uint32.
    """
    tell = advance or (lambda *_: None)
    passes = list(_passes(64 // (8 * text.dtype.itemsize), depth))
    total = len(text) * (1 + len(passes))
    order, rank = _by_first_tokens(text, chunk, lambda done: tell(done, total))
    for number, step in enumerate(passes, start=1):
        finer = rank.copy()
        for start, stop in _groups(order, rank, chunk):
            _refine(order[start:stop], start, rank, finer, step)
            tell(number * len(text) + stop, total)
        rank = finer
    return order


def _passes(known: int, depth: int) -> Iterator[int]:
    """How far ahead each pass looks: what is sorted by ``known`` tokens learns as many more there, at most."""
    while known < depth:
        step = min(known, depth - known)
        yield step
        known += step


def _by_first_tokens(text: Ids, chunk: int, advance: Callable[[int], None]) -> tuple[Places, Places]:
    """Places sorted by the tokens that fit into 64 bits, and each place's rank: where its group begins."""
    length, per_key = len(text), 64 // (8 * text.dtype.itemsize)
    order, rank = np.empty(length, np.uint32), np.empty(length, np.uint32)
    at = 0
    for low, high in _value_ranges(text, chunk):
        found = []
        for start in range(0, length, chunk):
            part = text[start : start + chunk]
            found.append((np.flatnonzero((part >= low) & (part < high)) + start).astype(np.uint32))
        places = np.concatenate(found)
        key = np.zeros(len(places), np.uint64)
        for ahead in range(per_key):
            key <<= np.uint64(64 // per_key)
            key |= text[_ahead(places, ahead, length)]
        sort = np.argsort(key, kind="stable")
        places = places[sort]
        order[at : at + len(places)] = places
        rank[places] = _group_starts(key[sort], at)
        at += len(places)
        advance(at)
    return order, rank


def _value_ranges(text: Ids, chunk: int) -> Iterator[tuple[int, int]]:
    """Ranges of token values that about ``chunk`` places begin with each, as a sample of the text has it."""
    sample = np.sort(text[:: max(1, len(text) >> 16)])
    pieces = 1 + len(text) // chunk
    edges = np.unique(sample[np.arange(1, pieces) * len(sample) // pieces]).tolist()
    yield from zip([0, *edges], [*edges, np.iinfo(text.dtype).max + 1], strict=True)


def _groups(order: Places, rank: Places, chunk: int) -> Iterator[tuple[int, int]]:
    """Parts of ``order`` of about ``chunk`` places, none of which cuts a group."""
    start, length = 0, len(order)
    while start < length:
        stop = min(start + chunk, length)
        if stop < length:
            group = int(rank[order[stop]])  # where the group of the first place outside begins
            # Ranks ascend along the order, so a group that fills the chunk ends where the next rank is found.
            stop = group if group > start else bisect_right(order, start, stop, key=lambda place: int(rank[place]))
        yield start, stop
        start = stop


def _refine(order: Places, start: int, rank: Places, finer: Places, step: int) -> None:
    """Sort the groups of ``order`` (which begins at ``start`` of the whole) by the rank ``step`` tokens further on."""
    group = rank[order]
    same = group[1:] == group[:-1]
    open_ones = np.zeros(len(order), np.bool_)
    open_ones[1:] |= same
    open_ones[:-1] |= same
    where = np.flatnonzero(open_ones)
    if not len(where):
        return
    places = order[where]
    key = group[where].astype(np.uint64) << np.uint64(32)
    key |= rank[_ahead(places, step, len(rank))]
    sort = np.argsort(key, kind="stable")
    places, key = places[sort], key[sort]
    order[where] = places
    # All places of a group are open, so that its members lie together in ``where`` too.
    finer[places] = start + where[_group_starts(key, 0)]


def _ahead(places: Places, step: int, length: int) -> npt.NDArray[np.int64]:
    """The places ``step`` further on; past the end, the end."""
    return np.minimum(places.astype(np.int64) + step, length - 1)


def _group_starts(keys: npt.NDArray[np.uint64], at: int) -> Places:
    """For sorted keys that begin at ``at``: where each one's group of equals begins."""
    fresh = np.ones(len(keys), np.bool_)
    fresh[1:] = keys[1:] != keys[:-1]
    return (at + np.maximum.accumulate(np.where(fresh, np.arange(len(keys)), 0))).astype(np.uint32)
