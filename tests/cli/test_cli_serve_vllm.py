"""``outpace serve --engine vllm``: the command and the configuration that are printed, and what is refused."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outpace.loading
from cli_support import Run, refused, runner
from layouts_support import head_of, written
from outpace.cli import certify_vllm, main
from outpace.heads.checkpoint import save
from outpace.integrations.vllm import interpreter
from outpace.integrations.vllm.command import Launch
from outpace.integrations.vllm.interpreter import Interpreter
from outpace.model import Model
from outpace.models.gguf_cache import cache_dir
from outpace.targets.hf import HFTarget
from target_suite import tiny_model


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that looks like a model, which the toy stands for."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"")
    return str(place)


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model's is the user's, where it was converted before."""
    if "model" not in request.keywords:
        monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)


def has(version: str | None, monkeypatch: pytest.MonkeyPatch, *, suffix: bool = True) -> None:
    """Every interpreter has this version of vLLM."""
    monkeypatch.setattr(interpreter, "_asked", lambda path: Interpreter(str(path), version, suffix))


def printed(run: Run, *argv: str) -> dict[str, Any]:
    ran = run("serve", "--engine", "vllm", "--print", "--json", *argv)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_the_command(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has("0.32.0", monkeypatch)
    found = printed(run, "--model", folder, "--method", "pld", "--port", "8123", "--max-batch", "4")
    command = found["command"]
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options["--model"] == folder
    assert options["--served-model-name"] == folder
    assert (options["--port"], options["--max-num-seqs"]) == ("8123", "4")
    assert options["--shutdown-timeout"] == "30"  # vLLM's own default cuts running answers
    assert json.loads(options["--speculative-config"]) == found["speculative_config"]
    assert found["speculative_config"]["method"] == "ngram"
    assert any("min_p and logit_bias" in note for note in found["notes"])


def test_the_plug_in_comes_with_it(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has("0.32.0", monkeypatch)
    [place] = {printed(run, "--model", folder, "--method", "none")["environment"]["PYTHONPATH"] for _ in range(2)}
    assert (Path(place) / "outpace" / "integrations" / "vllm").is_dir()
    [about] = Path(place).glob("outpace-*.dist-info/entry_points.txt")
    assert "vllm.general_plugins" in about.read_text()
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert about.read_text().splitlines()[1].split(" = ")[1] in declared


@pytest.mark.parametrize(
    ("argv", "config"),
    [
        (("--method", "none"), None),
        (
            ("--method", "pld", "--param", "max_ngram=4"),
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        ),
        (("--method", "sam"), {"method": "suffix", "num_speculative_tokens": 32}),
        (("--method", "sam", "--num-draft-tokens", "7"), {"method": "suffix", "num_speculative_tokens": 7}),
        (("--method", "sam", "--param", "num_draft_tokens=9"), {"method": "suffix", "num_speculative_tokens": 9}),
        (
            ("--method", "cacheback"),
            {"method": "custom_class", "model": "outpace.integrations.vllm.Proposer", "num_speculative_tokens": 16},
        ),
    ],
)
def test_lookup_methods(
    argv: tuple[str, ...], config: dict[str, Any] | None, run: Run, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has("0.32.0", monkeypatch)
    assert printed(run, "--model", folder, *argv)["speculative_config"] == config


def test_the_plug_in_is_told_the_method(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has("0.32.0", monkeypatch)
    for argv in (("--method", "sam", "--proposer", "outpace"), ("--method", "sam")):
        if argv[-1] == "sam":
            has("0.32.0", monkeypatch, suffix=False)  # what vLLM's own needs is not installed
        found = printed(run, "--model", folder, *argv, "--param", "min_match=2")
        assert found["speculative_config"]["method"] == "custom_class"
        told = json.loads(found["command"][found["command"].index("--additional-config") + 1])
        assert told == {"outpace": {"method": "sam", "settings": {"min_match": 2}}}


def test_a_draft_model(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has("0.32.0", monkeypatch)
    found = printed(run, "--model", folder, "--draft-model", folder, "--num-draft-tokens", "2")
    assert found["speculative_config"] == {
        "method": "draft_model",
        "model": folder,
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }


def test_text_instead_of_json(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has("0.32.0", monkeypatch)
    ran = run("serve", "--engine", "vllm", "--print", "--model", folder, "--method", "pld")
    assert ran.code == 0
    assert "-m vllm.entrypoints.openai.api_server --model" in ran.out
    assert "draft length" in ran.err


def test_printing_needs_no_vllm(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has(None, monkeypatch)
    found = printed(run, "--model", folder, "--method", "sam")
    assert found["command"][0] == sys.executable
    assert any("has no vLLM" in note for note in found["notes"])
    refused(
        run("serve", "--engine", "vllm", "--model", folder, "--method", "sam"), "vLLM is not installed", "pip install"
    )


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "of an unknown version"])
def test_versions_that_were_not_tested(version: str, run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has(version, monkeypatch)
    refused(run("serve", "--engine", "vllm", "--print", "--model", folder), version, "vllm>=0.32,<0.33")


def test_interpreters_that_are_none(run: Run, folder: str, tmp_path: Path) -> None:
    serve = ("serve", "--engine", "vllm", "--print", "--model", folder, "--method", "pld", "--vllm-python")
    refused(run(*serve, "./nowhere"), "no file ./nowhere")
    (tmp_path / "text").write_text("no program")
    refused(run(*serve, str(tmp_path / "text")), "does not run as a Python interpreter")
    refused(run(*serve, sys.executable), "has no vLLM", "pip install")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--engine", "vlm"), ("unknown engine 'vlm'", "vllm")),
        (("--vllm-python", "python"), ("--vllm-python", "--engine vllm")),
        (("--print",), ("--print", "--engine vllm")),
        (("--engine", "vllm", "--json"), ("--json belongs to --print",)),
        (("--engine", "vllm", "--print", "--api-keys", "keys"), ("--api-keys", "outpace's own server")),
        (("--engine", "vllm", "--print", "--time-limit", "3"), ("--time-limit",)),
        (("--engine", "vllm", "--print", "--rule", "block"), ("--rule",)),
        (("--engine", "vllm", "--print", "--dtype", "int4"), ("int4", "bfloat16")),
        (("--engine", "vllm", "--print", "--method", "plx"), ("unknown method 'plx'",)),
        (("--engine", "vllm", "--print", "--method", "lookahead"), ("'lookahead' does not run in vLLM", "cacheback")),
        (("--engine", "vllm", "--print", "--method", "rest"), ("--datastore",)),
        (("--engine", "vllm", "--print", "--method", "sam", "--param", "min_match=3"), ("--proposer outpace",)),
        (("--engine", "vllm", "--print", "--method", "cacheback", "--proposer", "vllm"), ("is not in vLLM",)),
        (("--engine", "vllm", "--print", "--proposer", "mine"), ("--proposer must be one of",)),
        (("--engine", "vllm", "--print", "--method", "pld", "--num-draft-tokens", "0"), ("at least 1",)),
        (("--engine", "vllm", "--print", "--head", "./nowhere"), ("./nowhere", "no such folder, and no kind")),
        (("--engine", "vllm", "--print", "--method", "eagle3"), ("eagle3", "shipped")),
        (("--engine", "vllm", "--print", "--method", "pld", "--draft-model", "smollm2"), ("--draft-model",)),
        (("--engine", "vllm", "--print", "--model", "a/b", "--model", "c/d"), ("one model",)),
        (("--engine", "vllm", "--print", "--port", "70000"), ("between 0 and 65535",)),
        (("--engine", "vllm", "--print", "--max-batch", "0"), ("at least 1",)),
    ],
)
def test_what_is_refused(
    argv: tuple[str, ...], said: tuple[str, ...], run: Run, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has("0.32.0", monkeypatch)
    model = () if "--model" in argv else ("--model", folder)
    refused(run("serve", *model, *argv), *said)


def test_a_port_in_use(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has("0.32.0", monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        serve = ("serve", "--engine", "vllm", "--model", folder, "--method", "none", "--port", port)
        refused(run(*serve), f"port {port}", "in use", "--port")


@pytest.mark.parametrize("layout", ["own", "speculators"])
def test_a_head_for_another_target(
    layout: str, run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has("0.32.0", monkeypatch)
    place, head = tmp_path / "head", head_of("eagle3", 50)
    if layout == "own":
        place.mkdir()
        save(head, place, {})
    else:
        written(head, layout, place)
    other = SimpleNamespace(name="other", target=HFTarget(tiny_model("llama", seed=8)))
    monkeypatch.setattr(outpace.loading, "load", lambda name, **_: other)
    serve = ("serve", "--engine", "vllm", "--print", "--model", folder, "--head", str(place))
    refused(run(*serve), str(place), "was made for other weights than this model's")
    heads = cache_dir() / "vllm" / "heads"
    assert not heads.exists() or not list(heads.iterdir())


@pytest.mark.model
@pytest.mark.parametrize(
    ("kind", "method", "architecture"),
    [
        ("eagle3", "eagle3", "Eagle3Speculator"),
        ("dflash", "dflash", "DFlashSpeculator"),
        ("draft-lm", "draft_model", "LlamaForCausalLM"),
    ],
)
def test_the_shipped_heads(
    kind: str,
    method: str,
    architecture: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    smollm2: Model,
) -> None:
    has("0.32.0", monkeypatch)
    monkeypatch.setattr(outpace.loading, "load", lambda name, **_: smollm2)
    for _ in range(2):  # exported, then found in the cache
        code = main(["serve", "--model", "smollm2", "--engine", "vllm", "--head", kind, "--print", "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        found = json.loads(captured.out)
        config = found["speculative_config"]
        assert config["method"] == method
        assert config["draft_sample_method"] == "probabilistic"
        assert 1 <= config["num_speculative_tokens"] <= 4
        assert "eval-head" in found["draft_length_from"]
        folder = Path(config["model"])
        assert folder.is_relative_to(cache_dir())
        described = json.loads((folder / "config.json").read_text())
        assert described["architectures"] == [architecture]
        if kind != "draft-lm":
            served = found["command"][found["command"].index("--model") + 1]
            assert described["speculators_config"]["verifier"]["name_or_path"] == served


@pytest.mark.parametrize("plugin", [True, False])
def test_what_a_certificate_starts(plugin: bool, run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers alike, with no longer a context than the model has, and without the plug-in if so asked."""
    has("0.32.0", monkeypatch)
    (Path(folder) / "config.json").write_text('{"max_position_embeddings": 512}')
    started: list[Launch] = []

    @contextmanager
    def running(start: Launch) -> Iterator[str]:
        started.append(start)
        yield "http://127.0.0.1:9"

    monkeypatch.setattr(certify_vllm, "_running", running)
    given = ("certify", "--engine", "vllm", "--model", folder, *(() if plugin else ("--no-plugin",)))
    refused(run(*given, "pld"), "nothing answers at http://127.0.0.1:9")
    for start in started:
        assert start.command[start.command.index("--max-model-len") + 1] == "512"
        assert ("PYTHONPATH" in start.variables) is plugin
    assert [one.speculation.config is None for one in started] == [False, True]
    if not plugin:
        refused(run(*given, "cacheback"), "--no-plugin: the plug-in drafts for method 'cacheback'")
