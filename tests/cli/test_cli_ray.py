"""``--ray``: what is refused before anything starts, in one line and with exit code 2."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cli_support import Run, refused, runner
from outpace.cli import generate_ray, serve_ray
from outpace.cli.generate_ray import Batch
from outpace.cli.serve_ray import Replication
from outpace.constraints import Grammar
from outpace.core.errors import BadInput, MissingExtra
from outpace.core.machine import usable_cpus
from outpace.integrations.ray import batch_run
from outpace.integrations.ray.batch_answers import Answers
from outpace.integrations.ray.batch_rows import Row
from outpace.integrations.ray.cluster import ADDRESS_VARIABLE, require_ray
from outpace.integrations.ray.messages import Call, collected


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    return runner(monkeypatch, capsys)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "hello"}\n')
    return str(path)


@pytest.fixture
def output(tmp_path: Path) -> str:
    return str(tmp_path / "out.jsonl")


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Let a Ray of this version be installed, with nothing in it."""
    for name in ("ray", "ray.data", "ray.serve", "ray.serve.request_router"):
        module = ModuleType(name)
        module.__version__ = version  # type: ignore[attr-defined]
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)


def test_without_ray_the_install_command_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, source: str, output: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(run("serve", "--ray"), "outpace serve --ray", "pip install 'outpace[ray]'")
    refused(run("generate", "--ray", source, output), "outpace generate --ray", "pip install 'outpace[ray]'")
    assert not Path(output).exists()


def test_another_version_of_ray(run: Run, monkeypatch: pytest.MonkeyPatch, source: str, output: str) -> None:
    install(monkeypatch, "2.9.0")
    refused(run("serve", "--ray"), "Ray 2.9.0", "2.60 or newer")
    refused(run("generate", "--ray", source, output), "Ray 2.9.0")


@pytest.mark.parametrize("value", ["0", "-1", "two", "3..1", "0..2"])
def test_numbers_of_replicas(run: Run, value: str) -> None:
    refused(run("serve", "--ray", f"--replicas={value}"), "--replicas", value)


def test_more_replicas_than_cpus(run: Run, monkeypatch: pytest.MonkeyPatch, source: str, output: str) -> None:
    install(monkeypatch, "2.60.0")
    many = str(usable_cpus() + 1)
    refused(run("serve", "--ray", "--replicas", many), f"{many} replicas", "--threads", ADDRESS_VARIABLE)
    refused(run("generate", "--ray", source, output, "--replicas", many), f"{many} replicas")


def test_a_port_in_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "2.60.0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused(run("serve", "--ray", "--port", str(other.getsockname()[1])), "in use")


def test_options_that_belong_together(run: Run, source: str, output: str) -> None:
    refused(run("serve", "--replicas", "2"), "--replicas needs --ray")
    refused(run("generate", "hello", "--replicas", "2"), "--replicas needs --ray")
    refused(run("generate", "hello", "--resume"), "--resume needs --ray")
    refused(run("generate", "hello", "world"), "put the prompt in quotes")
    refused(run("generate", "--ray", source), "two files")
    refused(run("generate", "--ray", source, output, "--replicas", "0"), "--replicas")
    for option in ("--explain", "--json", "--logprobs=2"):
        refused(run("generate", "--ray", source, output, option), option.partition("=")[0])


def test_a_batch_has_the_grammar_of_the_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, source: str, output: str
) -> None:
    batches: list[Batch] = []

    def kept(batch: Batch, *_: object, **__: object) -> int:
        batches.append(batch)
        return 0

    monkeypatch.setattr(generate_ray, "generate_batch", kept)
    for given in (["--choice", "ab", "--choice", "ba", "--constraint-weighting", "fvo", "--grammar-bytes", "99"], []):
        assert run("generate", "--ray", source, output, "--model", "toy", *given).code == 0
    held, free = (one.options for one in batches)
    assert held["grammar"] == Grammar.choice(["ab", "ba"])
    assert held["grammar_limits"].max_bytes == 99
    assert held["params"].constraint_weighting.kind == "fvo"
    assert "grammar" not in free
    refused(run("generate", "--ray", source, output, "--schema", "[1]"), "a schema must be a JSON object")


class Here:
    """A pass in this process, in place of Ray's."""

    def __init__(self, open_answers: Callable[[], Answers], *_: int) -> None:
        self.open_answers = open_answers

    def __call__(self, rows: Sequence[Row], _: int) -> Iterator[list[dict[str, Any]]]:
        yield self.open_answers()(rows)


def test_a_batch_says_what_is_lossy_about_its_answers(
    run: Run, monkeypatch: pytest.MonkeyPatch, source: str, output: str
) -> None:
    monkeypatch.setattr(batch_run, "RayPass", Here)
    monkeypatch.setattr(generate_ray, "require_ray", lambda _: None)
    monkeypatch.setattr(generate_ray, "connected", nullcontext)
    given = ("generate", "--ray", source, output, "--method", "pld", "--max-new-tokens", "4")
    for more, said in ((("--rule", "margin"), ", lossy: margin(theta=0.9)"), ((), "")):
        ran = run(*given, *more)
        assert ran.code == 0, ran.err
        assert ran.err.splitlines()[-1] == f"1 of 1 rows answered: {output}{said}"
        assert ("lossy" in json.loads(Path(output).read_text())) == bool(said)
        Path(output).unlink()


