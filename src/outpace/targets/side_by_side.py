"""Rows of several tensors put side by side, for many places in one call: hidden states, as drafters keep them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.targets.dense import binding
from outpace.targets.hidden_rows import sources

_MANY = 64
"""More rows of one tensor than that are copied as they stand, a prompt's."""


class Gathered(NamedTuple):
    """``rows`` of each of ``sources``, (n, width), which ``to``, (any, sources * width), is to hold side by side from
    its row ``at`` on."""

    sources: Seq[Tensor]
    rows: Seq[int]
    to: Tensor
    at: int = 0


def rows_of_rounds(
    rounds: Seq[tuple[Mapping[int, Tensor], Seq[int]]], layers: Seq[int], room: Callable[[int, Seq[Tensor]], Tensor]
) -> list[Gathered]:
    """What gathers the hidden states of ``layers`` of several forwards into one block, one's behind the other's.

    ``rounds``: hidden states by layer, and the rows of them that are wanted; at least one forward. ``room(count,
    sources)`` gives the block's memory, (count, layers * hidden), of the kind of ``sources``.
    """
    count, at, to, wanted = sum(len(rows) for _, rows in rounds), 0, None, list[Gathered]()
    for states, rows in rounds:
        found, picked = sources(states, layers, rows)
        to = room(count, found) if to is None else to
        wanted.append(Gathered(found, picked, to, at))
        at += len(rows)
    return wanted


def gather(wanted: Seq[Gathered]) -> None:
    """Fill every ``to``: by the compiled kernels where they are loaded and the tensors are plain, else by torch."""
    if not binding.loaded():
        for one in wanted:
            _by_torch(one)
        return
    start, end, width = array("q"), array("q"), 0
    places: dict[int, tuple[int, int]] = {}
    """By tensor (requests of one forward share them): its address, and the bytes of a row; 0 where it is not plain."""
    for one in wanted:
        held, rows, to, at = one
        found, plain = [], True
        for tensor in (to, *held):
            place = places.get(id(tensor))
            if place is None:
                place = places[id(tensor)] = (tensor.data_ptr(), 4 * tensor.stride(0) if _plain(tensor) else 0)
            found.append(place)
            plain = plain and place[1] > 0
        mine = held[0].shape[1]
        if width not in (0, mine) or not plain or len(rows) > _MANY:
            _by_torch(one)
            continue
        width, (address, stride) = mine, found[0]
        address += at * stride
        for row in rows:
            put = address
            for base, step in found[1:]:
                start.append(base + row * step)
                end.append(put)
                put += 4 * width
            address += stride
    if start:
        binding.copy_rows(start, end, width)


def _plain(rows: Tensor) -> bool:
    """Whether it is float32 in the processor's memory, row by row."""
    return rows.is_cpu and rows.dtype == torch.float32 and rows.stride(1) == 1


def _by_torch(one: Gathered) -> None:
    rows, to = one.rows, one.to[one.at : one.at + len(one.rows)]
    if rows[-1] == len(rows) - 1:  # the first rows need no gathering
        picked = [source[: len(rows)] for source in one.sources]
    else:
        chosen = torch.tensor(rows, device=to.device)
        picked = [source.index_select(0, chosen) for source in one.sources]
    torch.cat(picked, -1, out=to)
