"""benchmarks/gpu.py: its stages run on the CPU, on tiny models, with stand-ins for the capture on CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gpu
from gpu_stages import bits as bits_stage, captures as captures_stage, decoding as decoding_stage, rival as rival_stage
from gpu_stages.bits import bits, same_bits
from gpu_stages.captures import captures
from gpu_stages.forwards import forwards
from gpu_stages.requirements import missing
from gpu_stages.rival import advise, rival
from gpu_stages.subject import RANDOM, Subject, load, memory, random_folder
from outpace.bench.peers.entries import Answer, Question
from outpace.bench.peers.processes import Job
from outpace.bench.peers.round_robin import RoundRobin
from outpace.bench.peers.weights import Weights
from outpace.bench.peers.workers.vllm import VLLM
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.graphs import Capture, Work
from outpace.targets.dense.torch_kv import KEPT
from outpace.targets.dense.transformers_weights import read_decoder_spec
from recorder import Again, Recording, record
from target_suite import tiny_model

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 300,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}


def subject_of(capture: Capture = record, **options: Any) -> Subject:
    target = GraphTarget(read_decoder_spec(tiny_model("llama")), capture=capture, **options)
    nothing: Any = None
    return Subject(Model("tiny", target, nothing, frozenset()), target, repeat=2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few shapes and cases."""
    monkeypatch.setattr(captures_stage, "BATCHES", (1, 2))
    monkeypatch.setattr(captures_stage, "ROWS", (1, 4))
    monkeypatch.setattr(bits_stage, "CASES", ((1, 20), (2, 250)))
    monkeypatch.setattr("gpu_stages.forwards.BATCHES", (1, 2))
    monkeypatch.setattr("gpu_stages.forwards.ROWS", (1, 4))


# Bit patterns


def test_replays_compute_the_bits_of_the_eager_forward() -> None:
    subject = subject_of()
    found = bits(subject, seeds=1)
    assert found["passed"] is True
    assert found["differences"] == []
    assert found["compared"] == 4 * len(bits_stage.CASES) + 2 * (KEPT + 2)
    assert subject.target.counts.refused == 0


class Wrong(Recording):
    """A recording with a fault in what it leaves behind."""

    harm: Callable[[Recording], None]

    def replay(self) -> None:
        super().replay()
        type(self).harm(self)


def flip_a_bit(logits: Tensor) -> None:
    logits.view(torch.int32)[0, 3] ^= 1


def test_a_replay_with_one_wrong_bit_of_a_logit_is_found(small: None) -> None:
    def capture(work: Work) -> Recording:
        found = record(work)
        wrong = type("WrongLogit", (Wrong,), {"harm": staticmethod(lambda self: flip_a_bit(self.output[0]))})
        return wrong(found.output, found.calls)  # type: ignore[no-any-return]

    found = bits(subject_of(capture), seeds=1)
    assert found["passed"] is False
    assert "logits: 1 of" in found["differences"][0]


def test_a_replay_that_leaves_out_an_operation_is_found(small: None) -> None:
    """The last write of K/V: the logits of this forward hardly show it, where the padding attends to nothing else."""

    def capture(work: Work) -> Recording:
        found = record(work)
        writes = [index for index, (func, *_) in enumerate(found.calls) if "index_copy_" in str(func)]
        del found.calls[writes[-1]]
        return found

    found = bits(subject_of(capture), seeds=1)
    assert found["passed"] is False
    assert any("K/V" in line for line in found["differences"])


def test_a_replay_that_does_nothing_is_found(small: None) -> None:
    class Idle(Recording):
        def replay(self) -> None:
            pass

    found = bits(subject_of(lambda work: Idle(record(work).output, [])), seeds=1)
    assert found["passed"] is False


