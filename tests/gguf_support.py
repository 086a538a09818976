"""Tiny Llamas as GGUF files, whole or with something changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

Tensors = Callable[[str, Any], Any]
"""From a tensor's name and value to what is written of it; None: nothing."""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LLAMA = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
}
_GEMMA = _LLAMA | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAMES = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gemma2": _GEMMA, "gemma3": _GEMMA}
"""What each architecture's files call the modules of a layer."""


def reference(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    limits = {"vocab_size": 261, "num_key_value_heads": 2, "max_position_embeddings": 16384}
    return LlamaForCausalLM(LlamaConfig(**sizes, **limits, tie_word_embeddings=True, **changes)).eval()


class _Changed(gguf.GGUFWriter):  # type: ignore[misc]  # the library has no types
    """A writer that leaves out or replaces tensors, and writes them in the types of ``kinds``."""

    tensor: Tensors = staticmethod(lambda _, weight: weight)
    kinds: Callable[[str], str] = staticmethod(lambda _: "F32")

    def add_tensor(self, name: str, tensor: Any, *rest: Any, **more: Any) -> None:
        changed = self.tensor(name, tensor)
        kind = gguf.GGMLQuantizationType[self.kinds(name)]
        if changed is None:
            return
        if kind == gguf.GGMLQuantizationType.F32 or more:
            super().add_tensor(name, np.ascontiguousarray(changed), *rest, **more)
        else:
            super().add_tensor(name, gguf.quantize(np.ascontiguousarray(changed), kind), raw_dtype=kind)


def add_sizes(out: gguf.GGUFWriter, config: LlamaConfig) -> None:
    """The metadata that llama.cpp requires of a Llama."""
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    out.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    out.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    *,
    keys: Mapping[str, Any] | None = None,
    tensor: Tensors = lambda _, weight: weight,
    kinds: Callable[[str], str] = lambda _: "F32",
) -> Path:
    """The model as llama.cpp's converter would write it (of Llamas: rotary halves interleaved).

    ``keys``: metadata to replace by (value, type), or to leave out (None). ``tensor``: what is written of each tensor.
    ``kinds``: the GGUF type that each tensor is written in.
    """
    config = model.config
    architecture = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    out = _Changed(path, architecture)
    out.tensor, out.kinds = tensor, kinds
    add_sizes(out, config)
    out.add_vocab_size(config.vocab_size)
    tokens = [*SPECIALS, *sorted(ByteLevel.alphabet()), "ĠĠ"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(tokens)
    out.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    out.add_token_merges(["Ġ Ġ"])
    out.add_eos_token_id(2)
    out.add_eot_token_id(3)
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)
    if extra:
        extra(out)
    for key, value in (keys or {}).items():
        out.kv_data[0].pop(key, None)
        if value is not None:
            out.add_key_value(key, *value)

    def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
        rows = weight.shape[0]
        rest = weight.shape[1:]
        return weight.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(rows, *rest)

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        place, _, end = name.rpartition(".")
        index, _, block = place.removeprefix("model.layers.").partition(".")
        theirs = _ENDS.get(place) or f"blk.{index}.{_NAMES[architecture][block]}"
        values = weight.detach().numpy()
        if architecture == "llama" and (count := heads.get(theirs.rpartition(".")[2])):
            values = interleaved(values, count)
        if architecture.startswith("gemma") and "norm" in theirs:
            values = values + 1
        out.add_tensor(f"{theirs}.{end}", np.ascontiguousarray(values))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
