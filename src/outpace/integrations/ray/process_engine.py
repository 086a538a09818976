"""ProcessEngine: a replica that answers with another server's process, such as vLLM's, on this machine.

The command must print ``ready: URL`` on standard error when it accepts requests, as ``outpace serve`` does with every
``--engine``. The process ends with the replica, also where the replica is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from urllib.parse import quote, urlsplit

from outpace.core.child_process import ending_with_parent
from outpace.core.errors import BadInput, shortened
from outpace.integrations.ray.messages import Call, Head, Message, ReplicaLost, Tail
from outpace.integrations.ray.process_progress import LOOK_SECONDS, Progress
from outpace.integrations.ray.replica import Unhealthy

_READY = "ready: "
_KEPT_LINES = 50
_PART_BYTES = 65536
_PASSED_ON = ("content-type", "cache-control", "retry-after", "x-request-id")
_CLOSE_SECONDS = 120.0
_LAST_EVENT = b"data: [DONE]\n\n"
_ENDED = object()


class ProcessEngine:
    """``command``: starts the server. ``died``: called, in a thread, where it ends and nobody told it to.

    Raises BadInput, with the last line that it wrote, where it does not start.
    """

    def __init__(self, command: Sequence[str], died: Callable[[], object] = lambda: None) -> None:
        self._died = died
        self._closing = False
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            ending_with_parent(command), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self._url = self._wait()
        self._progress = Progress(self._url)
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def ask(self, call: Call, replica: str) -> AsyncGenerator[Message, None]:
        """The reply of the server."""
        return self._progress.counted(_replied(self._url, call, replica))

    def check(self) -> None:
        """Raise Unhealthy where the process has ended, or does not go on."""
        if self._process.poll() is not None:
            raise Unhealthy(f"the engine's process ended: {self._last()}")
        self._progress.check()

    def close(self) -> None:
        """End the process; running answers are finished, if that takes no longer than a server may take to end."""
        self._closing = True
        self._closed.set()
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self._progress.look()

    def _wait(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.strip())
            if line.startswith(_READY):
                threading.Thread(target=self._echo, daemon=True).start()
                return line.removeprefix(_READY).strip()
        self._process.wait()
        raise BadInput(f"the engine does not start: {self._last()}")

    def _echo(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.strip())
            print(line, end="", file=sys.stderr, flush=True)
        self._process.wait()
        if not self._closing:
            self._died()

    def _last(self) -> str:
        line = next((line for line in reversed(self._lines) if line), "it wrote nothing")
        return shortened(line.removeprefix("error: "))


async def _replied(url: str, call: Call, replica: str) -> AsyncGenerator[Message, None]:
    """Messages of a reply that a thread reads. A reader who stops closes the connection."""
    loop = asyncio.get_running_loop()
    read: asyncio.Queue[Message | BaseException | object] = asyncio.Queue()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port)

    def put(item: Message | BaseException | object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            loop.call_soon_threadsafe(read.put_nowait, item)

    left = threading.Event()
    threading.Thread(target=_read, args=(connection, call, replica, put, left), daemon=True).start()
    try:
        while (item := await read.get()) is not _ENDED:
            if isinstance(item, BaseException):
                raise ReplicaLost(f"the engine's process: {item}") from item
            assert isinstance(item, Head | bytes | Tail)
            yield item
    finally:
        left.set()
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(2)  # wakes the thread that reads


def _read(
    connection: http.client.HTTPConnection,
    call: Call,
    replica: str,
    put: Callable[[object], None],
    left: threading.Event,
) -> None:
    try:
        connection.connect()
        if left.is_set():  # before there was a connection to close
            return
        path = quote(call.path) + (f"?{call.query.decode('latin-1')}" if call.query else "")
        connection.request(call.method, path, call.body or None, dict(call.headers))
        answer = connection.getresponse()
        headers = tuple((name, value) for name, value in answer.getheaders() if name.lower() in _PASSED_ON)
        head = Head(answer.status, headers, replica)
        put(head)
        events, whole, line = 0, b"", b""
        while part := answer.read1(_PART_BYTES):
            put(part)
            *lines, line = (line + part).split(b"\n")
            events += sum(one.startswith(b"data:") and one.strip() != _LAST_EVENT.strip() for one in lines)
            whole = (whole + part)[-len(_LAST_EVENT) :] if head.streams else whole + part
        if head.streams and whole != _LAST_EVENT:  # without a length, a cut body looks like a whole one
            put(ConnectionError("the stream was cut"))
        else:
            put(Tail(events if head.streams else _tokens(whole)))
    except Exception as error:
        put(error)
    finally:
        connection.close()
        put(_ENDED)


def _tokens(body: bytes) -> int:
    """Tokens of a whole answer, its prompt included, by the server's ``usage``; of a stream, its events are counted."""
    try:
        total = json.loads(body)["usage"]["total_tokens"]
    except (ValueError, KeyError, TypeError):
        return 0
    return total if isinstance(total, int) else 0


_OF_THE_INGRESS = ("--ray", "--log-requests")
_OF_THE_INGRESS_WITH_VALUES = (
    *("--replicas", "--host", "--port", "--api-keys", "--cors-origin", "--ssl-certfile", "--ssl-keyfile"),
    *("--max-queue", "--max-request-bytes", "--time-limit"),
)


def replica_command(arguments: Sequence[str], threads: int) -> list[str]:
    """What one replica runs on ``threads`` CPUs, from the arguments of ``outpace serve --ray``: those of the ingress
    are left out."""
    kept: list[str] = []
    skip = False
    for one in arguments:
        name = one.partition("=")[0]
        if skip:
            skip = False
        elif name in (*_OF_THE_INGRESS_WITH_VALUES, "--threads"):
            skip = "=" not in one
        elif name not in _OF_THE_INGRESS:
            kept.append(one)
    return [sys.executable, "-m", "outpace", *kept, "--threads", str(threads), "--host", "127.0.0.1", "--port", "0"]
