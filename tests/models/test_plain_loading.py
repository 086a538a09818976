"""Models that are loaded without transformers are those that it would load, to the bit; all else is left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import outpace.loading
from dense_support import LLAMA3, ROTATIONS_BY_KIND, SHAPES, config, model_of
from gguf_support import reference, write_gguf
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.model import Model
from outpace.models.gguf_cache import CACHE_VARIABLE, cache_dir
from outpace.models.gguf_header import read_header
from outpace.models.plain_config import plain_config
from outpace.targets import choice
from outpace.targets.base import Target
from outpace.targets.dense import kernel_build, packing
from outpace.targets.dense.decoder_spec import DecoderSpec, Matrix
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.file_weights import GGUFWeights, spec_of
from outpace.targets.dense.native_model import NativeModel
from outpace.targets.dense.quant_blocks import taken
from outpace.targets.dense.self_check import layer_disagreement
from outpace.targets.dense.transformers_weights import read_decoder_spec
from test_models import tiny_tokenizer

MODELS: dict[str, Callable[[], Any]] = SHAPES | {
    "biases-everywhere": lambda: config(attention_bias=True, mlp_bias=True),
    "biases-of-qwen3": lambda: config("Qwen3", attention_bias=True),
    "biases-of-gemma": lambda: config("Gemma2", attention_bias=True, final_logit_softcapping=2.0),
    "window-in-some-layers": lambda: config(
        "Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "window-of-phi": lambda: config("Phi3", sliding_window=7),
    "two-scaled-rotations": lambda: config("Gemma3Text", sliding_window=5, rope_parameters=ROTATIONS_BY_KIND),
    "llama3": lambda: config(rope_parameters=LLAMA3),
    "linear": lambda: config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "short-context": lambda: config(max_position_embeddings=40),
}  # fmt: skip
LEFT: dict[str, Callable[[], Any]] = {
    "yarn": lambda: config(
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        }
    ),
    "part-of-each-head": lambda: config("Phi3", hidden_size=64, partial_rotary_factor=0.5),
    "relu": lambda: config(hidden_act="relu"),
    "another-architecture": lambda: config("Olmo"),
}  # fmt: skip
EQUAL = ("architecture", "parameters", "dtype", "target", "note", "device", "layers", "vocabulary", "context_length")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kernel_build.library()
    place = tmp_path / "cache"
    place.mkdir()
    (place / "native").symlink_to(cache_dir() / "native")  # kernels are not compiled again
    monkeypatch.setenv(CACHE_VARIABLE, str(place))
    return place


def folder_of(what: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    what.eos_token_id = 1
    what.vocab_size = 288
    model_of(what).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def plain(name: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Model:
    """Loaded with the way through transformers closed."""
    with monkeypatch.context() as without:
        without.setattr(outpace.loading, "_through_transformers", None)
        return outpace.loading.load(name, device="cpu", **options)


def through_transformers(name: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Model:
    with monkeypatch.context() as without:
        without.setattr(outpace.loading, "_plain", lambda *_: None)
        return outpace.loading.load(name, device="cpu", **options)


def logits(target: Target) -> torch.Tensor:
    tokens = [(1 + 7919 * step) % target.vocab_size for step in range(30)]
    sequence = target.sequence(tokens[:20])
    target.prefill([sequence])
    return target.score([(sequence, TokenTree.chain(tokens[20:]))])[0].logits


def assert_same_model(one: Model, other: Model) -> None:
    assert {key: one.info[key] for key in EQUAL} == {key: other.info[key] for key in EQUAL}
    assert one.eos_ids == other.eos_ids
    assert one.target.context_note == other.target.context_note
    assert torch.equal(logits(one.target), logits(other.target))
    text = "a b</s> Bc é"
    assert one.tokenizer.encode(text) == other.tokenizer.encode(text)


def assert_same_spec(one: DecoderSpec, other: DecoderSpec) -> None:
    assert len(one.layers) == len(other.layers)
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        for name in ("query", "key", "value", "out", "gate", "up", "down"):
            assert_same_matrix(getattr(ours, name), getattr(theirs, name))
        assert ours.norms.keys() == theirs.norms.keys()
        assert all(torch.equal(ours.norms[name].weight, norm.weight) for name, norm in theirs.norms.items())
        assert (ours.window, ours.rotation) == (theirs.window, theirs.rotation)
    assert_same_matrix(one.embedding, other.embedding)
    assert (one.lm_head is None) == (other.lm_head is None)
    if one.lm_head is not None and other.lm_head is not None:
        assert_same_matrix(one.lm_head, other.lm_head)
    assert one.final_norm is not None and other.final_norm is not None
    assert torch.equal(one.final_norm.weight, other.final_norm.weight)
    where = torch.arange(5000)
    for turn, expected in zip(one.rotations, other.rotations, strict=True):
        assert all(map(torch.equal, turn(where), expected(where)))
    rest = (
        *("hidden", "heads", "kv_heads", "head_size", "intermediate", "vocabulary", "activation", "epsilon"),
        *("attention_scale", "context_length", "softcap", "final_softcap", "embedding_scale", "dtype", "device"),
    )
    assert {name: getattr(one, name) for name in rest} == {name: getattr(other, name) for name in rest}


def assert_same_matrix(one: Matrix, other: Matrix) -> None:
    assert torch.equal(one.weight, other.weight) and one.name == other.name
    assert (one.bias is None) == (other.bias is None)
    assert one.bias is None or (other.bias is not None and torch.equal(one.bias, other.bias))


@pytest.mark.parametrize("name", MODELS)
def test_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(MODELS[name](), tmp_path / "tiny")
    for dtype in ("float32", "bfloat16", "int8", "auto"):
        ours = plain(folder, monkeypatch, dtype=dtype)
        theirs = through_transformers(folder, monkeypatch, dtype=dtype)
        assert_same_model(ours, theirs)
        found, expected = ours.target.decoder_spec(), theirs.target.decoder_spec()
        assert found is not None and expected is not None
        assert_same_spec(found, expected)


@pytest.mark.parametrize("name", LEFT)
def test_a_folder_that_is_left_to_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(LEFT[name](), tmp_path / "tiny")
    with pytest.raises(TypeError, match="NoneType"):
        plain(folder, monkeypatch, dtype="float32")
    model = outpace.loading.load(folder, dtype="float32", device="cpu")
    assert logits(model.target).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_stored_in_another_precision(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(config("Qwen3"), tmp_path / "tiny", dtype)
    for wanted in ("float32", "bfloat16", "int8"):
        options = {"dtype": wanted}
        assert_same_model(plain(folder, monkeypatch, **options), through_transformers(folder, monkeypatch, **options))
    assert (plain(folder, monkeypatch, dtype="auto").info["dtype"] if dtype == torch.bfloat16 else "bfloat16") == (
        "bfloat16"
    )


def test_weights_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(config(tie_word_embeddings=False), tmp_path / "tiny")
    whole = plain(folder, monkeypatch, dtype="float32")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{len(name) % 2}.safetensors" for name in weights}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file, {"format": "pt"})
    save_file({"model.norm.weight": torch.zeros(3)}, folder / "another.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_same_model(plain(folder, monkeypatch, dtype="float32"), whole)
    index.write_text(json.dumps({"weight_map": places | {"lm_head.weight": "nowhere.safetensors"}}))
    with pytest.raises(BadInput):
        outpace.loading.load(folder, dtype="float32", device="cpu")


_OLDER: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "num_key_value_heads": None, "rope_theta": 5e5, "torch_dtype": "bfloat16",
        "rope_scaling": {**{key: value for key, value in LLAMA3.items() if key != "rope_theta"}, "type": "llama3"},
    },
    "qwen2": {
        "model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1000000, "max_window_layers": 2,
        "use_sliding_window": False, "sliding_window": 32768, "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral", "num_key_value_heads": 2, "head_dim": None, "rope_theta": 1e4,
        "sliding_window": 4096, "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "sliding_window": 512, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma2": {
        "model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 224,
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e4, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
_SIZES = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 288,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("kind", _OLDER)
def test_a_configuration_as_older_versions_write_it(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(_SIZES | _OLDER[kind]))
    ours, theirs = plain_config(_SIZES | _OLDER[kind]), AutoConfig.from_pretrained(tmp_path)
    for name, value in vars(ours).items():
        if name not in ("rope_parameters", "hidden_act", "head_dim"):
            assert value == getattr(theirs, name, value), name
    ours.rms_norm_eps = theirs.rms_norm_eps
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    assert ours.head_dim == model.model.layers[0].self_attn.head_dim
    tables = [ours.rope_parameters, theirs.rope_parameters]
    for one in tables:
        for table in (one, *(part for part in one.values() if isinstance(part, dict))):
            table.pop("type", None)
    assert tables[0] == tables[1]


# --- GGUF files


def in_blocks(name: str) -> str:
    """As Q4_K_M files and their like mix them; a type that the kernels do not take is among them."""
    if "norm" in name or name.endswith(".bias"):
        return "F32"
    kinds = {"attn_v": "Q5_0", "ffn_down": "Q8_0", "token_embd": "Q8_0", "attn_output": "F16", "ffn_up": "Q5_1"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_0")


def model_for_gguf(family: str, **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 261, "head_dim": 16}
    return model_of(config(family, **sizes | changes))


def sliding(out: gguf.GGUFWriter) -> None:
    out.add_key_length(16)
    out.add_sliding_window(512)


GGUF: dict[str, tuple[Callable[[], Any], Any]] = {
    "llama": (lambda: model_for_gguf("Llama"), None),
    "llama, a head of its own": (lambda: model_for_gguf("Llama", tie_word_embeddings=False), None),
    "qwen2": (lambda: model_for_gguf("Qwen2"), None),
    "qwen3": (lambda: model_for_gguf("Qwen3", num_attention_heads=2, num_key_value_heads=1, head_dim=128), None),
    "gemma2": (lambda: model_for_gguf("Gemma2"), sliding),
    "gemma3": (lambda: model_for_gguf("Gemma3Text"), sliding),
}


@pytest.mark.parametrize("name", GGUF)
def test_blocks_of_a_gguf_file_in_place(name: str, tmp_path: Path) -> None:
    make, extra = GGUF[name]
    model = make()
    file = write_gguf(tmp_path / "tiny.gguf", model, extra, kinds=in_blocks)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=_dequantised()
    ).eval()
    found = plain_config(theirs.config.to_dict())
    weights = GGUFWeights(found, read_header(file), torch.bfloat16)
    ours = spec_of(found, weights)
    expected = read_decoder_spec(theirs)
    targets = DenseTarget(ours, "int4"), DenseTarget(expected, "int4", gguf=file)
    assert targets[0].formats == targets[1].formats and set(targets[0].formats) == {"Q4", "Q5", "Q8", "BF16"}
    assert torch.equal(*map(logits, targets))
    weights.check_all_read()
    assert weights.parameters == theirs.num_parameters()
    dense = ours.dense()
    for one, other in zip(dense.layers, expected.layers, strict=True):
        assert_same_matrix(one.query, other.query)
        assert_same_matrix(one.key, other.key)
        assert_same_matrix(one.up, other.up)
    some = torch.tensor([3, 0, 7])
    assert torch.equal(ours.layers[1].query.rows(some), ours.layers[1].query.rows()[some])


def _dequantised() -> Any:
    from outpace.models.gguf_convert import _dense

    return _dense()["quantization_config"]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_gguf_file(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", GGUF[name][0](), kinds=in_blocks)
    ours = plain(file, monkeypatch)
    assert ours.info["dtype"] == "int4" and "config" in only(cache / "gguf").name
    theirs = through_transformers(file, monkeypatch, dtype="int4")
    assert_same_model(ours, theirs)
    assert_same_model(plain(file, monkeypatch), ours)  # from the cache
    found, expected = ours.target.decoder_spec(), theirs.target.decoder_spec()
    assert found is not None and expected is not None
    assert_same_matrix(found.layers[1].query, expected.layers[1].query)
    for dtype in ("bfloat16", "int8"):
        assert_same_model(plain(file, monkeypatch, dtype=dtype), through_transformers(file, monkeypatch, dtype=dtype))


def only(folder: Path) -> Path:
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


def another_bias(out: gguf.GGUFWriter) -> None:
    out.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32))


def endless_block(out: gguf.GGUFWriter) -> None:
    raw = gguf.quantize(np.ones((64, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    raw[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    out.add_tensor("blk.1.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)


def broken(kind: str, tmp_path: Path) -> Path:
    """A file of blocks with one thing wrong."""

    def changed(name: str, weight: Any) -> Any:
        if kind in ("missing", "block") and name == "blk.1.ffn_up.weight":
            return weight if weight.dtype == np.uint8 else None
        if kind == "shape" and name == "blk.1.attn_v.weight":
            return weight[:-2]
        if kind == "norm" and name == "output_norm.weight":
            return np.where(np.arange(len(weight)) == 3, np.inf, weight).astype(np.float32)
        return weight

    def kinds(name: str) -> str:
        return "F32" if "norm" in name or name.endswith("bias") else "Q8_0"

    extra = {"unread": another_bias, "block": endless_block}.get(kind)
    return write_gguf(tmp_path / "tiny.gguf", reference(), extra, tensor=changed, kinds=kinds)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("missing", "lack model.layers.1.mlp.up_proj"),
        ("shape", "in shape"),
        ("norm", "values that are not finite"),
        ("block", "values that are not finite"),
        ("unread", "the converter has a place for"),
    ],
)
def test_a_broken_gguf_file_is_refused_and_leaves_nothing(kind: str, why: str, tmp_path: Path, cache: Path) -> None:
    file = broken(kind, tmp_path)
    with pytest.raises(BadInput, match=why) as caught:
        outpace.loading.load(file, device="cpu")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (cache / "gguf").iterdir()] == [".lock"]
    assert not (cache / "checks").exists()


def test_a_damaged_description_is_made_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", reference(), kinds=in_blocks)
    whole = plain(file, monkeypatch)
    entry = only(cache / "gguf")
    for name in ("config.json", "tokenizer.json", "manifest.json"):
        data = bytearray((entry / name).read_bytes())
        data[len(data) // 2] ^= 1
        (entry / name).write_bytes(data)
        assert_same_model(plain(file, monkeypatch), whole)
        assert only(cache / "gguf") == entry


def test_a_gguf_file_that_is_not_read_in_place_is_not_described_for_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(out: gguf.GGUFWriter) -> None:
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        out.add_rope_scaling_factor(4.0)
        out.add_rope_scaling_orig_ctx_len(4096)

    file = write_gguf(tmp_path / "tiny.gguf", reference(), scaled, kinds=in_blocks)
    asked: list[Path] = []
    monkeypatch.setattr("outpace.plain_loading.described", asked.append)
    model = outpace.loading.load(file, device="cpu")
    assert model.info["dtype"] == "int4" and model.info["target"] == "DenseTarget"
    assert not asked


@pytest.mark.slow
def test_processes_that_load_a_new_file_at_once(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", reference(), kinds=in_blocks)
    command = [sys.executable, "-c", _LOADS, str(file)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all(one.wait(300) == 0 for one in both)
    assert "config" in only(cache / "gguf").name


# --- the comparison with plain PyTorch


class Counted:
    """Counts comparisons."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._check = 0, layer_disagreement
        monkeypatch.setattr(choice, "layer_disagreement", self)

    def __call__(self, *what: Any) -> float:
        self.count += 1
        return self._check(*what)