def test_files(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, output: str) -> None:
    install(monkeypatch, "2.60.0")
    refused(run("generate", "--ray", "nowhere.jsonl", output), "nowhere.jsonl", "No such file")
    refused(run("generate", "--ray", source, source), "is the input")
    refused(run("generate", "--ray", source, str(tmp_path / "none" / "out.jsonl")), "no folder")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    refused(run("generate", "--ray", str(empty), output), "has no rows")
    Path(output).write_text("mine\n")
    refused(run("generate", "--ray", source, output), "exists already")
    assert Path(output).read_text() == "mine\n"
    Path(output).unlink()
    Path(output + ".partial").write_text("{}\n")
    refused(run("generate", "--ray", source, output), "--resume")
    assert not Path(output).exists()


VLLM = """#!{python}
import http.server, json, sys
if "-c" in sys.argv:  # asked for its version
    print(json.dumps({{"vllm": "0.32.0", "suffix": True}}))
    sys.exit()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.dumps({{"command": sys.argv, "usage": {{"total_tokens": 5}}}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *given):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Stands for the interpreter that has vLLM."""


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    program = tmp_path / "python"
    program.write_text(VLLM.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that looks like a model."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"")
    return str(place)


def test_vllm_as_the_engine_of_replicas(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm: str, folder: str
) -> None:
    install(monkeypatch, "2.60.0")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    found: list[Replication] = []

    def serve_replicas(replication: Replication, *_: Any) -> bool:
        found.append(replication)
        return True

    monkeypatch.setattr(serve_ray, "serve_replicas", serve_replicas)
    given = ["serve", "--ray", "--replicas", "1", "--threads", "1", "--port", "0", "--max-batch", "4", "--log-requests"]
    given += ["--time-limit", "30", "--engine", "vllm", "--vllm-python", vllm, "--model", folder, "--method", "pld"]
    monkeypatch.setattr(sys, "argv", ["outpace", *given])
    ran = run(*given)
    assert ran.code == 0, ran.err
    assert "min_p and logit_bias" in ran.err
    [replication] = found
    assert (replication.how.batch, replication.how.cpus) == (4, 1)
    assert (replication.log_requests, replication.time_limit) == (True, 30.0)
    engine = replication.open_engine()
    try:
        engine.check()
        call = Call("POST", "/v1/completions", body=b"{}")
        reply = asyncio.run(collected(engine.ask(call, "r0")))
    finally:
        engine.close()
    command = json.loads(reply.body)["command"]
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--max-num-seqs") + 1] == "4"
    assert json.loads(command[command.index("--speculative-config") + 1])["method"] == "ngram"


def test_a_configuration_file_may_ask_for_more_than_this_machine_has(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """The application is built on one machine of the cluster, and replicas run on all of them."""
    from outpace.cli import ray_app
    from outpace.integrations.ray import ingress_deployment

    install(monkeypatch, "2.60.0")
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    found: list[Any] = []
    monkeypatch.setattr(ingress_deployment, "ingress_application", lambda *given, **_: found.append(given))
    ray_app.app({"options": "--model smollm2 --threads 1", "replicas": "999"})
    [(_, how)] = found
    assert (how.scale.most, how.cpus) == (999, 1)
    refused(run("serve", "--ray", "--replicas", "999", "--threads", "1", "--port", "0"), "need 999 CPUs")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--rule typical", "a lossy rule is never the default of a server"),
        ("--lossless --rule cactus --rule-param delta=0", "a lossy rule is never the default of a server"),
        ("--method bild", "never the default of a server"),
        ("--method pld@margin", "a lossy rule is never the default of a server"),
    ],
)
def test_a_configuration_file_makes_no_lossy_rule_the_default(options: str, said: str) -> None:
    from outpace.cli import ray_app

    with pytest.raises(BadInput, match=said):
        ray_app.service_options(ray_app.parsed(options))


def test_what_vllm_as_the_engine_of_replicas_refuses(
    run: Run, monkeypatch: pytest.MonkeyPatch, vllm: str, folder: str
) -> None:
    install(monkeypatch, "2.60.0")
    serve = ("serve", "--ray", "--port", "0", "--engine", "vllm", "--vllm-python", vllm, "--model", folder)
    refused(run(*serve, "--method", "pld", "--print"), "--print", "leave out --ray")
    refused(run(*serve, "--method", "pld", "--goodput", "ttft:200"), "--goodput", "outpace's own server")
    refused(run(*serve, "--method", "lookahead"), "'lookahead' does not run in vLLM")
    refused(run(*serve[:-4], "--vllm-python", sys.executable, "--model", folder), "has no vLLM")
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(run(*serve, "--method", "pld"), "pip install 'outpace[ray]'")


def test_a_folder_named_ray_is_not_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *[one for one in sys.path if "site-packages" not in one]])
    with pytest.raises(MissingExtra, match="ray"):
        require_ray("outpace serve --ray")
