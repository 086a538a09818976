"""Tiny models of every shape that the fast target meets, in every precision, and autoregressive decoding to hold it
to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from gguf_support import add_sizes
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Sequence
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec

VOCAB = 97
CONTEXT = 1024
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
ARITHMETICS = (*PRECISIONS, "bfloat16/int8")
"""Precisions, and one with K/V in 8 bits, as :func:`target_of` takes them."""
_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Rotary scaling as Llama 3 has it."""
ROTATIONS_BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
}
"""Two rotary embeddings in one model, as Gemma 3 has them."""


def config(family: str = "Llama", **changes: Any) -> Any:
    """A configuration of a few thousand weights; sizes are multiples of neither 16 nor 32 unless asked for."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,  # large enough that every layer matters
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return getattr(transformers, f"{family}Config")(**sizes | changes)


def model_of(what: Any, seed: int = 0) -> Any:
    """A random float32 model; every vector of weights is random too, so that none can be left out unseen."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(what).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


SHAPES: dict[str, Callable[[], Any]] = {
    "heads-of-8-in-threes": lambda: config(num_attention_heads=6, head_dim=8),
    "heads-of-16-alone": lambda: config(num_key_value_heads=4),
    "heads-of-32-in-fours": lambda: config(num_key_value_heads=1, head_dim=32, tie_word_embeddings=False),
    "heads-of-64-in-threes": lambda: config(num_attention_heads=3, num_key_value_heads=1, head_dim=64),
    "heads-of-80": lambda: config(head_dim=80, num_hidden_layers=2),
    "biases": lambda: config("Qwen2", hidden_size=64),
    "norms-of-queries": lambda: config("Qwen3"),
    "window-of-6": lambda: config("Mistral", sliding_window=6),
    "window-of-20": lambda: config("Mistral", sliding_window=20),
    "two-rotations": lambda: config("Gemma3Text", sliding_window=5, layer_types=_LOCAL),
    "softcaps": lambda: config("Gemma2", sliding_window=9, layer_types=_LOCAL, attn_logit_softcapping=5.0),
    "fused": lambda: config("Phi3", hidden_size=64),
}
KEPT_IN_BLOCKS = ("heads-of-64-in-threes", "heads-of-32-in-fours", "window-of-6", "heads-of-16-alone")
"""What the tiny GGUF files are made of: their inputs are multiples of 32."""
_SUPER_BLOCKS = "heads-of-16-alone"
"""The one whose inputs are multiples of 256, for K-quants."""


def target_of(shape: str, precision: str, prefill_chunk: int = 512) -> DenseTarget:
    """A target of one shape, built once for each precision; "bfloat16/int8" is bfloat16 with K/V in int8."""
    target = _target(shape, *precision.partition("/")[::2])
    target.prefill_chunk = prefill_chunk
    return target


@cache
def _target(shape: str, precision: str, kv_dtype: str) -> DenseTarget:
    what = SHAPES[shape]()
    if precision != "int4":
        return DenseTarget(read_decoder_spec(model_of(what)), precision, kv_dtype=kv_dtype or "auto")
    super_blocks = shape == _SUPER_BLOCKS
    what.hidden_size = what.intermediate_size = 256 if super_blocks else 64
    model = model_of(what)
    with tempfile.TemporaryDirectory() as folder:
        path = write_blocks(Path(folder) / "tiny.gguf", model, mixed_super_blocks if super_blocks else mixed)
        return DenseTarget(read_decoder_spec(model), precision, gguf=path, kv_dtype=kv_dtype or "auto")


# --- GGUF files of blocks

Kinds = Callable[[str], str]
"""From a tensor's name to the GGUF type that it is written in."""


def mixed(name: str) -> str:
    """As quantised files are: values and the way back a bit more exact than the rest, the embedding most."""
    if "norm" in name:
        return "F32"
    if "attn_v" in name:
        return "Q5_0"
    if "ffn_down" in name:
        return "Q4_1"
    return "Q8_0" if "token_embd" in name else "Q4_0"


