"""Signals, in a process of its own: SIGTERM finishes what is under way, a second one does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outpace.cli.options import INTERRUPTED

# The command itself, with a toy model that takes a tenth of a second for each token.
PROGRAM = """
import sys, time
import outpace.loading
from cli_support import toy
from outpace.cli import main

def load(name, **_):
    model = toy(name)
    score = model.target.score
    model.target.score = lambda *given, **named: time.sleep(0.1) or score(*given, **named)
    return model

outpace.loading.load = load
sys.exit(main(["serve", "--port", "0", "--method", "none", "--kv-bytes", "1000000"]))
"""
BODY: dict[str, Any] = {"model": "smollm2", "prompt": "ab", "temperature": 0, "max_tokens": 30, "ignore_eos": True}


@contextmanager
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    log = tmp_path / "log"
    folders = [str(Path(__file__).parents[1]), *sys.path]
    about = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    with (
        log.open("wb") as stderr,
        subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=stderr, env=about) as process,
    ):
        try:
            while not (found := re.search(r"^ready: (http://\S+)$", log.read_text(), re.MULTILINE)):
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            yield process, found[1]
        finally:
            process.kill()


def running(where: str) -> bool:
    return 'num_requests_running{model_name="smollm2"} 1.0' in httpx.get(f"{where}/metrics").text


@contextmanager
def asking(where: str) -> Iterator[list[Any]]:
    """A request is under way inside; its answer, or the error, is in the list afterwards."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(httpx.post(f"{where}/v1/completions", json=BODY, timeout=60).json())
        except httpx.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not running(where):
        time.sleep(0.01)
    yield answers
    thread.join()


def drained(process: subprocess.Popen[bytes], where: str) -> None:
    """SIGTERM, and wait until the server refuses requests."""
    process.send_signal(signal.SIGTERM)
    while httpx.get(f"{where}/ready").status_code == 200:
        time.sleep(0.01)
    assert httpx.post(f"{where}/v1/completions", json=BODY).status_code == 503


def test_sigterm_finishes_what_is_under_way(tmp_path: Path) -> None:
    with server(tmp_path) as (process, where):
        with asking(where) as answers:
            drained(process, where)
        assert process.wait(30) == 0
    assert answers[0]["usage"]["completion_tokens"] == 30


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with server(tmp_path) as (process, where), asking(where) as answers:
        drained(process, where)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == INTERRUPTED
    assert isinstance(answers[0], httpx.HTTPError) or answers[0]["usage"]["completion_tokens"] < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with server(tmp_path) as (process, _):
        process.send_signal(number)
        assert process.wait(30) == 0
