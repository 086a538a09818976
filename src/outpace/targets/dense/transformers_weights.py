"""The weights of a transformers model that is in memory, and the DecoderSpec that is read from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.dense.architectures import KNOWN, Place, UnsupportedArchitecture, decoder_spec, rotation_names
from outpace.targets.dense.decoder_spec import DecoderSpec, Matrix, Rotation


def read_decoder_spec(model: Any) -> DecoderSpec:
    """The spec of a transformers causal LM on one device; its tensors are the model's own.

    Raises UnsupportedArchitecture.
    """
    config = model.config
    if config.model_type not in KNOWN:
        raise UnsupportedArchitecture(f"architecture {config.model_type} is not among {', '.join(sorted(KNOWN))}")
    try:
        inner = model.model
        rotations: list[Rotation] = [partial(_rotation, inner.rotary_emb, name) for name in rotation_names(config)]
        spec = decoder_spec(config, ModelWeights(model), rotations, layers=len(inner.layers))
        spec.layers = list(spec.layers)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedArchitecture(f"its parts are not the expected ones ({error})") from error
    return spec


def spec_if_known(model: Any) -> DecoderSpec | None:
    """:func:`read_decoder_spec`, or None where it raises."""
    try:
        return read_decoder_spec(model)
    except UnsupportedArchitecture:
        return None


class ModelWeights:
    """A transformers model's :class:`~outpace.targets.dense.architectures.Weights`: its own tensors.

    Raises UnsupportedArchitecture where its weights are on several devices.
    """

    in_blocks = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self.dtype = model.dtype
        self.device = _device(model)
        self.tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    def matrix(self, place: Place, shape: tuple[int, int], *, bias: bool = False) -> Matrix:
        module = self._model.get_submodule(place.name)
        weight, kind = module.weight, nn.Embedding if place.name.endswith("embed_tokens") else nn.Linear
        if not isinstance(module, kind) or not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise UnsupportedArchitecture(f"{type(module).__name__} is not a plain {kind.__name__}")
        own = getattr(module, "bias", None)
        return Matrix(weight.detach(), own.detach() if isinstance(own, Tensor) else None, place.gguf)

    def norm(self, place: Place, size: int, shift: float) -> Matrix:
        weight = self._model.get_submodule(place.name).weight
        return Matrix(weight.detach().float() + shift, name=place.gguf)


def _device(model: Any) -> torch.device:
    devices: list[torch.device] = sorted({weight.device for weight in model.parameters()}, key=str)
    if len(devices) != 1:
        raise UnsupportedArchitecture(f"its weights are on {' and '.join(map(str, devices))}")
    return devices[0]


def _rotation(module: Any, kind: str | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The model's own rotary embedding, in float32."""
    like = torch.zeros(1, 1, 1)
    extra = () if kind is None else (kind,)
    with torch.inference_mode():
        cosines, sines = module(like, positions[None], *extra)
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()
