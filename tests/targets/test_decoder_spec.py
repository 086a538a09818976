"""What the fast target reads from a model, every quirk against transformers' own forward; and what it leaves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from dense_support import LLAMA3, ROTATIONS_BY_KIND, config, in_blocks, model_of
from gguf_support import reference as gguf_reference, write_gguf
from outpace.core.errors import BadInput
from outpace.targets.choice import choose_target
from outpace.targets.dense.architectures import UnsupportedArchitecture
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from target_suite import near, opened, random_tokens, random_tree, reference, tiny_model
from test_models import tiny_model as loadable_model, tiny_tokenizer

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 128,
}
_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
QUIRKS: dict[str, Callable[[], Any]] = {
    "biases of Qwen2": lambda: config("Qwen2"),
    "attention biases": lambda: config(attention_bias=True),
    "biases everywhere": lambda: config(attention_bias=True, mlp_bias=True),
    "a head of its own": lambda: config(tie_word_embeddings=False),
    "odd sizes": lambda: config(hidden_size=44, intermediate_size=50, vocab_size=131, head_dim=10),
    "odd sizes that divide nothing": lambda: config("Qwen3", hidden_size=37, intermediate_size=41, vocab_size=101),
    "one head": lambda: config(num_attention_heads=1, num_key_value_heads=1),
    "fused projections": lambda: config("Phi3"),
    "a part of each head turns": lambda: config("Phi3", hidden_size=64, partial_rotary_factor=0.5),
    "a fused window": lambda: config("Phi3", sliding_window=7),
    "both softcaps": lambda: config(
        "Gemma2",
        sliding_window=5,
        layer_types=_LOCAL,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=7,
    ),
    "two rotary tables": lambda: config(
        "Gemma3Text",
        sliding_window=5,
        layer_types=_LOCAL,
        rope_parameters=ROTATIONS_BY_KIND,
        query_pre_attn_scalar=9,
    ),
    "all layers of one kind": lambda: config("Gemma3Text", layer_types=["full_attention"] * 3),
    "norms of queries and keys": lambda: config("Qwen3", attention_bias=True),
    "a window": lambda: config("Mistral", sliding_window=7),
    "a window in some layers": lambda: config(
        "Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "a window that is not used": lambda: config("Qwen2", use_sliding_window=False, sliding_window=6),
    "rotary scaling: llama3": lambda: config(rope_parameters=LLAMA3),
    "rotary scaling: yarn": lambda: config(rope_parameters=_YARN),
    "rotary scaling: linear": lambda: config(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "rotary scaling: dynamic": lambda: config(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
    "rotary scaling: longrope": lambda: config(
        "Phi3", hidden_size=64, head_dim=8, num_attention_heads=8, original_max_position_embeddings=128,
        rope_parameters=_LONG,
    ),
    "gelu": lambda: config(hidden_act="gelu_pytorch_tanh"),
}  # fmt: skip


@pytest.mark.parametrize("quirk", QUIRKS)
def test_scores_are_those_of_transformers(quirk: str) -> None:
    model = model_of(QUIRKS[quirk]())
    target = DenseTarget(read_decoder_spec(copy.deepcopy(model)), prefill_chunk=16)
    rng = random.Random(5)
    sequences = [opened(target, random_tokens(count, rng)) for count in (45, 1)]
    for _ in range(2):  # the second time on K/V that was committed from a tree
        trees = [random_tree(14, rng) for _ in sequences]
        scores = target.score(list(zip(sequences, trees, strict=True)))
        for part in scores.parts:
            for node in (-1, *range(len(part.tree))):
                near(part.logits[node + 1], reference(model, part.sequence.tokens + part.tree.path_tokens(node)))
        deepest = [tree.depths.index(max(tree.depths)) for tree in trees]
        target.commit(scores, [tree.path(node) for tree, node in zip(trees, deepest, strict=True)])
        for sequence, tree, node in zip(sequences, trees, deepest, strict=True):
            sequence.tokens += [*tree.path_tokens(node), 3]


def test_past_the_first_rotary_tables() -> None:
    model = model_of(config(max_position_embeddings=5000, num_hidden_layers=1))
    target = DenseTarget(read_decoder_spec(copy.deepcopy(model)))
    tokens = random_tokens(2100, random.Random(1))
    near(
        target.score([(opened(target, tokens), random_tree(0, random.Random(0)))])[0].logits[0],
        reference(model, tokens),
    )


# --- what has no blueprint


class Halved(torch.nn.Linear):
    """A linear layer that computes something else than its weights say."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


def _quantised(model: Any) -> None:
    whole = torch.nn.Parameter(torch.ones(48, 56, dtype=torch.int8), requires_grad=False)
    model.model.layers[1].mlp.down_proj.weight = whole


def _wrapped(model: Any) -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * 1.1  # type: ignore[no-any-return]

    model.model.layers[0].self_attn.q_proj = Adapter(model.model.layers[0].self_attn.q_proj)


def _subclassed(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = Halved(48, 56, bias=False)


def _hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out * 2)


def _biased_head(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.randn(97) * 3)


