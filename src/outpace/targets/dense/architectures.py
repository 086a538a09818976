"""Reading a DecoderSpec: the architectures that the fast targets know, from a configuration and weights by their names.

The Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and Phi-3 families. The generic target runs all others. The
weights are those of a transformers model, of safetensors or of a GGUF file; one reading serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from outpace.models.plain_config import GEMMA
from outpace.targets.context_limit import context_limit
from outpace.targets.dense.binding import ACTIVATIONS
from outpace.targets.dense.decoder_spec import DecoderSpec, LayerSpec, Matrix, Rotation


class UnsupportedArchitecture(Exception):
    """The fast targets cannot run the model; the message says why."""


_NORMS_OF_HEADS = {"qwen3", "gemma3_text"}
KNOWN = {"llama", "mistral", "qwen2", "qwen3", "phi3", *GEMMA}
CLASSES = {
    **{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "phi3": "Phi3ForCausalLM"},
    **{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"},
    **{"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"},
}
"""What transformers calls a causal LM of each architecture."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module's weights are: its name in transformers' models, and in GGUF files."""

    name: str
    gguf: str


class Weights(Protocol):
    """The weights of a model by name. Methods raise UnsupportedArchitecture for one that is missing or misshapen."""

    dtype: torch.dtype
    device: torch.device
    tied: bool
    """Whether the LM head is the embedding."""
    in_blocks: bool
    """Whether matrices may be :attr:`Matrix.stored`."""

    def matrix(self, place: Place, shape: tuple[int, int], *, bias: bool = False) -> Matrix:
        """A linear layer's, or the embedding's. ``bias``: whether the architecture has one there."""
        ...

    def norm(self, place: Place, size: int, shift: float) -> Matrix:
        """Factors of an RMS norm in float32; ``shift`` is what the architecture adds to the trained ones."""
        ...


class LazyLayers(Sequence[LayerSpec]):
    """Layers that are read when they are asked for, each time: no more of them is in memory than is in use."""

    def __init__(self, count: int, read: Callable[[int], LayerSpec]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerSpec: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerSpec]: ...

    def __getitem__(self, index: int | slice) -> LayerSpec | list[LayerSpec]:
        if isinstance(index, slice):
            return [self._read(one) for one in range(self._count)[index]]
        return self._read(range(self._count)[index])

    def __iter__(self) -> Iterator[LayerSpec]:
        return map(self._read, range(self._count))


def rotation_names(config: Any) -> list[str | None]:
    """The kinds of layers that have rotary embeddings of their own; [None]: one serves all."""
    kinds = list(getattr(config, "layer_types", None) or [])
    return [*sorted(set(kinds))] if config.model_type == "gemma3_text" else [None]


def decoder_spec(config: Any, weights: Weights, rotations: list[Rotation], *, layers: int | None = None) -> DecoderSpec:
    """The spec of a model that ``config`` describes, with the attributes of transformers' configurations.

    ``rotations``: one for each of :func:`rotation_names`. ``layers``: how many, where not as described. Raises
    UnsupportedArchitecture, and may raise it later, for layers are read when they are asked for.
    """
    if config.model_type not in KNOWN:
        raise UnsupportedArchitecture(f"architecture {config.model_type} is not among {', '.join(sorted(KNOWN))}")
    if getattr(config, "attention_sinks", None) or getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedArchitecture("its attention is of another kind")
    reader = _Reader(config, weights)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    embedding = weights.matrix(Place("model.embed_tokens", "token_embd"), (vocabulary, hidden))
    head = None if weights.tied else weights.matrix(Place("lm_head", "output"), (vocabulary, hidden))
    limit, note = context_limit(config)
    scale = float(hidden**0.5) if config.model_type in GEMMA else 1.0
    return DecoderSpec(
        layers=LazyLayers(config.num_hidden_layers if layers is None else layers, reader.layer),
        hidden=hidden,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=reader.head_size,
        intermediate=config.intermediate_size,
        vocabulary=(embedding if head is None else head).weight.shape[0],
        activation=reader.activation,
        epsilon=config.rms_norm_eps,
        attention_scale=float(reader.attention_scale),
        embedding=embedding,
        lm_head=head,
        final_norm=weights.norm(Place("model.norm", "output_norm"), hidden, reader.shift),
        rotations=rotations,
        context_length=limit,
        context_note=note,
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        final_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        embedding_scale=float(torch.tensor(scale).to(weights.dtype)),  # Gemma rounds it to the weights' precision
        dtype=weights.dtype,
        device=weights.device,
        in_blocks=weights.in_blocks,
    )


