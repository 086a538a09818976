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
    start, end = array("q"), array("q")
    width = 0
    for one in wanted:
        if not all(map(_plain, one.sources)) or not _plain(one.to):
            _by_torch(one)
            continue
        mine = one.sources[0].shape[1]
        if width not in (0, mine):
            _by_torch(one)
            continue
        width = mine
        bases = [(source.data_ptr(), 4 * source.stride(0)) for source in one.sources]
        at = one.to.data_ptr()
        for row in one.rows:
            for base, stride in bases:
                start.append(base + row * stride)
                end.append(at)
                at += 4 * width
    if start:
        binding.copy_rows(start, end, width)


def _plain(rows: Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.stride(-1) == 1 and binding.loaded()


def _by_torch(one: Gathered) -> None:
    rows = one.rows
    if rows[-1] == len(rows) - 1:  # the first rows need no gathering
        picked = [source[: len(rows)] for source in one.sources]
    else:
        chosen = torch.tensor(rows, device=one.to.device)
        picked = [source.index_select(0, chosen) for source in one.sources]
    torch.cat(picked, -1, out=one.to)
