"""bench-peers and the GGUF formats that llama.cpp is measured in: which, made once, and what a row says of them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gguf_support import reference, write_gguf
from outpace.bench.peers import gguf_formats, launcher
from outpace.bench.peers.gguf_formats import chosen, kinds, requantized
from outpace.bench.peers.processes import WORKERS, Job, make_plan
from outpace.bench.peers.weights import Weights
from outpace.core.errors import BadInput
from peers_support import fake, plan_of, run_of

COPY = """
import shutil
from types import SimpleNamespace

def load(settings):
    with open({log!r}, "a") as log:
        print(settings["format"], file=log)
    if {broken!r}:
        raise RuntimeError("llama.cpp cannot write it")
    shutil.copy({made!r}, settings["target"])
    return SimpleNamespace(version="1", precision="", failed={{}})
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf-formats"


def small(path: Path, kind: str) -> Path:
    """Rows of 32 weights: no whole blocks of 256."""
    return write_gguf(path, reference(), kinds=lambda name: "F32" if "norm" in name else kind)


def wide(path: Path, kind: str) -> Path:
    """Rows of 256 weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=261, num_key_value_heads=4, tie_word_embeddings=True))
    return write_gguf(path, model.eval(), kinds=lambda name: "F32" if "norm" in name else kind)


def test_the_file_s_own_format_and_those_that_are_faster(tmp_path: Path) -> None:
    assert chosen(None, small(tmp_path / "a.gguf", "Q4_1")) == ["own", "Q4_0"], "no rows for Q4_K's blocks"
    assert chosen(None, small(tmp_path / "b.gguf", "Q4_0")) == ["own"]
    assert chosen(None, wide(tmp_path / "c.gguf", "Q4_1")) == ["own", "Q4_0", "Q4_K_M"]
    assert chosen(None, wide(tmp_path / "d.gguf", "Q4_0")) == ["own", "Q4_K_M"]
    assert chosen(None, None) == ["own"]


def test_a_file_in_q4_k_is_measured_in_q4_0_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "a": SimpleNamespace(kind_name="Q4_K", shape=(8, 256)),
        "b": SimpleNamespace(kind_name="F32", shape=(8,)),
    }
    monkeypatch.setattr(gguf_formats, "read_header", lambda _: SimpleNamespace(tensors=tensors))
    assert chosen(None, Path("any.gguf")) == ["own", "Q4_0"]


def test_formats_that_are_named_are_taken(tmp_path: Path) -> None:
    path = small(tmp_path / "a.gguf", "Q4_1")
    assert chosen(["q4_k_m", "Own", "own"], path) == ["Q4_K_M", "own"]
    assert chosen([], path) == ["own"]
    with pytest.raises(BadInput, match="did you mean 'Q4_0'"):
        chosen(["Q40"], path)


def test_every_format_has_a_row_of_plain_decoding(tmp_path: Path) -> None:
    weights = Weights("m", "/m", "/m.gguf", "Q4_1", True)
    job = Job(weights, None, "float32", 1, 256, gguf_formats=("own", "Q4_0"))
    plan = make_plan(
        job, ["float32"], ["none"], dict.fromkeys(["llama-cpp-python", "openvino-genai"], sys.executable), []
    )
    assert [(one.label, one.config, one.weights) for one in plan.entries if not one.ours] == [
        ("llama-cpp-python plain", "plain", None),
        ("llama-cpp-python plain Q4_0", "plain", "Q4_0"),
        ("llama-cpp-python prompt-lookup", "prompt-lookup", None),
        ("openvino-genai plain", "plain", None),
        ("openvino-genai prompt-lookup", "prompt-lookup", None),
    ]
    assert [process.requantize for process in plan.processes] == [None, None, "Q4_0", None, None, None]


def quantizer(monkeypatch: pytest.MonkeyPatch, place: Path, *, broken: bool = False) -> Path:
    """A worker in place of llama.cpp's; returns its log."""
    path, log = place / "quantizer.py", place / "quantizer.log"
    made = small(place / "made.gguf", "Q4_0")
    path.write_text(COPY.format(log=str(log), made=str(made), broken=broken))
    monkeypatch.setattr(launcher, "worker_command", lambda python, _: [python, str(WORKERS / "serve.py"), str(path)])
    return log


def test_a_row_gets_the_file_in_its_format_and_says_what_is_in_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = quantizer(monkeypatch, tmp_path)
    source = small(tmp_path / "tiny.gguf", "Q4_1")

    def run() -> Path:
        process = fake(tmp_path, "a")
        process.settings |= {"gguf": str(source), "gguf_kind": "Q4_1"}
        process.requantize = "Q4_0"
        assert run_of(plan_of(process)).go() is True
        assert process.entries[0].error is None
        assert process.settings["gguf_kind"] == "Q4_0"
        return Path(process.settings["gguf"])

    made = run()
    assert made.read_bytes() == (tmp_path / "made.gguf").read_bytes()
    assert made.is_relative_to(cache)
    assert run() == made
    assert log.read_text().splitlines() == ["Q4_0"], "made once"
    made.write_bytes(made.read_bytes()[:-8] + b"damaged!")
    assert run() == made
    assert made.read_bytes() == (tmp_path / "made.gguf").read_bytes()
    assert log.read_text().splitlines() == ["Q4_0"] * 2, "what is damaged is made again"


def test_a_format_that_cannot_be_made_is_an_error_of_its_row(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quantizer(monkeypatch, tmp_path, broken=True)
    process = fake(tmp_path, "a")
    process.settings["gguf"] = str(small(tmp_path / "tiny.gguf", "Q4_1"))
    process.requantize = "Q4_0"
    plan = plan_of(process, fake(tmp_path, "good"))
    assert run_of(plan).go() is True
    assert [entry.error for entry in plan.entries] == ["RuntimeError: llama.cpp cannot write it", None]
    assert [one.name for one in cache.iterdir()] == [".lock"], "nothing half-made remains"


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize(("name", "inside"), [("Q4_0", "Q4_0"), ("Q4_K_M", "Q4_K")])
def test_llama_cpp_writes_the_format(tmp_path: Path, name: str, inside: str) -> None:
    process = fake(tmp_path, "a")
    process.settings["gguf"] = str(wide(tmp_path / "wide.gguf", "Q8_0"))
    process.requantize = name
    assert run_of(plan_of(process)).go() is True
    assert process.entries[0].error is None
    assert inside in process.settings["gguf_kind"]
    assert kinds(Path(process.settings["gguf"])) == process.settings["gguf_kind"]


def test_an_interrupted_quantization_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    def quantize(target: Path) -> None:
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        requantized(small(tmp_path / "tiny.gguf", "Q4_1"), "Q4_0", quantize)
    assert [one.name for one in cache.iterdir()] == [".lock"]
