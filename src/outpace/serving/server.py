"""Running the application: a socket, uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from outpace.core.errors import BadInput
from outpace.serving.connection import bounded, most_connections
from outpace.serving.logs import Log
from outpace.serving.tls import Certificate

LAST_BYTES = 10
"""Seconds in which answers that are complete may still be sent when the server ends."""

_HINTS = {
    errno.EADDRNOTAVAIL: "--host must be an address of this machine",
    errno.EACCES: "ports below 1024 need privileges; choose a --port above",
}


class Ending(Protocol):
    """What must end in order before a server may: a service, or what stands in front of several."""

    @property
    def log(self) -> Log: ...

    def drain(self) -> object:
        """Take no more requests, and wait for those under way."""
        ...

    def stop(self) -> None:
        """Cancel everything."""
        ...


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises BadInput where the address cannot be used."""
    if not host.strip():
        raise BadInput("--host is empty; give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        found = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"--host {host}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        found.close()
        hint = _HINTS.get(error.errno or 0, "choose another --port")
        raise BadInput(f"cannot listen on {host}, port {port}: {error.strerror}; {hint}") from None
    return found


def check_address(host: str, port: int) -> None:
    """Raise BadInput where :func:`open_socket` would, before anything is loaded."""
    open_socket(host, port).close()


def url(listening: socket.socket, host: str, scheme: str = "http") -> str:
    """Where the server is found."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def run(
    app: ASGIApp,
    service: Ending,
    listening: socket.socket,
    ready: Callable[[], None],
    certificate: Certificate | None = None,
    callers: int = 0,
) -> bool:
    """Serve until SIGTERM or Ctrl-C; then refuse new requests, finish those that there are, and return True.

    ``ready`` is called when requests are answered. A second signal ends it at once; then False is returned.
    ``callers``: requests that may run or wait, for which there must be connections.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=bounded(most_connections(callers)),
        timeout_graceful_shutdown=LAST_BYTES,
        ws="none",
        ssl_certfile=certificate.chain if certificate else None,
        ssl_keyfile=certificate.key if certificate else None,
    )
    server = _Server(config, service, ready)
    theirs, ours = logging.getLogger("uvicorn.error"), OwnLog(service.log)
    theirs.addFilter(ours)
    try:
        server.run(sockets=[listening])
    finally:
        theirs.removeFilter(ours)
    return not server.force_exit


class OwnLog(logging.Filter):
    """Errors of requests stand in this server's log, once and without texts of requests, and not in uvicorn's."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if not self._log.has(error):
            self._log.failure("request failed", error)
        return False


class _Server(uvicorn.Server):
    """uvicorn's, which goes on answering while the decoders drain: so /ready tells that it is ending."""

    def __init__(self, config: uvicorn.Config, service: Ending, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What was loaded stays: looking through it for garbage, now and then, would hold up all streams.
            gc.collect()
            gc.freeze()
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop_signals = (signal.SIGINT, signal.SIGTERM)
        loop = asyncio.get_running_loop()

        def pressed(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._end)

        before = {one: signal.signal(one, pressed) for one in loop_signals}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _end(self) -> None:
        if self._draining is None:
            self._service.log.event("draining")
            self._draining = asyncio.create_task(self._drain())
        else:
            print("ending at once", file=sys.stderr, flush=True)
            self.force_exit = self.should_exit = True
            asyncio.get_running_loop().run_in_executor(None, self._service.stop)

    async def _drain(self) -> None:
        await asyncio.to_thread(self._service.drain)
        self.should_exit = True