def mixed_super_blocks(name: str) -> str:
    """K-quants where the inputs allow it: those of what attention makes are too few."""
    kinds = {"attn_v": "Q6_K", "attn_output": "Q5_1", "ffn_down": "Q5_K", "token_embd": "Q6_K"}
    return "F32" if "norm" in name else kinds.get(name.rpartition(".")[2], "Q4_K")


def rows_of_converters(weight: Any, heads: int) -> Any:
    """Query and key rows as converters lay them: the two halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def rows_of_models(weight: Any, heads: int) -> Any:
    """The inverse of :func:`rows_of_converters`."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_blocks(path: Path, model: Any, kinds: Kinds) -> Path:
    """Write a Llama's weights in blocks, and give the model the very values that the blocks stand for."""
    out = gguf.GGUFWriter(path, "llama")
    add_sizes(out, model.config)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, weight in model.named_parameters():
        if (place := gguf_name(name)) is None:
            continue
        count = heads.get(place.split(".")[-1], 0)
        values = weight.detach().numpy()
        raw, kind = in_blocks(rows_of_converters(values, count) if count else values, kinds(place))
        out.add_tensor(f"{place}.weight", raw, raw_dtype=kind)
        kept = dequantize(raw, kind).reshape(values.shape)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(rows_of_models(kept, count) if count else kept))
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    return path


def in_blocks(values: Any, kind: str) -> tuple[Any, Any]:
    """What lies in the file for a matrix, and its type there."""
    found = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        return np.ascontiguousarray(values, dtype=np.float32), found
    if kind.endswith("_K"):  # the gguf package does not round to these
        return random_blocks(kind, values.shape[0], values.shape[1], len(values), 1e-3), found
    return quantize(np.ascontiguousarray(values, dtype=np.float32), found), found


SCALES = {"Q4_0": 0, "Q4_1": 0, "Q5_0": 0, "Q5_1": 0, "Q8_0": 0, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}
"""Where a block's first scale lies, by kind."""
MINIMA = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}
"""Kinds that have a minimum, or the scale of the minima, behind it."""


def random_blocks(kind: str, outputs: int, inputs: int, seed: int, scale: float = 0.02) -> Any:
    """Rows as they lie in a file: (outputs, bytes)."""
    rng = np.random.default_rng(seed)
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (outputs, inputs // size, width), dtype=np.uint8)
    for at in range(SCALES[kind], SCALES[kind] + (4 if kind in MINIMA else 2), 2):
        halves = rng.normal(0, scale, (outputs, inputs // size)).astype("<f2")
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(outputs, -1)


def gguf_name(name: str) -> str | None:
    """What GGUF files call a parameter of a Llama."""
    ends = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in ends:
        return ends[name]
    _, _, index, *rest = name.split(".")
    inner = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }.get(".".join(rest[:-1]))
    return None if inner is None else f"blk.{index}.{inner}"


# --- autoregressive decoding


class Plain:
    """Decoding one token at a time: one sequence, one row, one thread. Steps are shared between paths."""

    def __init__(self, target: DenseTarget, tokens: list[int]) -> None:
        self.target = target
        self.sequence = target.sequence(tokens[:1])
        with threads(1):
            self.rows = [self._step(self.sequence)]
            for token in tokens[1:]:
                self.sequence.tokens.append(token)
                self.rows.append(self._step(self.sequence))

    def _step(self, sequence: Sequence) -> Tensor:
        scores = self.target.score([(sequence, TokenTree())])
        self.target.commit(scores, [[]])
        return scores[0].logits[0]

    def tree(self, tree: TokenTree) -> Tensor:
        """Logits of every row of a tree after the tokens, each decoded plainly along its own path."""
        states = {ROOT: self.sequence}
        rows = [self.rows[-1]]
        with threads(1):
            for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
                before = states[parent]
                one = self.target.sequence([*before.tokens, token], kv=self.target.fork(before.kv))
                rows.append(self._step(one))
                states[node] = one
        return torch.stack(rows)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads of torch, and so of the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
