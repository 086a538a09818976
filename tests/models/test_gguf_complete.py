"""Every weight and key that a model needs comes from its GGUF file, or is named and refused; nothing is cached then."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gguf_support import reference, write_gguf
from outpace.core.errors import BadInput
from outpace.models.gguf_cache import converted

U32, I32, TEXT, F32 = (
    gguf.GGUFValueType.UINT32,
    gguf.GGUFValueType.INT32,
    gguf.GGUFValueType.STRING,
    gguf.GGUFValueType.FLOAT32,
)
U64 = gguf.GGUFValueType.UINT64
BLOCK = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm")
NAMES = ["token_embd", "output_norm", *(f"blk.{block}.{name}" for block in (0, 1) for name in BLOCK)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("OUTPACE_CACHE", str(place))
    return place


def refused(match: str, tmp_path: Path, **changes: Any) -> None:
    """A file with these changes is refused in one line, and leaves nothing in the cache."""
    file = write_gguf(tmp_path / "tiny.gguf", reference(), **changes)
    with pytest.raises(BadInput, match=match) as caught:
        converted(file, torch.float32)
    assert "\n" not in str(caught.value)
    assert "..." not in str(caught.value)
    left = tmp_path / "cache" / "gguf"
    assert not left.exists() or [path.name for path in left.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor(name: str, tmp_path: Path) -> None:
    theirs = {
        "token_embd": "embed_tokens",
        "output_norm": "model.norm",
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_v": "v_proj",
        "attn_output": "o_proj",
        "ffn_gate": "gate_proj",
        "ffn_up": "up_proj",
        "ffn_down": "down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }[name.rpartition(".")[2]]
    refused(rf"lack .*{theirs}", tmp_path, tensor=lambda one, weight: None if one == f"{name}.weight" else weight)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_shape(name: str, tmp_path: Path) -> None:
    def shorter(one: str, weight: Any) -> Any:
        return weight[: len(weight) - 2] if one == f"{name}.weight" else weight

    refused(r"in shape|cannot convert tensor|of weights", tmp_path, tensor=shorter)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["token_embd", "output_norm", "blk.1.attn_k", "blk.0.ffn_down"])
def test_a_value_that_is_not_finite(name: str, value: float, tmp_path: Path) -> None:
    def endless(one: str, weight: Any) -> Any:
        if one == f"{name}.weight":
            weight = weight.copy()
            weight.flat[3] = value
        return weight

    refused("values that are not finite", tmp_path, tensor=endless)


def test_a_scale_of_blocks_that_is_not_finite(tmp_path: Path) -> None:
    def quantised(out: gguf.GGUFWriter) -> None:
        raw = gguf.quantize(np.ones((64, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
        raw[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
        gguf.GGUFWriter.add_tensor(out, "blk.0.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    changes = {"tensor": lambda one, weight: None if one == "blk.0.ffn_up.weight" else weight, "extra": quantised}
    refused("values that are not finite in .*layers.0.mlp.up_proj", tmp_path, **changes)


@pytest.mark.parametrize(
    ("count", "match"),
    [
        ((1, U32), "count 1 blocks, and it holds tensors of block 1"),
        ((3, U32), "no tensor of block 2"),
        ((0, U32), r"block_count is unusable \(Input should be greater than or equal to 1"),
        ((-2, I32), r"block_count is unusable \(Input should be greater"),
        ((10**12, U64), r"block_count is unusable \(Input should be less"),
        ((2**31 - 1, U32), "no tensor of block 2"),
        (("two", TEXT), r"block_count is unusable \(Input should be a valid integer"),
        ((2.0, F32), r"block_count is unusable \(Input should be a valid integer"),
        (None, "lacks the metadata llama.block_count"),
    ],
)
def test_block_counts(count: Any, match: str, tmp_path: Path) -> None:
    refused(match, tmp_path, keys={"llama.block_count": count})


def test_a_block_in_the_middle_is_missing(tmp_path: Path) -> None:
    refused("no tensor of block 0", tmp_path, tensor=lambda one, weight: None if one.startswith("blk.0.") else weight)


@pytest.mark.parametrize(
    "key", ["context_length", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"]
)
def test_a_missing_key(key: str, tmp_path: Path) -> None:
    refused(rf"lacks the metadata llama\.{key}", tmp_path, keys={f"llama.{key}": None})


@pytest.mark.parametrize("key", ["attention.head_count_kv", "feed_forward_length"])
def test_a_missing_key_that_shapes_tell(key: str, tmp_path: Path) -> None:
    refused("in shape|lacks the metadata|cannot convert tensor", tmp_path, keys={f"llama.{key}": None})


@pytest.mark.parametrize(
    "key", ["llama.vocab_size", "llama.rope.freq_base", "llama.rope.dimension_count", "tokenizer.ggml.eot_token_id"]
)
def test_a_missing_key_with_a_default(key: str, tmp_path: Path) -> None:
    assert converted(write_gguf(tmp_path / "tiny.gguf", reference(), keys={key: None}), torch.float32).is_dir()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.alignment", (0, U32)),
        ("general.alignment", ("32", TEXT)),
        ("general.architecture", (7, U32)),
        ("split.count", ("3", TEXT)),
        ("llama.embedding_length", ("32", TEXT)),
        ("llama.embedding_length", (10**12, U64)),
        ("llama.context_length", (10**12, U64)),
        ("llama.context_length", (0, U32)),
        ("llama.attention.head_count", (4.0, F32)),
        ("llama.attention.head_count", (0, U32)),
        ("llama.attention.layer_norm_rms_epsilon", (float("nan"), F32)),
        ("llama.rope.freq_base", (float("inf"), F32)),
        ("llama.rope.scaling.type", (1, U32)),
        ("llama.rope.scaling.factor", ("4", TEXT)),
        ("tokenizer.ggml.eos_token_id", ("two", TEXT)),
        ("tokenizer.ggml.eos_token_id", (-1, I32)),
        ("tokenizer.chat_template", (1, U32)),
        ("tokenizer.ggml.pre", (1, U32)),
    ],
)
def test_metadata_of_another_type_or_out_of_range(key: str, value: Any, tmp_path: Path) -> None:
    refused(rf"its metadata {key} is unusable \(Input should be", tmp_path, keys={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.vocab_size", 2**31 - 1),
        ("llama.feed_forward_length", 2**31 - 1),
        ("llama.embedding_length", 2**31 - 1),
        ("llama.attention.head_count_kv", 2**31 - 1),
    ],
)
def test_sizes_far_beyond_the_file_are_not_allocated(key: str, value: int, tmp_path: Path) -> None:
    refused(r"described as a model of [\d,]+ weights, and holds|cannot convert", tmp_path, keys={key: (value, U32)})


def test_weights_that_have_no_place(tmp_path: Path) -> None:
    def bias(out: gguf.GGUFWriter) -> None:
        out.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32))

    refused("the converter has a place for", tmp_path, extra=bias)


def test_an_lm_head_of_its_own_and_one_that_is_tied(tmp_path: Path) -> None:
    def head(out: gguf.GGUFWriter) -> None:
        out.add_tensor("output.weight", np.ones((261, 32), np.float32))

    for extra in (None, head):
        assert converted(write_gguf(tmp_path / "tiny.gguf", reference(), extra), torch.float32).is_dir()


@pytest.mark.parametrize("change", [partial(np.delete, obj=0, axis=0), lambda weight: None])
def test_an_lm_head_that_is_not_whole(change: Any, tmp_path: Path) -> None:
    """Without the embedding an LM head is no replacement for it."""

    def head(out: gguf.GGUFWriter) -> None:
        out.add_tensor("output.weight", np.ones((261, 32), np.float32))

    def embedding(one: str, weight: Any) -> Any:
        return change(weight) if one == "token_embd.weight" else weight

    refused("embed_tokens", tmp_path, extra=head, tensor=embedding)
