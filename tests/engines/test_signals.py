"""SIGTERM amid a stream of ``outpace serve --engine vllm``: the stream ends whole, and the process with exit code 0.

make engines
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine_results import RUNS, missing, wanted
from outpace.core.errors import BadInput
from outpace.integrations.vllm.interpreter import find_interpreter
from outpace.integrations.vllm.server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.model]
MODEL, LENGTH = "smollm2", 400
PYTHON = os.environ.get("OUTPACE_VLLM_PYTHON")


def streamed(port: int, process: subprocess.Popen[str]) -> str:
    """How a stream ended during which the server was told to end: its last finish_reason, or "cut"."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": MODEL, "prompt": "Once", "max_tokens": LENGTH, "temperature": 0, "stream": True}
    asked = json.dumps({**body, "ignore_eos": True})
    connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    events, reason = 0, "cut"
    try:
        for line in connection.getresponse():
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return reason
            if data:
                events += 1
                reason = json.loads(data)["choices"][0]["finish_reason"] or reason
            if events == 3:
                process.send_signal(signal.SIGTERM)
    except (http.client.HTTPException, ConnectionError):
        pass
    return "cut"


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The port of ``outpace serve --engine vllm`` when it is ready, and its process."""
    if not wanted("server"):
        pytest.skip(f"not among {RUNS}")
    try:
        python = find_interpreter(PYTHON).path
    except BadInput as error:
        missing(str(error))
    port = free_port("127.0.0.1", 0)
    command = ["-m", "outpace", "serve", "--model", MODEL, "--engine", "vllm", "--vllm-python", python]
    command += ["--method", "sam", "--proposer", "outpace", "--dtype", "float32", "--threads", "1", "--port", str(port)]
    command += ["--max-batch", "4", "--kv-bytes", str(2**28), "--max-model-len", "1024"]
    command += [f"--engine-arg={one}" for one in ("--enforce-eager", *arguments)]
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = any(line.startswith("ready: ") for line in process.stderr)
            assert ready, "it was never ready"
            yield port, process
        finally:
            process.kill()


def test_a_running_stream_is_finished() -> None:
    with serving() as (port, process):
        assert streamed(port, process) == "length"
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0, said


def test_without_time_for_it_the_stream_is_cut_and_the_process_still_ends() -> None:
    """vLLM's own default: it cuts answers, and may wait for their clients for ever."""
    with serving("--shutdown-timeout=0") as (port, process):
        assert streamed(port, process) in ("abort", "cut")
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0, said
