"""Starting vLLM's server, waiting for it, ending it: with a program that stands for vLLM, in real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from outpace.core.errors import BadInput
from outpace.integrations.vllm.command import Launch, ServerOptions, launch
from outpace.integrations.vllm.interpreter import Interpreter
from outpace.integrations.vllm.server import EngineFailed, Server, free_port
from outpace.integrations.vllm.speculative_config import Speculation

FAKE = """
import http.server, os, signal, sys, time

mode, port = sys.argv[1], int(sys.argv[2])
print("INFO 11-23 04:52:28 [api_server.py:1] loading", flush=True)
if mode == "dies":
    print("(EngineCore pid=7) ERROR 11-23 04:52:28 [core.py:42] Traceback (most recent call last):")
    print("(EngineCore pid=7) ERROR 11-23 04:52:28 [core.py:42] ValueError: no kernel for this head size")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)
if mode == "never":
    time.sleep(600)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode in ("stubborn", "waits"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif mode == "drains":  # for as long as the arguments say
    import threading
    limit = float(sys.argv[sys.argv.index("--shutdown-timeout") + 1])
    def drain():
        answered.wait(limit)
        os._exit(0)
    answered = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain).start())
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("finishing", flush=True), sys.exit(0)))
time.sleep(0.3)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/fail":
            print("MemoryError: no room", flush=True)
            os._exit(7)
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for word in ("first ", "later ", "last"):
                self.wfile.write(word.encode())
                self.wfile.flush()
                time.sleep(0.5)
            answered.set()
            return
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *given):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start(mode: str) -> Launch:
    port = free_port("127.0.0.1", 0)
    command = [sys.executable, "-c", FAKE, mode, str(port)]
    if mode != "works":
        whole = launch(Speculation("none"), ServerOptions("folder", "name"), Interpreter(sys.executable, "0.32.0"))
        at = whole.command.index("--shutdown-timeout")
        command += whole.command[at : at + 2] if mode != "waits" else ["--shutdown-timeout=0"]
    return Launch(command, {}, Speculation("none"), ServerOptions("folder", "name", port=port))


def test_it_is_ready_and_ends() -> None:
    server = Server(start("works"))
    try:
        server.wait_until_ready(60)
        assert urllib.request.urlopen(f"{server.url}/health").status == 200
    finally:
        server.close()
    assert server.wait() == 0
    assert "finishing" in server.log


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "ended with exit code 1 before it was ready: ValueError: no kernel for this head size"),
        ("killed", "was ended by signal 9 before it was ready: INFO"),
    ],
)
def test_why_it_did_not_start(mode: str, said: str) -> None:
    server = Server(start(mode))
    with pytest.raises(EngineFailed, match=said):
        server.wait_until_ready(60)
    server.close()


def test_it_is_not_waited_for_for_ever() -> None:
    server = Server(start("never"))
    with pytest.raises(EngineFailed, match=r"not ready within 0\.5 s"):
        server.wait_until_ready(0.5)
    assert server.wait() == -signal.SIGKILL


def test_an_interpreter_that_does_not_start() -> None:
    broken = Launch(["/nowhere/python"], {}, Speculation("none"), ServerOptions("folder", "name"))
    with pytest.raises(EngineFailed, match="cannot start /nowhere/python: No such file"):
        Server(broken)


def test_a_server_that_fails_later() -> None:
    begun = start("works")
    server = Server(begun)
    server.wait_until_ready(60)
    with pytest.raises(OSError, match=r".*"):
        urllib.request.urlopen(f"{server.url}/fail", timeout=10)
    code = server.wait()
    assert str(server.failure(code)) == "vLLM ended with exit code 7: MemoryError: no room"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(BadInput, match="in use"):
        free_port("127.0.0.1", other.getsockname()[1])
    with pytest.raises(BadInput, match="--host"):
        free_port("203.0.113.7", 0)
    assert 0 < free_port("127.0.0.1", 0) < 65536


SERVE = """
import sys
sys.path.insert(0, sys.argv[3])
from test_vllm_server import start
from outpace.core.errors import OutpaceError
from outpace.integrations.vllm import server
from outpace.integrations.vllm.server import serve
server.FAREWELL = float(sys.argv[2] or server.FAREWELL)
begun = start(sys.argv[1])
print("begun", file=sys.stderr)
try:
    sys.exit(serve(begun))
except OutpaceError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(2)
"""


def served(mode: str, farewell: str = "") -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", SERVE, mode, farewell, here]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})


def until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("ready: "):
            return line.split()[1]
    raise AssertionError("it was never ready")


def gone(url: str, within: float = 10.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_it_finish(number: signal.Signals) -> None:
    process = served("works")
    url = until_ready(process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "finishing" in said  # its log is passed on when it is ready
    assert gone(url)


def test_a_signal_amid_an_answer_lets_it_finish() -> None:
    """The server is given time for it: without, vLLM cuts its answers."""
    process = served("drains")
    url = until_ready(process)
    with urllib.request.urlopen(f"{url}/slow", timeout=10) as answer:
        assert answer.read(6) == b"first "
        process.send_signal(signal.SIGTERM)
        assert answer.read() == b"later last"
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_server_that_does_not_end_in_time_is_ended() -> None:
    """vLLM waits for clients whose answers it has cut."""
    process = served("waits", "0.5")
    url = until_ready(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert gone(url)


def test_how_long_answers_are_finished() -> None:
    def seconds(*further: str) -> float:
        options = ServerOptions("folder", "name", further=further)
        return launch(Speculation("none"), options, Interpreter("python", "0.32.0")).drain_seconds

    assert seconds() == 30.0
    assert seconds("--shutdown-timeout=120") == 120.0
    assert seconds("--shutdown-timeout", "7", "--seed=1") == 7.0
    assert seconds("--shutdown-timeout=x") == 30.0  # vLLM refuses it


def test_a_second_signal_ends_it_at_once() -> None:
    process = served("stubborn")
    url = until_ready(process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert gone(url)


def test_a_signal_while_it_starts() -> None:
    process = served("never")
    assert process.stderr is not None
    while process.stderr.readline() != "begun\n":
        pass
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_server_that_dies_is_an_error() -> None:
    process = served("works")
    url = until_ready(process)
    with pytest.raises(OSError, match=r".*"):
        urllib.request.urlopen(f"{url}/fail", timeout=10)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: vLLM ended with exit code 7: MemoryError: no room" in said
