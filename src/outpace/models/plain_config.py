"""PlainConfig: a ``config.json`` of a known architecture, read without transformers.

The attributes are those of transformers' configuration after it has filled in its defaults, as far as the fast targets
read them. Only what is certain is filled in: a field that is missing, of another type or unknown in its effect raises
Unclear, and the model is loaded through transformers, which knows the rest and words the refusals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


class Unclear(Exception):
    """What a model's files mean cannot be told without transformers; the message says why."""


PlainConfig = SimpleNamespace

GEMMA = {"gemma2", "gemma3_text"}
_KNOWN = {"llama", "mistral", "qwen2", "qwen3", "phi3", *GEMMA}
_WINDOWED_BY_CHOICE = {"qwen2", "qwen3"}
_HAS_ATTENTION_BIAS = {"llama", "qwen3", *GEMMA}
_OF_OTHERS = (
    *("quantization_config", "text_config", "use_bidirectional_attention", "attention_sinks", "pruned_heads"),
    *("transformers_weights", "is_encoder_decoder", "add_cross_attention"),
)
"""Keys that make another model of the same type, or of other files, where they have a value."""
_LARGEST = 2**31


def plain_config(found: Mapping[str, Any]) -> PlainConfig:
    """The configuration that a ``config.json`` holds. Raises Unclear."""
    kind = found.get("model_type")
    if kind not in _KNOWN:
        raise Unclear(f"model_type {kind!r}")
    for key in _OF_OTHERS:
        if found.get(key):
            raise Unclear(f"{key} is set")
    config = PlainConfig(model_type=kind)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        setattr(config, name, _count(found, name))
    config.max_position_embeddings = _count(found, "max_position_embeddings")
    config.rms_norm_eps = _positive(found, "rms_norm_eps")
    key = "hidden_activation" if kind in GEMMA else "hidden_act"
    setattr(config, key, _typed(found, key, str))
    _fill_heads(config, found)
    config.tie_word_embeddings = _flag(found, "tie_word_embeddings", kind in GEMMA)
    config.attention_bias = kind in _HAS_ATTENTION_BIAS and _flag(found, "attention_bias", False)
    config.mlp_bias = kind == "llama" and _flag(found, "mlp_bias", False)
    if kind == "llama" and found.get("pretraining_tp", 1) not in (None, 1):
        raise Unclear("pretraining_tp is set")
    padding = found.get("pad_token_id")
    if padding is not None and not (type(padding) is int and 0 <= padding < config.vocab_size):
        raise Unclear("pad_token_id")
    if kind in GEMMA:
        config.query_pre_attn_scalar = _positive(found, "query_pre_attn_scalar")
        config.attn_logit_softcapping = _softcap(found, "attn_logit_softcapping", kind)
        config.final_logit_softcapping = _softcap(found, "final_logit_softcapping", kind)
    _fill_windows(config, found)
    config.rope_parameters = _rope_of_gemma3(found) if kind == "gemma3_text" else _rope(found)
    if kind == "phi3" and config.rope_parameters["rope_type"] != "default":
        raise Unclear("rotary scaling")
    return config


def _fill_heads(config: PlainConfig, found: Mapping[str, Any]) -> None:
    kind, heads = config.model_type, config.num_attention_heads
    if found.get("num_key_value_heads", 0) is None and kind not in GEMMA:
        config.num_key_value_heads = heads
    else:
        config.num_key_value_heads = _count(found, "num_key_value_heads")
    if heads % config.num_key_value_heads:
        raise Unclear("num_key_value_heads does not divide num_attention_heads")
    derived = kind in {"llama", "mistral"} or (kind in {"qwen2", "phi3"} and "head_dim" not in found)
    if derived and found.get("head_dim") is None:
        if config.hidden_size % heads:
            raise Unclear("num_attention_heads does not divide hidden_size")
        config.head_dim = config.hidden_size // heads
    else:
        config.head_dim = _count(found, "head_dim")
    if kind in {"llama", *GEMMA} and config.hidden_size % heads:
        raise Unclear("num_attention_heads does not divide hidden_size")  # transformers refuses it
    if config.head_dim % 2:
        raise Unclear("head_dim is odd")


