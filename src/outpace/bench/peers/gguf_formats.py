"""The GGUF formats in which llama.cpp is measured: the file's own, and those for which it has its fastest kernels.

A file in another format is made by llama.cpp itself, from the file that was named, once, and kept in the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.core.names import unknown
from outpace.models.gguf_cache import made
from outpace.models.gguf_header import read_header

OWN = "own"
FASTER = {"Q4_0": "Q4_0", "Q4_K_M": "Q4_K"}
"""llama.cpp's name of a format, and that of the blocks in which most of its weights are."""

_BLOCK = 256  # weights of a row that one Q4_K block holds
_MINOR = 0.05  # share of the weights below which a format is not named
_PLACE = "gguf-formats"


def chosen(names: Sequence[str] | None, path: Path | None) -> list[str]:
    """The formats to measure. Raises BadInput for a name that is none.

    By default the file's own, and of the faster ones those that it does not have already; Q4_K_M where most of the
    weights are in rows of whole blocks: llama.cpp puts other rows into formats that are slower.
    """
    if names is not None:
        return list(dict.fromkeys(_named(name) for name in names)) or [OWN]
    if path is None:
        return [OWN]
    amounts = _amounts(path)
    [(most, _)] = amounts.most_common(1)
    faster = [name for name, blocks in FASTER.items() if blocks != most]
    return [OWN, *(name for name in faster if name == "Q4_0" or _in_whole_blocks(path))]


def kinds(path: Path) -> str:
    """Q4_1 + Q8_0: the formats in which a GGUF file holds its weights, by their number."""
    amounts = _amounts(path)
    return " + ".join(name for name, n in amounts.most_common() if n >= _MINOR * amounts.total())


def requantized(path: Path, name: str, quantize: Callable[[Path], object]) -> Path:
    """This GGUF file in another format: that of the cache, or the one that ``quantize`` writes now.

    Raises BadInput for a cache that cannot be written.
    """
    folder = made(
        path,
        name,
        lambda: read_header(path).parameters,  # a byte a weight is more than any of them takes
        lambda new: quantize(new / "model.gguf"),
        _PLACE,
    )
    return folder / "model.gguf"


def _named(name: str) -> str:
    known = {one.lower(): one for one in (OWN, *FASTER)}
    if name.lower() not in known:
        raise unknown("GGUF format", name, [*known.values()])
    return known[name.lower()]


def _amounts(path: Path) -> Counter[str]:
    """Number of weights by format."""
    counts: Counter[str] = Counter()
    for entry in read_header(path).tensors.values():
        counts[entry.kind_name] += prod(entry.shape)
    if not counts:
        raise BadInput(f"GGUF file '{path}' holds no weights")
    return counts


def _in_whole_blocks(path: Path) -> bool:
    tensors = [entry for entry in read_header(path).tensors.values() if len(entry.shape) > 1]
    whole = sum(prod(entry.shape) for entry in tensors if entry.shape[-1] % _BLOCK == 0)
    return 2 * whole > sum(prod(entry.shape) for entry in tensors)
