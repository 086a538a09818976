"""vLLM's server as a process: started, awaited, told to end, and what it said where it failed.

with running_server("smollm2", dtype="float32") as url:
    ...  # OpenAI's API at url + "/v1"
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import IO, Any

from outpace.core.child_process import ending_with_parent
from outpace.core.errors import BadInput, OutpaceError, shortened
from outpace.core.loopback import urlopen
from outpace.core.progress import stage
from outpace.integrations.vllm.command import Launch, ServerOptions, launch
from outpace.integrations.vllm.interpreter import find_interpreter
from outpace.integrations.vllm.proposer_options import ProposerOptions
from outpace.integrations.vllm.speculative_config import Speculation

PATIENCE = 1800.0
"""Seconds in which a server must become ready: a large model is read, and kernels are compiled."""
FAREWELL = 15.0
"""Seconds in which a server that was told to end, and may no longer finish its answers, must have ended: it can wait
for clients whose answers it has cut."""
_LOOK = 0.25  # seconds between two looks whether it is ready
_KEPT = 400  # lines of its log that are kept, for what it says when it fails
_CAUSE = re.compile(r"(?:\([^)]*\)\s*)?(?:\S+ERROR\S*\s.*?\]\s*)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b: .+)")


class EngineFailed(OutpaceError):
    """The server ended, or did not become ready. The message is one line and holds the cause as vLLM gave it."""


def free_port(host: str, port: int) -> int:
    """``port``, or a free one for 0. Raises BadInput where somebody listens on it, or the address is not ours."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            return int(found.getsockname()[1])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port") from None