def test_a_target_is_compared_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Counted(monkeypatch)
    folder = folder_of(config(), tmp_path / "tiny")
    for precision, count in (("float32", 1), ("float32", 1), ("int8", 2), ("int8", 2), ("float32", 2)):
        plain(folder, monkeypatch, dtype=precision)
        assert checks.count == count
    (one, _) = sorted((cache / "checks").iterdir())
    one.write_text("{")
    plain(folder, monkeypatch, dtype="float32")
    plain(folder, monkeypatch, dtype="int8")
    assert checks.count == 3
    monkeypatch.setattr("outpace.targets.check_notes.kernels", lambda: "another build")
    plain(folder, monkeypatch, dtype="int8")
    assert checks.count == 4
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    plain(folder, monkeypatch, dtype="int8")
    assert checks.count == 5


def test_without_a_cache_every_load_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Counted(monkeypatch)
    folder = folder_of(config(), tmp_path / "tiny")
    (tmp_path / "file").touch()
    monkeypatch.setattr("outpace.targets.check_notes.cache_dir", lambda: tmp_path / "file")
    for count in (1, 2):
        plain(folder, monkeypatch, dtype="float32")
        assert checks.count == count


def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = packing._alternating
    monkeypatch.setattr(packing, "_alternating", lambda gate, up: honest(up, gate))


