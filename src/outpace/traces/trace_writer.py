"""Where traces are written: all at once, or line by line while a server runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import IO

from outpace.core.errors import BadInput
from outpace.core.files import is_special, write_atomically
from outpace.engine.shared_decoder import Ticket
from outpace.models.base import ChatTokenizer
from outpace.traces.trace_format import TracedRequest, TraceHeader, line
from outpace.traces.trace_records import PrefixHashes, of_generation, traced_name


def write_trace(path: Path, header: TraceHeader, requests: Iterable[TracedRequest]) -> None:
    """Write a whole trace, or leave what was there before. Raises BadInput where it cannot be written."""
    content = "".join([line(header.public()), *(line(one.public()) for one in requests)])
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None


class TraceLog:
    """A trace that grows by a line with each request that ends. Safe for threads.

    A file that is there already is never written over: it holds somebody's traffic. Close it.
    """

    def __init__(self, path: Path, header: TraceHeader, tokenizer: ChatTokenizer | None = None) -> None:
        """``tokenizer``: texts are written, too. Raises BadInput where the file is not new or cannot be written."""
        self._path, self._tokenizer = path, tokenizer
        self._hashes, self._began = PrefixHashes(), perf_counter()
        self._writing = Lock()
        check_new(path)
        try:
            self._file: IO[str] | None = path.open("w" if is_special(path) else "x", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror or error}") from None
        self._write(line(header.public()))

    def ended(self, request_id: str, ticket: Ticket) -> None:
        """A request has ended, or was withdrawn before it was admitted."""
        arrival = max(0.0, ticket.arrived - self._began)
        one, request = ticket.generation, ticket.request
        if one is None:
            traced = TracedRequest(
                request_id, traced_name(request.method), len(request.prompt), 0, arrival=arrival, finish="refused"
            )
        else:
            # A generation's own clock starts when it is admitted.
            waited = max(0.0, one.started - ticket.arrived)
            times = {"first_token": waited + one.metrics.first_token_seconds, "seconds": waited + one.metrics.seconds}
            answered = times if one.metrics.answered else {}
            texts = {} if self._tokenizer is None else self._texts(self._tokenizer, ticket)
            traced = of_generation(one, self._hashes, id=request_id, arrival=arrival, **answered, **texts)
        self._write(line(traced.public()))

    def close(self) -> None:
        """No more requests are written."""
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None

    @staticmethod
    def _texts(tokenizer: ChatTokenizer, ticket: Ticket) -> dict[str, str]:
        assert ticket.generation is not None
        return {"prompt": tokenizer.decode(ticket.request.prompt), "answer": ticket.generation.text}

    def _write(self, text: str) -> None:
        with self._writing:
            if self._file is not None:
                self._file.write(text)
                self._file.flush()


def check_new(path: Path) -> None:
    """Raise BadInput where there is a file, or no folder for one."""
    if is_special(path):
        return
    if path.exists():
        raise BadInput(f"--trace {path}: the file exists already, and a trace is not written over; name another")
    if not path.parent.is_dir():
        raise BadInput(f"--trace {path}: there is no folder {path.parent}")
