"""The certificate of vLLM: its build for CPUs is refused above temperature 0, and passes with the plug-in's override.

make engines
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from engine_results import RUNS, keep, missing, wanted
from outpace.cli import main
from outpace.core.errors import BadInput
from outpace.integrations.vllm.interpreter import find_interpreter
from outpace.integrations.vllm.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.model]
MODEL = "smollm2"
PYTHON = os.environ.get("OUTPACE_VLLM_PYTHON")
found: dict[str, Any] = {}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def baseline() -> Iterator[str]:
    """vLLM without speculation."""
    with running_server(MODEL, python=PYTHON, max_num_seqs=16) as address:
        yield address


@pytest.fixture(scope="module", autouse=True)
def written() -> Iterator[None]:
    """What was found, for the table."""
    if not wanted("certificates"):
        pytest.skip(f"not among {RUNS}")
    try:
        version = find_interpreter(PYTHON).version
    except BadInput as error:
        missing(str(error))
    yield
    keep("vllm", {"version": version, "certificates": found})


def certified(label: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the certificate of a server, kept for the table under a label."""
    capsys.readouterr()
    small = ("--limit", "2", "--samples", "600", "--time-limit", "300")
    code = main(["certify", "--model", MODEL, *small, *options, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    certificate: dict[str, Any] = json.loads(captured.out)
    found[label] = {name: certificate[name] for name in ("lossless", "speculation", "verdict")}
    return code, certificate


def test_the_build_for_cpus_is_refused(baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(MODEL, NGRAM, python=PYTHON, plugin=False, max_num_seqs=16) as address:
        server = ("--endpoint", address, "--draft-length", "4")
        code, greedy = certified("n-gram, temperature 0", capsys, *server, "--baseline", baseline, "--temperature", "0")
        assert (code, greedy["lossless"]) == (0, True), greedy["verdict"]
        code, sampled = certified("n-gram, temperature 0.7", capsys, *server, "--temperature", "0.7")
    if sampled["lossless"] is True:
        pytest.skip("this build of vLLM has no such defect")
    assert (code, sampled["lossless"]) == (1, False)
    tests = ("rank by the engine's log-probabilities", "tokens beyond the 20 most likely")
    assert any(one in sampled["verdict"] for one in tests), sampled["verdict"]


def test_with_the_override_it_passes(baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(MODEL, NGRAM, python=PYTHON, max_num_seqs=16) as address:
        server = ("--endpoint", address, "--draft-length", "4", "--baseline", baseline)
        label = "n-gram with the plug-in's override, temperature 0.7"
        code, mended = certified(label, capsys, *server, "--temperature", "0.7")
    assert (code, mended["lossless"]) == (0, True), mended["verdict"]
    assert mended["speculation"]["accepted"] > 30
    assert mended["logprobs"] == {"kind": "raw", "top": 20}


def test_one_command_starts_both_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """A shipped head, whose drafts are sampled, against the same engine without it."""
    options = ["--engine", "vllm", *(() if PYTHON is None else ("--vllm-python", PYTHON)), "--head", "eagle3"]
    options += ["--dtype", "float32", "--engine-arg=--enforce-eager", "--temperature", "1"]
    code, head = certified("eagle3 with the plug-in's override, temperature 1", capsys, *options)
    assert (code, head["lossless"]) == (0, True), head["verdict"]
    assert head["speculation"]["accepted"] > 30
