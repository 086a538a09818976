"""Rows of several tensors put side by side, for many places in one call: hidden states, as drafters keep them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.targets.dense import binding


class Gathered(NamedTuple):
    """``rows`` of each of ``sources``, (n, width), which ``to``, (rows, sources * width), is to hold side by side."""

    sources: Seq[Tensor]
    rows: Seq[int]
    to: Tensor


def gather(wanted: Seq[Gathered]) -> None:
    """Fill every ``to``: by the compiled kernels where they are loaded and the tensors are plain, else by torch."""
    start, end, width = array("q"), array("q"), 0
    places: dict[int, tuple[int, int] | None] = {}
    """By tensor (requests of one forward share them): its address and the bytes of a row; None: not plain."""
    by_kernels = binding.loaded()

    def place(rows: Tensor) -> tuple[int, int] | None:
        if id(rows) not in places:
            places[id(rows)] = (rows.data_ptr(), 4 * rows.stride(0)) if _plain(rows) else None
        return places[id(rows)]

    for one in wanted:
        bases = [base for source in one.sources if (base := place(source)) is not None]
        mine = one.sources[0].shape[1]
        if not (by_kernels and width in (0, mine) and len(bases) == len(one.sources) and _plain(one.to)):
            _by_torch(one)
            continue
        width, at = mine, one.to.data_ptr()
        for row in one.rows:
            for address, stride in bases:
                start.append(address + row * stride)
                end.append(at)
                at += 4 * width
    if start:
        binding.copy_rows(start, end, width)


def _plain(rows: Tensor) -> bool:
    """Whether it is float32 in the processor's memory, row by row."""
    return rows.is_cpu and rows.dtype == torch.float32 and rows.stride(1) == 1


def _by_torch(one: Gathered) -> None:
    rows = one.rows
    if rows[-1] == len(rows) - 1:  # the first rows need no gathering
        picked = [source[: len(rows)] for source in one.sources]
    else:
        chosen = torch.tensor(rows, device=one.to.device)
        picked = [source.index_select(0, chosen) for source in one.sources]
    torch.cat(picked, -1, out=one.to)