def _without_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing._Source, "norm", lambda _, norm: np.ones(norm.weight.shape, np.float32))


def _turned_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NativeModel.set_rotation
    monkeypatch.setattr(NativeModel, "set_rotation", lambda self, index, cos, sin: honest(self, index, cos, -sin))


def _another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, spec: DecoderSpec, source: Any) -> None:
        embedding = source(spec.embedding)
        model.set_matrix(-1, 0, embedding)
        model.set_matrix(-1, 1, taken(embedding, np.arange(len(spec.embedding.weight))[::-1]))

    monkeypatch.setattr(packing, "_pack_ends", wrong)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("plant", [_swapped, _without_norms, _turned_wrongly, _another_head])
def test_a_wrong_part_is_refused(
    plant: Callable[[pytest.MonkeyPatch], None],
    precision: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of(config(), tmp_path / "tiny")
    plant(monkeypatch)
    with pytest.raises(TypeError, match="NoneType"):
        plain(folder, monkeypatch, dtype=precision)
    assert not (cache / "checks").exists()
    model = outpace.loading.load(folder, dtype=precision, device="cpu")
    assert model.info["target"] == "HFTarget" and "differ" in model.info["note"]


# --- what is imported

_LOADS = "import sys, outpace; outpace.load(sys.argv[1], device='cpu'); print('transformers' in sys.modules)"


def imports_transformers(name: str) -> bool:
    done = subprocess.run([sys.executable, "-c", _LOADS, name], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_a_folder_is_loaded_without_importing_transformers(tmp_path: Path) -> None:
    assert not imports_transformers(str(folder_of(config(), tmp_path / "tiny")))


def test_a_gguf_file_is_loaded_again_without_importing_transformers(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", reference(), kinds=in_blocks)
    assert imports_transformers(str(file)), "the tokenizer is converted by it"
    assert not imports_transformers(str(file))


@pytest.mark.model
def test_the_embedded_model_is_loaded_again_without_importing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    imports_transformers("smollm2")
    assert not imports_transformers("smollm2")