def _fill_windows(config: PlainConfig, found: Mapping[str, Any]) -> None:
    """``sliding_window``, and ``layer_types`` of architectures that have two kinds."""
    kind, count = config.model_type, config.num_hidden_layers
    if kind in {"llama", "phi3", "mistral"}:
        if found.get("layer_types") is not None:
            raise Unclear("layer_types")
        if kind == "mistral" and "sliding_window" not in found:
            raise Unclear("sliding_window is missing")
        config.sliding_window = None if kind == "llama" else _optional_count(found, "sliding_window")
        return
    if kind in _WINDOWED_BY_CHOICE:
        used = _flag(found, "use_sliding_window", False)
        config.sliding_window = _optional_count(found, "sliding_window") if used else None
        if used and config.sliding_window is None:
            raise Unclear("sliding_window is missing")
    else:
        config.sliding_window = _count(found, "sliding_window")
    kinds = found.get("layer_types")
    if kinds is None:
        kinds = _layer_types(config, found)
    if not isinstance(kinds, list) or len(kinds) != count:
        raise Unclear("layer_types")
    if any(one not in ("full_attention", "sliding_attention") for one in kinds):
        raise Unclear("layer_types")
    if config.sliding_window is None and "sliding_attention" in kinds:
        raise Unclear("layer_types name a window that is not set")
    config.layer_types = kinds


def _layer_types(config: PlainConfig, found: Mapping[str, Any]) -> list[str]:
    if config.model_type in _WINDOWED_BY_CHOICE:
        if config.sliding_window is None:
            return ["full_attention"] * config.num_hidden_layers
        first = _count(found, "max_window_layers", least=0)
        return [
            "sliding_attention" if index >= first else "full_attention" for index in range(config.num_hidden_layers)
        ]
    every = 2 if config.model_type == "gemma2" else _count({"every": found.get("sliding_window_pattern", 6)}, "every")
    return [
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(config.num_hidden_layers)
    ]


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
    new, old = found.get("rope_parameters"), found.get("rope_scaling")
    if new is not None and old is not None:
        raise Unclear("rope_parameters beside rope_scaling")
    scaling = new if new is not None else old
    if scaling is not None and not isinstance(scaling, Mapping):
        raise Unclear("rope_scaling")
    given = dict(scaling or {})
    if "rope_theta" not in given:
        given["rope_theta"] = found.get("rope_theta")
    part = found.get("partial_rotary_factor")
    return _rope_parameters(given if part is None else {"partial_rotary_factor": part, **given})


def _rope_of_gemma3(found: Mapping[str, Any]) -> dict[str, Any]:
    """One table for each kind of layer."""
    given, scaling = found.get("rope_parameters"), found.get("rope_scaling")
    kinds = ("full_attention", "sliding_attention")
    if given is None and (scaling is None or isinstance(scaling, Mapping)):  # as versions before 5 wrote it
        bases = (found.get("rope_theta"), found.get("rope_local_base_freq"))
        given = dict(zip(kinds, ({"rope_theta": base} for base in bases), strict=True))
        given["full_attention"] |= scaling or {}
    elif scaling is not None or not isinstance(given, Mapping):
        raise Unclear("rope_scaling")
    if set(given) != set(kinds) or not all(isinstance(given[kind], Mapping) for kind in kinds):
        raise Unclear("rope_parameters")
    return {kind: _rope_parameters(dict(given[kind])) for kind in kinds}


def _rope_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """As transformers standardises them: ``rope_type``, ``rope_theta`` and what the type needs."""
    old = given.pop("type", None)
    kind = given.setdefault("rope_type", "default" if old is None else old)
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    if kind not in needed or (old is not None and old != kind):
        raise Unclear(f"rotary scaling {kind!r}")
    for name in ("rope_theta", *needed[kind]):
        given[name] = _positive(given, name)
    if kind == "llama3":
        _count(given, "original_max_position_embeddings")
        if given["high_freq_factor"] <= given["low_freq_factor"]:
            raise Unclear("rotary scaling")
    if given.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
        raise Unclear("partial_rotary_factor")
    known = {"rope_type", "rope_theta", "original_max_position_embeddings", *needed[kind]}
    if kind != "default" and set(given) - known:
        raise Unclear("rotary scaling")
    return given


def _count(found: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = found.get(name)
    if type(value) is not int or not least <= value < _LARGEST:
        raise Unclear(f"{name} is {value!r}")
    return value


def _optional_count(found: Mapping[str, Any], name: str) -> int | None:
    return None if found.get(name) is None else _count(found, name)


def _positive(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise Unclear(f"{name} is {value!r}")
    return value  # type: ignore[return-value]


def _softcap(found: Mapping[str, Any], name: str, kind: str) -> float | None:
    if name not in found and kind == "gemma2":
        raise Unclear(f"{name} is missing")
    return None if found.get(name) is None else _positive(found, name)


def _flag(found: Mapping[str, Any], name: str, default: bool) -> bool:
    return default if name not in found else _typed(found, name, bool)


def _typed(found: Mapping[str, Any], name: str, kind: type) -> Any:
    value = found.get(name)
    if type(value) is not kind:
        raise Unclear(f"{name} is {value!r}")
    return value
