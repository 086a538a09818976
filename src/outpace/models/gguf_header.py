"""GGUFHeader: metadata and the table of tensors of a GGUF file, read without touching the weights.

outpace reads it itself, so that a broken file is refused before anything is converted, and because it has what
transformers' converter leaves out (rotary scaling, further end-of-turn tokens).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import BadInput
from outpace.core.files import file_version
from outpace.models.ggml_types import TYPES
from outpace.models.gguf_metadata import GeneralKeys, ModelKeys, Refusal, general_keys, model_keys
from outpace.models.source import GGUF_MAGIC

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_F32 = 0
_MOST_DIMENSIONS = 4
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place: ``kind`` is the ggml type, ``offset`` counts from the beginning of the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int

    @property
    def kind_name(self) -> str:
        """``Q4_1`` and the like."""
        return TYPES[self.kind].name


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file: its metadata as far as outpace reads it, and its tensors by name."""

    path: Path
    general: GeneralKeys
    model: ModelKeys
    tensors: dict[str, TensorEntry]

    @property
    def architecture(self) -> str:
        """The name of the architecture as llama.cpp spells it."""
        return self.general.architecture

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(prod(entry.shape) for entry in self.tensors.values())

    def float32(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values of a tensor that is stored as float32, flat. Raises BadInput for one that is not."""
        entry = self.tensors[name]
        if entry.kind != _F32:
            raise BadInput(f"'{self.path}': tensor {name} should be float32")
        return np.fromfile(self.path, np.float32, prod(entry.shape), offset=entry.offset)

    def mapped(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A tensor as it lies in the file, mapped into memory: (rows, bytes of a row)."""
        entry = self.tensors[name]
        rows = entry.shape[0] if len(entry.shape) > 1 else 1
        return np.memmap(self.path, np.uint8, "r", entry.offset, (rows, entry.nbytes // rows))


def read_header(path: Path) -> GGUFHeader:
    """Read and check the head of a file. That of a file that has not changed since is remembered.

    Raises BadInput when it is broken, truncated or one part of several, when metadata is missing or unusable, and when
    its blocks are not those that the metadata count.
    """
    try:
        version = file_version(path.stat())
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror}") from error
    return _read(path, version)


@lru_cache(maxsize=4)
def _read(path: Path, version: tuple[int, ...]) -> GGUFHeader:

    def refusal(why: str) -> BadInput:
        return _broken(path, why)

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, path)
            metadata = reader.metadata()
            general = general_keys(metadata, refusal)
            if general.parts > 1:
                raise BadInput(f"'{path}' is one of {general.parts} parts; join them with llama-gguf-split --merge")
            entries, size = reader.tensors(general.alignment), len(data)
    except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError, MemoryError) as error:
        raise _broken(path, "its header cannot be read") from error
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror}") from error
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=0)
    if not entries or end > size:
        raise _broken(path, f"it is truncated ({size:,} of {end:,} bytes)" if entries else "it holds no weights")
    architecture = general.architecture
    model = model_keys(metadata, architecture, lambda why: _broken(path, f"{why} (architecture {architecture})"))
    _check_complete(entries, architecture, model, refusal)
    return GGUFHeader(path, general, model, entries)


def _check_complete(names: Iterable[str], architecture: str, model: ModelKeys, refusal: Refusal) -> None:
    """Raise what ``refusal`` makes for blocks that are not those counted, and metadata that tensors ask for."""
    names, count = list(names), model.block_count
    found = {block for block in map(block_of, names) if block is not None}
    if max(found, default=-1) >= count:
        raise refusal(f"its metadata count {count} blocks, and it holds tensors of block {max(found)} (counted from 0)")
    if len(found) < count:
        absent = next(block for block in range(count) if block not in found)
        raise refusal(f"it holds no tensor of block {absent} (counted from 0), and its metadata count {count} blocks")
    if model.head_count is None and any(".attn_" in name for name in names):
        raise refusal(f"it lacks the metadata {architecture}.attention.head_count")
    if model.epsilon is None and model.rms_epsilon is None:
        raise refusal(f"it lacks the metadata {architecture}.attention.layer_norm_rms_epsilon")


def block_of(tensor: str) -> int | None:
    """The block that a tensor of this name is of, counted from 0; None for one of the whole model."""
    match = _BLOCK.search(tensor)
    return int(match[1]) if match else None


def _broken(path: Path, why: str) -> BadInput:
    return BadInput(f"GGUF file '{path}' is broken: {why}; download it again")


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.count = data, path, 0, 0

    def metadata(self) -> dict[str, Any]:
        """All keys and values; of an array of strings, its length."""
        if self.data[:4] != GGUF_MAGIC:
            raise _broken(self.path, "it does not begin as a GGUF file does")
        self.at = 4
        version, self.count, pairs = self.take("IQQ")
        if version not in _VERSIONS:
            raise BadInput(f"'{self.path}' is GGUF version {version}; outpace reads versions 2 and 3")
        metadata = {}
        for _ in range(pairs):
            key = self.string()
            (kind,) = self.take("I")
            metadata[key] = self.value(kind)
        return metadata

    def tensors(self, align: int) -> dict[str, TensorEntry]:
        """The table behind the metadata. ``align``: bytes that each tensor's place is a multiple of."""
        raw = {}
        for _ in range(self.count):
            name = self.string()
            (rank,) = self.take("I")
            if name in raw or rank > _MOST_DIMENSIONS:
                raise ValueError(f"tensor {name} is there twice, or has {rank} dimensions")
            raw[name] = (self.take(f"{rank}Q"), *self.take("IQ"))
        start = -(-self.at // align) * align
        entries = {}
        for name, (shape, kind, offset) in raw.items():
            _, block, nbytes = TYPES[kind]
            if shape and shape[0] % block:
                raise ValueError(f"tensor {name} has rows that are no whole blocks")
            entries[name] = TensorEntry(tuple(shape[::-1]), kind, start + offset, prod(shape) // block * nbytes)
        return entries

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def skip_string(self) -> tuple[int, int]:
        (length,) = self.take("Q")
        begin, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("string beyond the end")
        return begin, self.at

    def skip_strings(self, count: int) -> None:
        """A vocabulary has some hundred thousand: nothing is called here but what reads a length."""
        at, data, read = self.at, self.data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + read(data, at)[0]
        if at > len(data):
            raise ValueError("string beyond the end")
        self.at = at

    def string(self) -> str:
        begin, end = self.skip_string()
        return self.data[begin:end].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        element, length = self.take("IQ")
        if length > len(self.data):
            raise ValueError("array beyond the end")
        if element == _STRING:
            self.skip_strings(length)
            return length
        return list(self.take(f"{length}{_SCALARS[element]}"))
