"""ModelShape: the sizes of a decoder, from which its weights, its K/V and its operations follow; presets.

Presets are the values of the ``config.json`` that each model is published with (the address is ``source``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.files import read_json
from outpace.core.names import normalised, unknown

_HUB = "https://huggingface.co/"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP. ``experts`` of width ``intermediate`` each, of which
    every token uses ``active_experts`` (1 and 1: a dense model), and a shared one of width ``shared`` that all use.

    ``tied``: embedding and LM head are one matrix.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    shared: int = 0
    source: str = ""

    @property
    def attention_weights(self) -> int:
        """Of one layer."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one expert of one layer; of a dense layer its MLP."""
        return 3 * self.hidden * self.intermediate

    @property
    def shared_weights(self) -> int:
        """Of what every token uses of a layer's MLP beside its experts: the shared expert and the router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return 3 * self.hidden * self.shared + router

    @property
    def head_weights(self) -> int:
        """Of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Of the whole model, norms and biases left out."""
        layer = self.attention_weights + self.shared_weights + self.experts * self.expert_weights
        return self.layers * layer + self.head_weights * (1 if self.tied else 2)

    def touched_experts(self, rows: float) -> float:
        """Experts of a layer that ``rows`` tokens are expected to use, each token ``active_experts`` of them, all
        equally likely (Huang et al. 2025, arXiv 2505.19645: MoESD)."""
        left_out: float = (1.0 - self.active_experts / self.experts) ** rows
        return self.experts * (1.0 - left_out)

    def kv_bytes(self, bits: int = 16) -> int:
        """Of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * bits // 8


def _dense(
    name: str,
    hub: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    intermediate: int,
    vocabulary: int,
    *,
    tied: bool = False,
) -> ModelShape:
    sizes = layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary
    return ModelShape(name, *sizes, tied=tied, source=_HUB + hub)


_PRESETS = (
    _dense("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
    ModelShape(
        "smollm2-draft-lm", 3, 576, 9, 3, 64, 512, 8192, True, source="shipped with outpace: a draft model for smollm2"
    ),
    _dense("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 32, 960, 15, 5, 64, 2560, 49152, tied=True),
    _dense("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 24, 2048, 32, 32, 64, 8192, 49152, tied=True),
    _dense("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", 24, 896, 14, 2, 64, 4864, 151936, tied=True),
    _dense("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    _dense("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", 36, 2048, 16, 2, 128, 11008, 151936, tied=True),
    _dense("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", 28, 3584, 28, 4, 128, 18944, 152064),
    _dense("qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", 48, 5120, 40, 8, 128, 13824, 152064),
    _dense("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", 64, 5120, 40, 8, 128, 27648, 152064),
    _dense("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct", 80, 8192, 64, 8, 128, 29568, 152064),
    _dense("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    _dense("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
    _dense("llama-2-7b", "meta-llama/Llama-2-7b-chat-hf", 32, 4096, 32, 32, 128, 11008, 32000),
    _dense("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", 32, 4096, 32, 8, 128, 14336, 128256),
    _dense("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", 80, 8192, 64, 8, 128, 28672, 128256),
    _dense("llama-3.1-405b", "meta-llama/Llama-3.1-405B-Instruct", 126, 16384, 128, 8, 128, 53248, 128256),
    ModelShape(
        "mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, False, 8, 2, 0,
        _HUB + "mistralai/Mixtral-8x7B-Instruct-v0.1",
    ),
    ModelShape(
        "qwen2-57b-a14b", 28, 3584, 28, 4, 128, 2560, 151936, False, 64, 8, 20480, _HUB + "Qwen/Qwen2-57B-A14B-Instruct"
    ),
    ModelShape(
        "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, False, 128, 8, 0, _HUB + "Qwen/Qwen3-30B-A3B"
    ),
)  # fmt: skip
SHAPES: Mapping[str, ModelShape] = {one.name: one for one in _PRESETS}
_ALSO = {"smollm2": "smollm2-135m"}
"""Names that outpace loads models by."""
_OTHERS = {
    "kv_lora_rank": "latent attention",
    "n_routed_experts": "routed experts beside dense layers",
    "moe_num_experts": "routed experts beside dense layers",
    "mlp_only_layers": "dense layers among layers of experts",
    "first_k_dense_replace": "dense layers among layers of experts",
    "linear_num_value_heads": "layers of linear attention",
    "mamba_d_state": "state-space layers",
    "state_size": "state-space layers",
}
"""Entries of configurations of decoders that a shape does not describe, and what these have."""


def find_shape(name: str) -> ModelShape:
    """A preset, or the shape in the ``config.json`` at ``name`` (a file, or a folder that holds it).

    Raises BadInput for what is neither, and for a configuration that is not of such a decoder.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.name == "config.json" and path.is_file():
        return read_shape(path)
    for one in _PRESETS:
        if normalised(one.name) == normalised(_ALSO.get(name, name)):
            return one
    hint = str(unknown("model shape", name, list(SHAPES)))
    raise BadInput(f"{hint}; or give the path of a config.json")


def read_shape(path: Path) -> ModelShape:
    """The shape in a configuration. Raises BadInput for one without the sizes of such a decoder, or of another kind."""
    found = read_json(path)
    for key, what in _OTHERS.items():
        if found.get(key):
            raise BadInput(
                f"{path} is of a model with {what} ('{key}'), whose times are not predicted here; name a model with "
                "grouped-query attention, dense or with experts in every layer"
            )
    try:
        heads, hidden = _size(found, "num_attention_heads"), _size(found, "hidden_size")
        experts = found.get("num_local_experts") or found.get("num_experts") or 1
        width = found.get("moe_intermediate_size") if experts > 1 else None
        return ModelShape(
            name=path.parent.name,
            layers=_size(found, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            head_size=int(found.get("head_dim") or hidden // heads),
            intermediate=int(width or _size(found, "intermediate_size")),
            vocabulary=_size(found, "vocab_size"),
            tied=bool(found.get("tie_word_embeddings", False)),
            experts=int(experts),
            active_experts=int(found.get("num_experts_per_tok") or 1) if experts > 1 else 1,
            shared=int(found.get("shared_expert_intermediate_size") or 0),
            source=str(path),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not the configuration of a decoder: {error}") from None


def _size(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"'{name}' is {value!r}")
    return value