class _Reader:
    """Reads layers as their architecture arranges them."""

    def __init__(self, config: Any, weights: Weights) -> None:
        self.config, self.weights = config, weights
        kind = config.model_type
        self.shift = 1.0 if kind in GEMMA else 0.0
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention_scale = (config.query_pre_attn_scalar if kind in GEMMA else self.head_size) ** -0.5
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        self.activation = "silu" if activation == "swish" else activation
        if self.activation not in ACTIVATIONS:
            raise UnsupportedArchitecture(f"its activation is {activation}")
        self.kinds = list(getattr(config, "layer_types", None) or [])
        if set(self.kinds) - {"full_attention", "sliding_attention"}:
            raise UnsupportedArchitecture("its attention is of another kind")
        self.names = rotation_names(config)

    def layer(self, index: int) -> LayerSpec:
        config = self.config
        local = self.kinds[index] == "sliding_attention" if self.kinds else True
        query, key, value, out = self._attention(index)
        gate, up, down = self._mlp(index)
        return LayerSpec(
            query=query,
            key=key,
            value=value,
            out=out,
            gate=gate,
            up=up,
            down=down,
            norms=self._norms(index),
            window=int(getattr(config, "sliding_window", None) or 0) if local else 0,
            rotation=self.names.index(self.kinds[index]) if self.names[0] else 0,
        )

    def _attention(self, index: int) -> list[Matrix]:
        config, hidden = self.config, self.config.hidden_size
        query, key = (heads * self.head_size for heads in (config.num_attention_heads, config.num_key_value_heads))
        biased = bool(getattr(config, "attention_bias", False))  # Llama, Qwen3 and Gemma have the choice
        name, block = f"model.layers.{index}.self_attn.", f"blk.{index}.attn_"
        out = self.weights.matrix(Place(f"{name}o_proj", f"{block}output"), (hidden, query), bias=biased)
        if config.model_type == "phi3":
            fused = self.weights.matrix(Place(f"{name}qkv_proj", ""), (query + 2 * key, hidden))
            return [*_split(fused, [query, key, key]), out]
        biased |= config.model_type == "qwen2"
        parts = (("q", query), ("k", key), ("v", key))
        return [
            *(
                self.weights.matrix(Place(f"{name}{one}_proj", f"{block}{one}"), (size, hidden), bias=biased)
                for one, size in parts
            ),
            out,
        ]

    def _mlp(self, index: int) -> list[Matrix]:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        biased = bool(getattr(config, "mlp_bias", False))
        name, block = f"model.layers.{index}.mlp.", f"blk.{index}.ffn_"
        down = self.weights.matrix(Place(f"{name}down_proj", f"{block}down"), (hidden, inner), bias=biased)
        if config.model_type == "phi3":
            fused = self.weights.matrix(Place(f"{name}gate_up_proj", ""), (2 * inner, hidden))
            return [*_split(fused, [inner, inner]), down]
        return [
            *(
                self.weights.matrix(Place(f"{name}{one}_proj", f"{block}{one}"), (inner, hidden), bias=biased)
                for one in ("gate", "up")
            ),
            down,
        ]

    def _norms(self, index: int) -> dict[str, Matrix]:
        kind, hidden = self.config.model_type, self.config.hidden_size
        if kind in GEMMA:
            places = {
                "norm1": ("input_layernorm", "attn_norm", hidden),
                "post1": ("post_attention_layernorm", "post_attention_norm", hidden),
                "norm2": ("pre_feedforward_layernorm", "ffn_norm", hidden),
                "post2": ("post_feedforward_layernorm", "post_ffw_norm", hidden),
            }
        else:
            places = {
                "norm1": ("input_layernorm", "attn_norm", hidden),
                "norm2": ("post_attention_layernorm", "ffn_norm", hidden),
            }
        if kind in _NORMS_OF_HEADS:
            places["query"] = ("self_attn.q_norm", "attn_q_norm", self.head_size)
            places["key"] = ("self_attn.k_norm", "attn_k_norm", self.head_size)
        return {
            norm: self.weights.norm(Place(f"model.layers.{index}.{name}", f"blk.{index}.{block}"), size, self.shift)
            for norm, (name, block, size) in places.items()
        }


def _split(matrix: Matrix, sizes: list[int]) -> list[Matrix]:
    weights = torch.split(matrix.weight, sizes)
    biases: Sequence[Tensor | None] = [None] * len(sizes) if matrix.bias is None else torch.split(matrix.bias, sizes)
    return [Matrix(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