@pytest.mark.parametrize("change", [_wrapped, _subclassed, _hooked, _biased_head])
def test_a_changed_model_is_left_to_the_generic_target(change: Callable[[Any], None]) -> None:
    model = model_of(config())
    change(model)
    expected = reference(copy.deepcopy(model), [4, 5, 6])
    target, note = choose_target(model)
    assert isinstance(target, HFTarget) and note.startswith("on the generic target: ") and "\n" not in note
    near(target.score([(opened(target, [4, 5, 6]), random_tree(0, random.Random(0)))])[0].logits[0], expected)


def test_modules_that_hold_no_floating_point_weights_have_no_blueprint() -> None:
    model = model_of(config())
    _quantised(model)
    with pytest.raises(UnsupportedArchitecture, match="not a plain Linear"):
        read_decoder_spec(model)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: tiny_model("gpt2"), "architecture gpt2"),
        (lambda: tiny_model("gpt_neox"), "architecture gpt_neox"),
        (lambda: model_of(config(hidden_act="relu")), "activation is relu"),
        (lambda: model_of(config("Gemma2", hidden_activation="gelu")), "activation is gelu"),
        (lambda: model_of(config()).to(torch.float16), "float16"),
        (lambda: model_of(config()).to(torch.float64), "float64"),
    ],
    ids=["gpt2", "gpt_neox", "relu", "gelu", "float16", "float64"],
)
def test_the_note_says_why_the_generic_target_runs(make: Callable[[], Any], why: str) -> None:
    target, note = choose_target(make())
    assert isinstance(target, HFTarget)
    assert note.startswith("on the generic target: ") and why in note and "\n" not in note


def test_kinds_of_layers_that_are_not_known() -> None:
    model = model_of(config())
    model.config.layer_types = ["chunked_attention"] * 3
    with pytest.raises(UnsupportedArchitecture, match="another kind"):
        read_decoder_spec(model)


def test_a_precision_that_cannot_be_had_falls_back_to_the_models_own() -> None:
    model = model_of(config())
    target, note = choose_target(model, precision="int4")
    assert target.dtype == "float32"
    assert (
        note == "int4 falls back to float32: int4 keeps the blocks of a GGUF file, and this model is not one; use int8"
    )
    target, note = choose_target(model, precision="int8", kind="generic")
    assert isinstance(target, HFTarget) and note == "int8 falls back to float32: the generic target was asked for"
    assert choose_target(model, kind="generic")[1] == ""
    target, note = choose_target(model, precision="int8")
    assert isinstance(target, DenseTarget) and target.dtype == "int8" and note == ""


def test_a_model_of_float16_can_be_packed_in_int8() -> None:
    target, note = choose_target(model_of(config()).to(torch.float16), precision="int8")
    assert isinstance(target, DenseTarget) and note == ""


# --- through outpace.load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    loadable_model(tie_word_embeddings=True).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = outpace.targets.dense.kernel_build
    build.library()  # before the cache moves
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))


def test_load_in_every_precision(folder: Path) -> None:
    for dtype in ("float32", "bfloat16", "int8"):
        model = outpace.load(folder, dtype=dtype, device="cpu")
        assert model.info["target"] == "DenseTarget" and model.info["dtype"] == dtype and model.info["note"] == ""
    model = outpace.load(folder, dtype="int4", device="cpu")
    note = model.info["note"]
    assert model.info["target"] == "HFTarget" and note.startswith("int4 falls back to bfloat16: ") and "\n" not in note
    model = outpace.load(folder, dtype="float16", device="cpu")
    assert model.info["target"] == "HFTarget" and "float16" in model.info["note"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_precisions_are_of_the_cpu_alone(precision: str) -> None:
    from outpace.models.placement import choose_dtype

    with pytest.raises(BadInput, match=f"{precision} is computed on CPUs only") as caught:
        choose_dtype(precision, torch.device("cuda"))
    assert "\n" not in str(caught.value)


def quantising(kinds: Callable[[str], str]) -> Callable[[Any], None]:
    """What write_gguf does to its writer so that matrices are written in blocks."""

    def prepare(out: Any) -> None:
        plain = out.add_tensor

        def add(name: str, weight: Any) -> None:
            raw, kind = in_blocks(weight, kinds(name) if weight.ndim == 2 else "F32")
            plain(name, raw, raw_dtype=kind)

        out.add_tensor = add

    return prepare


@pytest.mark.parametrize(
    ("kind", "formats"), [("Q4_0", {"Q4"}), ("Q8_0", {"Q8"}), ("Q5_1", {"Q5M"}), ("F16", {"BF16"}), ("F32", {"BF16"})]
)
def test_a_gguf_file_is_kept_as_it_is(cache: None, tmp_path: Path, kind: str, formats: set[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", gguf_reference(), quantising(lambda _: kind))
    model = outpace.load(file, dtype="int4", device="cpu")
    target: Any = model.target
    assert model.info["dtype"] == "int4" and model.info["note"] == ""
    assert set(target.formats) == formats
    exact = outpace.load(file, dtype="float32", device="cpu").target
    rows = torch.arange(200)
    torch.testing.assert_close(target.embed(rows), exact.embed(rows), rtol=2**-8, atol=0)
