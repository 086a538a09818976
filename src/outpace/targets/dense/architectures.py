"""Reading a DecoderSpec from a transformers model: the architectures that the fast targets know.

The Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and Phi-3 families. The generic target runs all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.context_limit import context_limit
from outpace.targets.dense.binding import ACTIVATIONS
from outpace.targets.dense.decoder_spec import DecoderSpec, LayerSpec, Matrix


class UnsupportedArchitecture(Exception):
    """The fast targets cannot run the model; the message says why."""


_GEMMA = {"gemma2", "gemma3_text"}
KNOWN = {"llama", "mistral", "qwen2", "qwen3", "phi3", *_GEMMA}


def read_decoder_spec(model: Any) -> DecoderSpec:
    """The spec of a transformers causal LM on one device; its tensors are the model's own.

    Raises UnsupportedArchitecture.
    """
    config = model.config
    if config.model_type not in KNOWN:
        raise UnsupportedArchitecture(f"architecture {config.model_type} is not among {', '.join(sorted(KNOWN))}")
    try:
        return _read(model, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedArchitecture(f"its parts are not the expected ones ({error})") from error


def spec_if_known(model: Any) -> DecoderSpec | None:
    """:func:`read_decoder_spec`, or None where it raises."""
    try:
        return read_decoder_spec(model)
    except UnsupportedArchitecture:
        return None


def _read(model: Any, config: Any) -> DecoderSpec:
    inner = model.model
    if getattr(config, "attention_sinks", None) or getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedArchitecture("its attention is of another kind")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    activation = "silu" if activation == "swish" else activation
    if activation not in ACTIVATIONS:
        raise UnsupportedArchitecture(f"its activation is {activation}")
    kinds = list(getattr(config, "layer_types", None) or [])
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedArchitecture("its attention is of another kind")
    names: list[str | None] = [*sorted(set(kinds))] if config.model_type == "gemma3_text" else [None]
    first = inner.layers[0].self_attn
    tied = model.lm_head.weight.data_ptr() == inner.embed_tokens.weight.data_ptr()
    limit, note = context_limit(config)
    shift = 1.0 if config.model_type in _GEMMA else 0.0
    return DecoderSpec(
        layers=[
            _layer(config, layer, index, names.index(kinds[index]) if names[0] else 0, shift)
            for index, layer in enumerate(inner.layers)
        ],
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=first.head_dim,
        intermediate=config.intermediate_size,
        vocabulary=model.lm_head.weight.shape[0],
        activation=activation,
        epsilon=config.rms_norm_eps,
        attention_scale=float(first.scaling),
        embedding=Matrix(_plain(inner.embed_tokens, nn.Embedding), name="token_embd"),
        lm_head=None if tied else _matrix(model.lm_head, "output"),
        final_norm=_norm(inner.norm, "output_norm", shift),
        rotations=[partial(_rotation, inner.rotary_emb, name) for name in names],
        context_length=limit,
        context_note=note,
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        final_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        # Gemma rounds this factor to the weights' precision.
        embedding_scale=float(getattr(inner.embed_tokens, "embed_scale", torch.tensor(_scale(config))).to(model.dtype)),
        dtype=model.dtype,
        device=_device(model),
    )


def _scale(config: Any) -> float:
    return float(config.hidden_size**0.5) if config.model_type in _GEMMA else 1.0


def _layer(config: Any, layer: Any, index: int, rotation: int, shift: float) -> LayerSpec:
    attention, mlp = layer.self_attn, layer.mlp
    name = f"blk.{index}."
    kinds = getattr(config, "layer_types", None)
    local = kinds[index] == "sliding_attention" if kinds else True
    window = int(getattr(config, "sliding_window", None) or 0) if local else 0
    query_size = config.num_attention_heads * attention.head_dim
    key_size = config.num_key_value_heads * attention.head_dim
    if hasattr(attention, "qkv_proj"):
        qkv = _split(_matrix(attention.qkv_proj), [query_size, key_size, key_size])
        gate, up = _split(_matrix(mlp.gate_up_proj), [config.intermediate_size] * 2)
    else:
        qkv = [_matrix(getattr(attention, f"{one}_proj"), f"{name}attn_{one}") for one in ("q", "k", "v")]
        gate, up = _matrix(mlp.gate_proj, f"{name}ffn_gate"), _matrix(mlp.up_proj, f"{name}ffn_up")
    norms = {"norm1": _norm(layer.input_layernorm, f"{name}attn_norm", shift)}
    if hasattr(layer, "pre_feedforward_layernorm"):
        norms["post1"] = _norm(layer.post_attention_layernorm, f"{name}post_attention_norm", shift)
        norms["norm2"] = _norm(layer.pre_feedforward_layernorm, f"{name}ffn_norm", shift)
        norms["post2"] = _norm(layer.post_feedforward_layernorm, f"{name}post_ffw_norm", shift)
    else:
        norms["norm2"] = _norm(layer.post_attention_layernorm, f"{name}ffn_norm", shift)
    if getattr(attention, "q_norm", None) is not None:
        norms["query"] = _norm(attention.q_norm, f"{name}attn_q_norm", shift)
        norms["key"] = _norm(attention.k_norm, f"{name}attn_k_norm", shift)
    return LayerSpec(
        query=qkv[0],
        key=qkv[1],
        value=qkv[2],
        out=_matrix(attention.o_proj, f"{name}attn_output"),
        gate=gate,
        up=up,
        down=_matrix(mlp.down_proj, f"{name}ffn_down"),
        norms=norms,
        window=window,
        rotation=rotation,
    )


def _plain(module: nn.Module, kind: type[nn.Module]) -> Tensor:
    weight = module.weight
    if not isinstance(module, kind) or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise UnsupportedArchitecture(f"{type(module).__name__} is not a plain {kind.__name__}")
    return weight.detach()


def _device(model: Any) -> torch.device:
    devices: list[torch.device] = sorted({weight.device for weight in model.parameters()}, key=str)
    if len(devices) != 1:
        raise UnsupportedArchitecture(f"its weights are on {' and '.join(map(str, devices))}")
    return devices[0]


def _matrix(module: nn.Module, name: str = "") -> Matrix:
    bias = module.bias
    return Matrix(_plain(module, nn.Linear), bias.detach() if isinstance(bias, Tensor) else None, name)


def _norm(module: nn.Module, name: str, shift: float) -> Matrix:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return Matrix(weight.detach().float() + shift, name=name)


def _split(matrix: Matrix, sizes: list[int]) -> list[Matrix]:
    weights = torch.split(matrix.weight, sizes)
    biases: Iterable[Tensor | None] = [None] * len(sizes) if matrix.bias is None else torch.split(matrix.bias, sizes)
    return [Matrix(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _rotation(module: Any, kind: str | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The model's own rotary embedding, in float32."""
    like = torch.zeros(1, 1, 1)
    extra = () if kind is None else (kind,)
    with torch.inference_mode():
        cosines, sines = module(like, positions[None], *extra)
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()