def test_what_is_not_replayed_is_not_called_identical(small: None) -> None:
    def refuse(work: Work) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")

    for capture in (refuse, None):
        target = GraphTarget(read_decoder_spec(tiny_model("llama")), capture=capture)
        subject = replace(subject_of(), target=target)
        found = bits(subject, seeds=1)
        assert found["passed"] is False
        assert all("not replayed" in line for line in found["differences"])
        assert ("not permitted" in found["differences"][0]) is (capture is refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_compared_not_values(dtype: torch.dtype) -> None:
    one = torch.tensor([0.0, 1.0, float("nan")], dtype=dtype)
    assert same_bits(one, one.clone())
    assert not same_bits(one, -one)
    assert not same_bits(one, one[:2])
    assert not same_bits(one.float(), one.double())


# The other stages


def test_shapes_that_are_not_captured_fail_the_stage(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = captures(subject_of())
    assert found["passed"] is True
    assert [(one["batch"], one["rows"]) for one in found["shapes"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert "NOT" not in capsys.readouterr().out

    def refuse(work: Work) -> Recording:
        if len(work()[0]) == 8:
            raise RuntimeError("no such luck")
        return record(work)

    found = captures(subject_of(refuse))
    assert found["passed"] is False
    assert [one["captured"] for one in found["shapes"]] == [True, True, True, False]
    assert "batch  2 x  4 rows: NOT captured: no such luck" in capsys.readouterr().out


def test_forwards_are_timed_for_every_shape(small: None) -> None:
    subject = subject_of(buckets=(1, 4))
    found = forwards(subject, megabytes=1)
    shapes = [(one["context"], one["batch"], one["rows"], one["captured"]) for one in found["forwards"]]
    assert shapes[:4] == [(251, 1, 1, True), (251, 1, 4, True), (251, 2, 1, True), (251, 2, 4, False)]
    assert all(one["ms"] > 0 and one["eager_ms"] > 0 for one in found["forwards"])
    assert found["floor_ms"] == pytest.approx(1e-6 * subject.target.weight_bytes / found["gb_per_second"])


def test_torch_compile_runs_the_same_layers(small: None) -> None:
    found = rival(subject_of(), Again, (1, 4), backend="eager")
    assert [row["rows"] for row in found["rows"]] == [1, 4]
    for row in found["rows"]:
        for one in row["rivals"]:
            assert one["difference"] == 0
            assert one["ratio"] == pytest.approx(row["hand_ms"] / one["ms"])


def test_a_rival_that_does_not_run_is_reported_and_ends_nothing(small: None) -> None:
    found = rival(subject_of(), record, (1, 4), backend="no such backend")
    assert found["passed"] is True
    assert "did not run" in found["summary"]
    assert all("error" in one for row in found["rows"] for one in row["rivals"])


def test_weights_that_a_rival_would_copy_are_found() -> None:
    decoder = subject_of().target.decoder
    found = list(rival_stage._tensors(decoder))
    matrices = [part.weight for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    for weight in (*matrices, decoder.embedding, decoder.final_norm, decoder.layers[0].norms["norm1"]):
        assert any(one is weight for one in found)


def test_the_simpler_one_stays_where_the_rival_gains_little() -> None:
    assert "keep" in advise([])
    assert "keep" in advise([0.8, 1.09])
    assert "1.20" in advise([0.8, 1.2])


def test_decoding_is_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes are told, and which ratios follow from what they answer."""
    told: dict[str, dict[str, Any]] = {}

    def go(self: RoundRobin) -> bool:
        told.update({process.entries[0].label: process.settings for process in self.plan.processes})
        assert self.warm_up.tokens == max((one.tokens for one in self.questions), key=len)
        for entry in self.plan.entries:
            for number, question in enumerate(self.questions):
                seconds = (2.0 if entry.ours else 3.0) + number
                entry.answers[question.id] = Answer(tuple(range(5)), 1, 1.0, seconds, None)
        self.plan.entries[-1].error = "no room"
        self.plan.entries[-1].answers.clear()
        return True

    monkeypatch.setattr(RoundRobin, "go", go)
    monkeypatch.setattr(decoding_stage, "available", lambda *_: ({"transformers": "python", "vllm": "other"}, []))
    monkeypatch.setattr(decoding_stage, "find", lambda *_: Weights("m", "/m", None, "", True))
    monkeypatch.setattr(
        decoding_stage,
        "encode",
        lambda weights, prompts, length: ([Question(one.id, "x", (1,) * i) for i, one in enumerate(prompts, 3)], None),
    )
    found = decoding_stage.decoding("m", ("none", "sam"), "bfloat16", "cuda", prompts=3, length=5)
    assert found["passed"] is True
    assert [(one["ours"], one["peer"]) for one in found["ratios"]] == [
        (f"outpace {mine} bfloat16", peer)
        for mine in ("none", "sam")
        for peer in ("transformers plain", "transformers static-cache", "vllm plain")
    ]
    assert found["ratios"][0]["ratio"] == pytest.approx(12 / 9)
    assert found["ratios"][2]["ratio"] is None
    assert {one["device"] for name, one in told.items() if name != "vllm plain"} == {"cuda"}
    assert told["transformers static-cache"]["configs"] == {"static-cache": {"static_cache": True}}
    assert 0 < told["vllm plain"]["engine"]["gpu_memory_utilization"] < 1


def test_vllm_takes_its_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the library: what its engine is told, here and by ``outpace bench-peers``."""
    made: list[dict[str, Any]] = []

    class Engine:
        llm_engine = None

        def __init__(self, **options: Any) -> None:
            made.append(options)

    fake: Any = ModuleType("vllm")
    fake.__version__, fake.LLM = "1", Engine
    monkeypatch.setitem(sys.modules, "vllm", fake)
    settings: dict[str, Any] = {"configs": {"plain": {}}, "dtype": "bfloat16", "folder": "/m", "context": 256}
    VLLM(settings | {"engine": {"gpu_memory_utilization": 0.25}})
    VLLM(settings)
    assert made[0]["gpu_memory_utilization"] == 0.25
    assert {**made[0], "gpu_memory_utilization": None} == {**made[1], "gpu_memory_utilization": None}


# The command


def test_without_cuda_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, expected in ((None, "has no CUDA: name an interpreter"), ("13.0", "sees no GPU")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert gpu.main([]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert expected in said.err
        assert len(said.err.splitlines()) == 1


def test_an_interpreter_that_lacks_packages_is_told_which() -> None:
    script = Path(gpu.__file__)
    ran = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(ran.stderr.splitlines()) == 1
    assert "'torch>=" in ran.stderr
    assert missing() == []


def test_models_that_do_not_exist_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--models", "/nowhere.gguf"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--stages", "capture,bytes"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--rival-rows", "one"])


def test_one_command_runs_all_stages_and_writes_after_each(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding starts processes of its own; here it is a stage that fails."""
    out, seen = tmp_path / "deep" / "gpu.json", []

    def decoding(name: str, *_: Any, **__: Any) -> dict[str, Any]:
        seen.append(json.loads(out.read_text()))
        raise OSError("no\nprocesses")

    monkeypatch.setattr(gpu, "decoding", decoding)
    sizes = [
        "--repeat",
        "2",
        "--prompts",
        "1",
        "--length",
        "4",
        "--megabytes",
        "1",
        "--backend",
        "eager",
        "--rival-rows",
        "2",
    ]
    where = ["--models", RANDOM, "--folder", str(tmp_path), "--device", "cpu", "--dtype", "float32"]
    assert gpu.main([*sizes, *where, "--json", str(out)], capture=Again, shape=SHAPE) == 1
    found = json.loads(out.read_text())
    assert found["complete"] is True
    stages = found["models"][RANDOM]
    assert list(stages) == ["load", *gpu.STAGES]
    assert {name for name, stage in stages.items() if not stage["passed"]} == {"decoding"}
    assert str(tmp_path) not in json.dumps(stages["load"])
    assert stages["decoding"]["summary"] == "OSError: no processes"
    assert seen[0]["complete"] is False
    assert list(seen[0]["models"][RANDOM]) == ["load", *gpu.STAGES[:-1]]
    said = capsys.readouterr()
    assert f"FAILED {RANDOM}, decoding: OSError" in said.out
    assert said.out.count("ok     ") == len(gpu.STAGES)
    assert (tmp_path / f"{RANDOM}-float32" / "model.safetensors").exists()


def test_a_model_that_does_not_load_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def load(name: str, *_: Any) -> Subject:
        if name.endswith("first.gguf"):
            raise BadInput("its scores differ from the model's own")
        found = subject_of()
        found.model.info.update(dtype="float32", parameters=1000)
        return found

    for name in ("first.gguf", "second.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.setattr(gpu, "load", load)
    monkeypatch.setattr(gpu, "methods", lambda target: ("none",))
    monkeypatch.setattr(gpu, "captures", lambda subject: {"passed": True, "summary": "good"})
    models = f"{tmp_path / 'first.gguf'},{tmp_path / 'second.gguf'}"
    assert gpu.main(["--device", "cpu", "--models", models, "--stages", "capture"], capture=record) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ok", "FAILED"))]
    assert [line.split()[0] for line in lines] == ["FAILED", "ok", "ok"]
    assert "load: BadInput: its scores differ" in lines[0]

    def stop(subject: Subject) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "captures", stop)
    out = tmp_path / "out.json"
    given = ["--device", "cpu", "--models", models.split(",")[1], "--stages", "capture", "--json", str(out)]
    assert gpu.main(given, capture=record) == 130
    assert json.loads(out.read_text())["complete"] is False


def test_only_the_fast_target_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    generic: Any = SimpleNamespace(target=object(), info={"note": "on the generic target: int9"})
    told: list[dict[str, Any]] = []

    def loading(name: str, **options: Any) -> Any:
        told.append(options)
        return generic

    monkeypatch.setattr("outpace.load", loading, raising=False)
    with pytest.raises(BadInput, match="'m' does not run on the fast target: on the generic target: int9"):
        load("m", "bfloat16", "cuda", 1)
    assert told == [{"dtype": "bfloat16", "device": "cuda", "target": "auto"}]


def test_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("give back"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: len(said))
    subject: Any = SimpleNamespace(device=torch.device("cuda"))
    assert Subject.timed(subject, lambda: said.append("work")) > 0
    assert memory(torch.device("cuda")) == 4  # asked for after PyTorch gave back what it could
    assert said == ["wait", "work", "wait", "give back"]
    assert memory(torch.device("cpu")) == 0


def test_the_real_processes_answer(tmp_path: Path, smollm2: Model) -> None:
    folder = random_folder(tmp_path / "random", "smollm2", "float32", "cpu", SHAPE)
    found = decoding_stage.decoding(folder, ("none",), "float32", "cpu", prompts=2, length=4)
    assert found["passed"] is True
    assert [one["error"] for one in found["peers"]] == [None, None]
    assert all(one["ratio"] > 0 for one in found["ratios"])
    assert [one["name"] for one in found["skipped"]] == ["vllm"]


def test_a_vllm_that_is_named_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here or in an interpreter of its own, and never in the environment of ``make peers``, which is for the CPU."""
    job = Job(Weights("m", "/m", None, "", True), None, "bfloat16", 1, 256)
    asked: list[str | None] = []

    def available(peers: list[Any], python: str | None) -> tuple[dict[str, str], list[dict[str, str]]]:
        asked.append(python)
        return {peer.name: python or sys.executable for peer in peers}, []

    monkeypatch.setattr(decoding_stage, "available", available)
    for named, here in (("/own/python", False), (None, True), (None, False)):
        monkeypatch.setattr(decoding_stage, "find_spec", lambda name, here=here: here or None)
        plan = decoding_stage._plan(job, ("none",), "cuda", named)
        assert ("vllm plain" in [entry.label for entry in plan.entries]) is bool(named or here)
        assert bool(plan.skipped) is not bool(named or here)
    assert asked == ["/own/python", sys.executable, None]
