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


def reference(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    limits = {"vocab_size": 261, "num_key_value_heads": 2, "max_position_embeddings": 16384}
    return LlamaForCausalLM(LlamaConfig(**sizes, **limits, tie_word_embeddings=True, **changes)).eval()


class _Changed(gguf.GGUFWriter):  # type: ignore[misc]  # the library has no types
    """A writer that leaves out or replaces tensors."""

    tensor: Tensors = staticmethod(lambda _, weight: weight)

    def add_tensor(self, name: str, tensor: Any, *rest: Any, **more: Any) -> None:
        changed = self.tensor(name, tensor)
        if changed is not None:
            super().add_tensor(name, np.ascontiguousarray(changed), *rest, **more)


def add_sizes(out: gguf.GGUFWriter, config: LlamaConfig) -> None:
    """The metadata that llama.cpp requires of a Llama."""
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_rope_dimension_count(config.head_dim)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    *,
    keys: Mapping[str, Any] | None = None,
    tensor: Tensors = lambda _, weight: weight,
) -> Path:
    """The model as llama.cpp's converter would write it (rotary halves interleaved).

    ``keys``: metadata to replace by (value, type), or to leave out (None). ``tensor``: what is written of each tensor.
    """
    config = model.config
    out = _Changed(path, "llama")
    out.tensor = tensor
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
        rows, columns = weight.shape
        return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    def add(name: str, weight: np.ndarray) -> None:
        out.add_tensor(f"{name}.weight", np.ascontiguousarray(weight))

    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    add("token_embd", weights["model.embed_tokens.weight"])
    add("output_norm", weights["model.norm.weight"])
    for i in range(config.num_hidden_layers):
        layer = {name.split(f"layers.{i}.")[1]: w for name, w in weights.items() if f"layers.{i}." in name}
        add(f"blk.{i}.attn_q", interleaved(layer["self_attn.q_proj.weight"], config.num_attention_heads))
        add(f"blk.{i}.attn_k", interleaved(layer["self_attn.k_proj.weight"], config.num_key_value_heads))
        add(f"blk.{i}.attn_v", layer["self_attn.v_proj.weight"])
        add(f"blk.{i}.attn_output", layer["self_attn.o_proj.weight"])
        for ours, theirs in (("gate", "gate"), ("up", "up"), ("down", "down")):
            add(f"blk.{i}.ffn_{ours}", layer[f"mlp.{theirs}_proj.weight"])
        add(f"blk.{i}.attn_norm", layer["input_layernorm.weight"])
        add(f"blk.{i}.ffn_norm", layer["post_attention_layernorm.weight"])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
