"""GGUFHeader: metadata and the table of tensors of a GGUF file, read without touching the weights.

outpace reads it itself, so that a broken file is refused before anything is converted, and because it has what
transformers' converter leaves out (rotary scaling, further end-of-turn tokens).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import BadInput
from outpace.models.source import GGUF_MAGIC

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_F32 = 0


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
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.kind).name)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file. Arrays of strings in ``metadata`` are replaced by their length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def architecture(self) -> str:
        """The name of the architecture as llama.cpp spells it."""
        return str(self.metadata["general.architecture"])

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(prod(entry.shape) for entry in self.tensors.values())

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's own prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def float32(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values of a tensor that is stored as float32, flat. Raises BadInput for one that is not."""
        entry = self.tensors[name]
        if entry.kind != _F32:
            raise BadInput(f"'{self.path}': tensor {name} should be float32")
        return np.fromfile(self.path, np.float32, prod(entry.shape), offset=entry.offset)

    def rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A matrix as it lies in the file: (outputs, bytes of a row)."""
        entry = self.tensors[name]
        return np.fromfile(self.path, np.uint8, entry.nbytes, offset=entry.offset).reshape(entry.shape[0], -1)


def read_header(path: Path) -> GGUFHeader:
    """Read and check the head of a file. Raises BadInput when it is broken, truncated or one part of several."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, entries, size = _Reader(data, path).header()
    except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError, MemoryError) as error:
        raise _broken(path, "its header cannot be read") from error
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror}") from error
    if metadata.get("split.count", 0) > 1:
        raise BadInput(f"'{path}' is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    if "general.architecture" not in metadata:
        raise _broken(path, "it names no architecture")
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=0)
    if not entries or end > size:
        raise _broken(path, f"it is truncated ({size:,} of {end:,} bytes)" if entries else "it holds no weights")
    return GGUFHeader(path, metadata, entries)


def _broken(path: Path, why: str) -> BadInput:
    return BadInput(f"GGUF file '{path}' is broken: {why}; download it again")


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> tuple[dict[str, Any], dict[str, TensorEntry], int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if self.data[:4] != GGUF_MAGIC:
            raise _broken(self.path, "it does not begin as a GGUF file does")
        self.at = 4
        version, tensors, pairs = self.take("IQQ")
        if version not in _VERSIONS:
            raise BadInput(f"'{self.path}' is GGUF version {version}; outpace reads versions 2 and 3")
        metadata = {}
        for _ in range(pairs):
            key = self.string()
            (kind,) = self.take("I")
            metadata[key] = self.value(kind)
        raw = {}
        for _ in range(tensors):
            name = self.string()
            (rank,) = self.take("I")
            raw[name] = (self.take(f"{rank}Q"), *self.take("IQ"))
        align = int(metadata.get("general.alignment", 32))
        start = -(-self.at // align) * align
        entries = {}
        for name, (shape, kind, offset) in raw.items():
            block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            entries[name] = TensorEntry(tuple(shape[::-1]), kind, start + offset, prod(shape) // block * nbytes)
        return metadata, entries, len(self.data)

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
            for _ in range(length):
                self.skip_string()
            return length
        return list(self.take(f"{length}{_SCALARS[element]}"))
