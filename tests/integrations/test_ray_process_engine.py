"""A replica whose answers come from another server's process."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from outpace.core.errors import BadInput
from outpace.integrations.ray import process_engine, process_progress, replica
from outpace.integrations.ray.messages import Call, Head, Message, ReplicaLost, collected
from outpace.integrations.ray.process_engine import ProcessEngine, replica_command
from outpace.integrations.ray.replica import Unhealthy

SERVER = """
    import json, os, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    figures = {"asked": 0, "steps": False, "mute": False}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            figures["asked"] += 1
            if figures["mute"]:
                time.sleep(60)
            steps = figures["asked"] if figures["steps"] else 0
            body = b"vllm:iteration_tokens_total_count %d\\nprocess_cpu_seconds_total %d\\n" % (steps, figures["asked"])
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if asked.get("die"):
                os._exit(3)
            if "hang" in asked:
                figures.update(asked["hang"])
                time.sleep(60)
            self.send_response(asked.get("status", 200))
            if asked.get("stream"):
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                for number in range(3):
                    words = b", not data: or data: [DONE]" if asked.get("words") else b""
                    event = b"data: %d%s\\n\\n" % (number, words)
                    for at in range(0, len(event), step := asked.get("bytes", len(event))):
                        self.wfile.write(event[at : at + step])
                        self.wfile.flush()
                        time.sleep(0.01)
                    if asked.get("cut") == number:
                        os._exit(3)
                self.wfile.write(b"data: [DONE]\\n\\n")
                self.close_connection = True
                return
            body = json.dumps({"path": self.path, "asked": asked, "usage": {"total_tokens": 7}}).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print("loading", file=sys.stderr)
    print(f"ready: http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    server.serve_forever()
"""


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    found = ProcessEngine([sys.executable, "-c", textwrap.dedent(SERVER)])
    yield found
    found.close()


def call(**body: object) -> Call:
    return Call("POST", "/v1/completions", (("content-type", "application/json"),), json.dumps(body).encode(), b"a=1")


async def messages(engine: ProcessEngine, asked: Call) -> list[Message]:
    return [one async for one in engine.ask(asked, "r0")]


def test_whole_answers_pass_and_their_tokens_are_counted(engine: ProcessEngine) -> None:
    head, *body, tail = asyncio.run(messages(engine, call(prompt="x")))
    assert isinstance(head, Head)
    assert (head.status, head.replica, head.streams) == (200, "r0", False)
    found = json.loads(b"".join(one for one in body if isinstance(one, bytes)))
    assert (found["path"], found["asked"]) == ("/v1/completions?a=1", {"prompt": "x"})
    assert getattr(tail, "completion_tokens", 0) == 7
    engine.check()


def test_streams_and_errors_pass(engine: ProcessEngine) -> None:
    streamed = asyncio.run(collected(engine.ask(call(stream=True), "r0")))
    assert streamed.head.streams
    assert streamed.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert asyncio.run(collected(engine.ask(call(status=429), "r0"))).head.status == 429


def test_events_are_counted_and_not_their_words(engine: ProcessEngine) -> None:
    *_, tail = asyncio.run(messages(engine, call(stream=True, words=True, bytes=3)))
    assert getattr(tail, "completion_tokens", 0) == 3


@pytest.mark.parametrize(
    ("hang", "stuck"), [({}, True), ({"mute": True}, True), ({"steps": True}, False)], ids=["engine", "server", "works"]
)
def test_a_process_that_does_not_go_on_is_not_well(
    hang: dict[str, bool], stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and may even answer, but nothing comes of its requests."""
    monkeypatch.setattr(process_engine, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(process_progress, "_PATIENCE", 0.2)
    monkeypatch.setattr(replica, "STUCK_SECONDS", 1.0)
    engine = ProcessEngine([sys.executable, "-c", textwrap.dedent(SERVER)])

    async def idle() -> None:
        await asyncio.sleep(2.0)
        engine.check()

    try:
        asyncio.run(idle())
        running = engine.ask(call(hang=hang), "r0")

        async def while_it_runs() -> None:
            waiting = asyncio.ensure_future(anext(aiter(running)))
            await asyncio.sleep(2.0)
            try:
                engine.check()
            finally:
                waiting.cancel()

        if stuck:
            with pytest.raises(Unhealthy, match="no step has ended"):
                asyncio.run(while_it_runs())
        else:
            asyncio.run(while_it_runs())
    finally:
        engine._process.kill()
        engine.close()


def test_nobody_is_answered_who_left_before_the_connection_opened(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, asked, closed = threading.Event(), [], threading.Event()

    class Slow(http.client.HTTPConnection):
        def connect(self) -> None:
            opening.wait(10)
            super().connect()

        def request(self, *about: object, **_: object) -> None:
            asked.append(about)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr(http.client, "HTTPConnection", Slow)

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await messages(engine, call())

    asyncio.run(leave())
    opening.set()
    assert closed.wait(10)
    assert asked == []


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "_CLOSE_SECONDS", 0.3)
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    engine = ProcessEngine([sys.executable, "-c", ignoring + textwrap.dedent(SERVER)])
    engine.close()
    assert engine._process.returncode == -9


def test_a_process_that_dies_is_a_lost_replica_and_not_well(engine: ProcessEngine) -> None:
    with pytest.raises(ReplicaLost):
        asyncio.run(collected(engine.ask(call(die=True), "r0")))
    engine._process.wait()
    with pytest.raises(Unhealthy, match="process ended"):
        engine.check()


def test_a_stream_that_is_cut_is_a_lost_replica_too(engine: ProcessEngine) -> None:
    with pytest.raises(ReplicaLost):
        asyncio.run(collected(engine.ask(call(stream=True, cut=1), "r0")))


def test_the_replica_is_told_that_its_process_died_but_not_that_it_was_closed() -> None:
    command = [sys.executable, "-c", textwrap.dedent(SERVER)]
    died = threading.Event()
    dies = ProcessEngine(command, died.set)
    with pytest.raises(ReplicaLost):
        asyncio.run(collected(dies.ask(call(die=True), "r0")))
    assert died.wait(10)
    told = threading.Event()
    closed = ProcessEngine(command, told.set)
    closed.close()
    assert not told.wait(0.5)


def test_the_process_ends_with_the_replica_that_is_killed() -> None:
    code = (
        "import sys, time; from outpace.integrations.ray.process_engine import ProcessEngine; "
        "engine = ProcessEngine([sys.executable, '-c', sys.argv[1]]); print(engine._process.pid, flush=True); "
        "time.sleep(60)"
    )
    replica = subprocess.Popen([sys.executable, "-c", code, textwrap.dedent(SERVER)], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    inner = psutil.Process(int(replica.stdout.readline()))
    replica.kill()
    replica.wait()
    inner.wait(10)


def test_a_command_that_does_not_start_says_why() -> None:
    code = "import sys; print('error: no such model', file=sys.stderr); sys.exit(2)"
    with pytest.raises(BadInput, match="the engine does not start: no such model"):
        ProcessEngine([sys.executable, "-c", code])


def test_a_replica_s_command_leaves_out_what_the_ingress_does() -> None:
    given = ["serve", "--ray", "--model", "m", "--replicas", "1..4", "--port=9000", "--api-keys", "keys", "--head", "h"]
    kept = ["serve", "--model", "m", "--head", "h", "--threads", "2", "--host", "127.0.0.1", "--port", "0"]
    assert replica_command(given, 2)[3:] == kept
    assert replica_command([*given, "--threads", "8"], 2)[3:] == kept
