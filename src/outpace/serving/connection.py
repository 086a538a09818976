"""Connection: uvicorn's, with a bound on how many are open, and on the head of a request: its time and its length.

A request's key and body are checked by the guard, which sees it when its head is there. Before that uvicorn waits for
ever, for a caller who sends nothing as for one who sends a byte now and then.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outpace.serving.errors import ApiError

HEAD_SECONDS = 10.0
"""In which the head of a request must have come, counted from the connection, or from its own first byte."""
HEAD_BYTES = 64 << 10
"""Length of a head."""
REFUSED_SECONDS = 1.0
"""In which a caller who is refused may read why."""
TOLD = 32
"""Callers beyond the bound who are told why they are refused, at once."""
FEWEST = 1000
"""Connections that may be open, whatever may wait."""
_FILES = 128
"""Of the files that a process may open, those that are left for everything else."""


def most_connections(callers: int) -> int:
    """How many connections may be open, where so many requests may run or wait: as many again may be idle."""
    return max(1, min(max(FEWEST, 2 * callers), _open_files() - _FILES))


def _open_files() -> int:
    """The files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return 1 << 20
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] % (1 << 62)  # RLIM_INFINITY is -1


class Connection(HttpToolsProtocol):
    """One connection."""

    most = FEWEST
    """Connections that may be open."""
    _deadline: asyncio.TimerHandle | None = None
    """Of the head that is awaited, or has begun; uvicorn has one of its own for the time after an answer."""
    _in_head = _refused = False
    _head = 0
    """Bytes of a head that has not come whole."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self.most
        if beyond > TOLD:
            self._refused = True
            transport.close()
        elif beyond > 0:
            message = f"{self.most} connections are open, which is the limit"
            self._refuse(ApiError(message, 503, code="too_many_connections", retry_after=1))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._head = self._head + len(data) if self._in_head else 0
        if self.transport.is_closing():
            return
        if self._head > HEAD_BYTES:
            self._refuse(ApiError(f"the head of a request may have {HEAD_BYTES:,} bytes at most", 431))
        elif self._answering and not self._in_head:
            self._stop_waiting()
        elif self._deadline is None:
            self._await_head()

    @property
    def _answering(self) -> bool:
        """Whether the body of a request is being read, or its answer sent."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        if self._in_head:
            self._refuse(ApiError(f"the head of the request did not come within {HEAD_SECONDS:g} s", 408))
        else:  # browsers open connections that they may not need
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close. What comes after that is dropped for a moment: of a connection that is closed before it
        was read to its end the caller may not see the answer."""
        self._stop_waiting()
        self._refused = True
        if self._answering:  # the head is that of a further request: the answer of the one before is cut
            self.transport.close()
            return
        body = json.dumps(error.body).encode()
        about = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**about, **error.headers}.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self.loop.call_later(REFUSED_SECONDS, self.transport.close)


def bounded(most: int) -> type[Connection]:
    """Connections of a server that has ``most`` at once."""

    class Bounded(Connection):
        pass

    Bounded.most = most
    return Bounded
