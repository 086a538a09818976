"""The weights of models in files, as :class:`~outpace.targets.dense.architectures.Weights`: safetensors and GGUF.

Neither reads anything before it is asked for; every weight is then checked to be finite. Where anything is not as the
configuration describes it, Unclear is raised and the model is loaded through transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.models.gguf_convert import COMPUTED
from outpace.models.gguf_header import GGUFHeader, TensorEntry
from outpace.models.plain_config import PlainConfig, Unclear
from outpace.models.safetensors_folder import SafetensorsFolder
from outpace.models.weights_check import finite
from outpace.targets.dense import quant_blocks
from outpace.targets.dense.architectures import Place, decoder_spec, rotation_names
from outpace.targets.dense.binding import Packed
from outpace.targets.dense.decoder_spec import DecoderSpec, Matrix
from outpace.targets.dense.rope import rotation


def spec_of(config: PlainConfig, weights: FolderWeights | GGUFWeights) -> DecoderSpec:
    """The spec of a model in files; its layers are read when they are asked for.

    Raises Unclear and UnsupportedArchitecture, also later, when its layers are read.
    """
    found = config.rope_parameters
    kinds = [found if name is None else found[name] for name in rotation_names(config)]
    spec = decoder_spec(config, weights, [rotation(kind, config.head_dim) for kind in kinds])
    _ = spec.layers[0], spec.layers[-1]  # before anything is made in sizes that the file does not have
    return spec


class _Counted:
    """What both share. ``parameters``: numbers in the tensors that were read, each tensor once."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype, tied: bool) -> None:
        self.dtype, self.tied = dtype, tied
        self._sizes: dict[str, int] = {}

    @property
    def parameters(self) -> int:
        return sum(self._sizes.values())

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if not finite(tensor):
            raise Unclear(f"{name} has values that are not finite")
        self._sizes[name] = tensor.numel()
        return tensor


class FolderWeights(_Counted):
    """Tensors of safetensors by transformers' names."""

    in_blocks = False

    def __init__(self, config: PlainConfig, folder: SafetensorsFolder, dtype: torch.dtype) -> None:
        super().__init__(dtype, config.tie_word_embeddings)
        if self.tied and "lm_head.weight" in folder:
            raise Unclear("an LM head that is tied to the embedding is in the file")  # which one holds?
        self._folder = folder

    def matrix(self, place: Place, shape: tuple[int, int], *, bias: bool = False) -> Matrix:
        weight = self._tensor(f"{place.name}.weight", shape)
        return Matrix(weight, self._tensor(f"{place.name}.bias", shape[:1]) if bias else None, place.gguf)

    def norm(self, place: Place, size: int, shift: float) -> Matrix:
        return Matrix(self._tensor(f"{place.name}.weight", (size,)).float() + shift, name=place.gguf)

    def check_all_read(self) -> None:
        """Nothing: transformers reads no more than it has a place for, either."""

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checked(name, self._folder.tensor(name, shape).to(self.dtype))


_INTERLEAVED = {"llama"}
"""Architectures of whose query and key heads GGUF files interleave the halves."""
IN_PLACE = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
"""Architectures of GGUF files that are read in place, and what transformers calls them."""


class GGUFWeights(_Counted):
    """Tensors of a GGUF file: matrices in its blocks where the kernels take them, all else in ``dtype``."""

    in_blocks = True

    def __init__(self, config: PlainConfig, header: GGUFHeader, dtype: torch.dtype) -> None:
        super().__init__(dtype, "output.weight" not in header.tensors)
        if IN_PLACE.get(header.architecture) != config.model_type:
            raise Unclear(f"a GGUF file of architecture {header.architecture}")
        if header.model.extra_blocks or config.tie_word_embeddings != self.tied:
            raise Unclear("tensors that transformers leaves out")
        self._config, self._header = config, header

    def matrix(self, place: Place, shape: tuple[int, int], *, bias: bool = False) -> Matrix:
        name = f"{place.gguf}.weight"
        entry = self._entry(name, shape)
        order = None
        if self._config.model_type in _INTERLEAVED and place.gguf.endswith(("attn_q", "attn_k")):
            order = quant_blocks.halves_apart(shape[0], self._config.head_dim)
        stored = _StoredMatrix(self._header, name, order)
        added = self._floats(f"{place.gguf}.bias", shape[:1]).to(self.dtype) if bias else None
        if entry.kind_name not in quant_blocks.KINDS:
            return Matrix(self._checked(name, stored.rows().to(self.dtype)), added, place.gguf)
        self._sizes[name] = shape[0] * shape[1]
        return Matrix(torch.empty(shape, dtype=self.dtype, device="meta"), added, place.gguf, stored)

    def norm(self, place: Place, size: int, shift: float) -> Matrix:
        return Matrix(self._floats(f"{place.gguf}.weight", (size,)), name=place.gguf)  # shifted in the file

    def check_all_read(self) -> None:
        """Raise Unclear where the file holds weights that were not asked for, such as biases."""
        unread = [name for name in self._header.tensors if name not in self._sizes and not name.startswith(COMPUTED)]
        if unread:
            raise Unclear(f"{unread[0]} has no place")

    def _floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._entry(name, shape)
        return self._checked(name, _StoredMatrix(self._header, name).rows().view(shape))

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self._header.tensors.get(name)
        if entry is None or entry.shape != shape:
            raise Unclear(f"{name} is missing or of another shape")
        return entry


class _StoredMatrix:
    """A tensor of a GGUF file, read when it is asked for. ``order``: of its rows in the file, for the model's."""

    def __init__(self, header: GGUFHeader, name: str, order: quant_blocks.Rows | None = None) -> None:
        self._header, self._name, self._order = header, name, order
        self._entry = header.tensors[name]

    def blocks(self) -> Packed:
        return quant_blocks.from_gguf(self._entry.kind_name, self._header.mapped(self._name), self._order)

    def rows(self, chosen: Tensor | None = None) -> Tensor:
        raw = self._raw(None if chosen is None else chosen.numpy())
        if self._entry.kind_name == "F32":  # norms and biases: importing gguf takes longer than reading them
            return torch.from_numpy(np.array(raw).view(np.float32))
        from gguf import GGMLQuantizationType, dequantize

        found = dequantize(raw, GGMLQuantizationType(self._entry.kind))
        return torch.from_numpy(np.require(found, np.float32, ["C", "W"]))

    def _raw(self, chosen: Any = None) -> quant_blocks.Raw:
        """(rows, bytes)."""
        rows = self._header.mapped(self._name)
        if self._order is not None:
            chosen = self._order if chosen is None else self._order[chosen]
        return rows if chosen is None else rows[chosen]