class Server:
    """A started server. ``echo``: where its log goes from when it is ready; None keeps it to itself."""

    def __init__(self, start: Launch, echo: IO[str] | None = None) -> None:
        """Start it. Raises EngineFailed where the interpreter does not start."""
        self.launch = start
        host = start.options.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{start.options.port}"
        self._echo: IO[str] | None = None
        self._later = echo
        self._lines: deque[str] = deque(maxlen=_KEPT)
        program = start.command[0]
        try:
            Path(program).stat()
            self._process = subprocess.Popen(
                ending_with_parent(start.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=start.environment,
                start_new_session=True,  # Ctrl-C reaches us alone; what vLLM starts ends with it
            )
        except OSError as error:
            raise EngineFailed(f"cannot start {program}: {error.strerror}") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._lines)

    def wait_until_ready(self, patience: float = PATIENCE) -> None:
        """Return when it answers requests. Raises EngineFailed where it ends before, or does not become ready."""
        until = monotonic() + patience
        with stage("starting vLLM") as at:
            while not self._answers():
                if self._process.poll() is not None:
                    raise EngineFailed(f"vLLM {self._ended()} before it was ready{self._cause()}")
                if monotonic() > until:
                    self.kill()
                    raise EngineFailed(f"vLLM was not ready within {patience:g} s{self._cause()}")
                at.move(detail=shortened(self._lines[-1], 100) if self._lines else "")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LOOK)
        self._echo = self._later

    def wait(self) -> int:
        """Return its exit code when it has ended."""
        code = self._process.wait()
        self._reader.join(1.0)
        return code

    def end(self) -> None:
        """Tell it to finish; running answers are still sent, for ``--shutdown-timeout`` seconds."""
        with contextlib.suppress(OSError):
            self._process.terminate()

    def strike(self) -> None:
        """End it and what it started, now; does not wait, so that a signal's handler may call it."""
        with contextlib.suppress(OSError, AttributeError):  # gone already, or a system without process groups
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.kill()

    def kill(self) -> None:
        """End it and what it started, and return when it has ended."""
        self.strike()
        self._process.wait()

    def close(self, patience: float | None = None) -> None:
        """End it, orderly if it does so within ``patience``; None: while it may finish its answers."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.launch.drain_seconds + FAREWELL if patience is None else patience)
        self.kill()

    def failure(self, code: int) -> EngineFailed:
        """Why it ended, where nobody told it to."""
        return EngineFailed(f"vLLM {self._ended(code)}{self._cause()}")

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", 5, ours=True) as reply:
                return bool(reply.status == 200)
        except (OSError, ValueError):  # not listening yet, or not ready
            return False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            if self._echo is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._echo.write(line)
                    self._echo.flush()

    def _ended(self, code: int | None = None) -> str:
        code = self._process.poll() if code is None else code
        return f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def _cause(self) -> str:
        """The first error of its log: what follows it are the errors of those who waited for it."""
        self._reader.join(1.0)
        lines = [line for line in self._lines if line.strip()]
        for line in lines:
            found = _CAUSE.search(line)
            if found is not None:
                return f": {shortened(found[1])}"
        return f": {shortened(lines[-1])}" if lines else ""


def serve(start: Launch) -> int:
    """Serve until SIGTERM or Ctrl-C, and return the exit code: 0, or 130 where a second signal ended it at once.

    The first signal lets vLLM finish its answers, for ``drain_seconds``. Prints ``ready: URL`` on standard error, and
    vLLM's log from then on. Raises EngineFailed where vLLM fails.
    """
    told: list[int] = []
    with _signals(told) as wake:
        server = Server(start, echo=sys.stderr)
        wake(server)
        if told:  # while it was being started
            server.end()
        try:
            try:
                server.wait_until_ready()
                print(f"ready: {server.url}", file=sys.stderr, flush=True)
            except EngineFailed:
                if not told:
                    raise
            code = server.wait()
            if not told:
                raise server.failure(code)
        finally:
            server.close(0.0 if len(told) > 1 else None)
    return 130 if len(told) > 1 else 0


@contextlib.contextmanager
def _signals(told: list[int]) -> Iterator[Any]:
    """SIGINT and SIGTERM are passed on to the server as SIGTERM; a second one ends it at once, as does time. ``told``
    lists them."""
    servers: list[Server] = []
    timers: list[threading.Timer] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        for one in servers:
            if len(told) > 1:
                one.strike()
                continue
            one.end()
            timers.append(timer := threading.Timer(one.launch.drain_seconds + FAREWELL, one.strike))
            timer.daemon = True
            timer.start()

    if threading.current_thread() is not threading.main_thread():
        yield servers.append
        return
    before = {one: signal.signal(one, pass_on) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield servers.append
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for timer in timers:
            timer.cancel()


@contextlib.contextmanager
def running_server(
    model: str,
    speculative_config: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float32",
    port: int = 0,
    name: str | None = None,
    python: str | None = None,
    proposer: ProposerOptions | None = None,
    max_model_len: int | None = 1024,
    max_num_seqs: int | None = 4,
    kv_bytes: int | None = 2**28,
    threads: int | None = None,
    plugin: bool = True,
    variables: Mapping[str, str] | None = None,
    further: tuple[str, ...] = (),
    eager: bool = True,
    patience: float = PATIENCE,
) -> Iterator[str]:
    """A server that runs as long as the context; yields its URL, without ``/v1``.

    ``model``: an embedded model, folder, GGUF file (converted to ``dtype``) or hub id; requests call it ``name``, by
    default ``model``. ``speculative_config``: vLLM's own; None does not speculate. ``proposer``: what the plug-in is
    told, for ``custom_class``. ``plugin``: False starts vLLM without outpace's plug-in, and so without its override.
    ``eager``: without compiling the model, which takes a minute or more at each start; a server whose speed is measured
    is compiled. ``python``: as --vllm-python. Raises BadInput for what cannot be started, EngineFailed where it does
    not start.
    """
    from outpace.bench.peers.weights import find

    interpreter = find_interpreter(python)
    found = find(model, dtype)
    speculation = Speculation("", dict(speculative_config) if speculative_config else None, proposer)
    options = ServerOptions(
        found.folder,
        name or model,
        dtype,
        port=free_port("127.0.0.1", port),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_bytes=kv_bytes,
        threads=threads,
        offline=found.local,
        further=(*further, *(("--enforce-eager",) if eager else ())),
    )
    start = launch(speculation, options, interpreter)
    if not plugin:
        start.variables.pop("PYTHONPATH")
    start.variables.update(variables or {})
    server = Server(start)
    try:
        server.wait_until_ready(patience)
        yield server.url
    finally:
        server.close()
