"""The server's log: one JSON object a line, on standard error. Prompts and answers are in it only if asked for."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outpace.core.errors import OutpaceError, out_of_memory

_FRAMES = 16
"""Of a defect's stack, the innermost."""
_TOLD = "_written_to_the_log"
"""An attribute of errors that were."""


class Log:
    """``requests``: a line for each request; ``texts``: with its prompt and answer. Failures are always written."""

    def __init__(
        self, requests: bool = False, texts: bool = False, write: Callable[[str], object] | None = None
    ) -> None:
        self.requests, self.texts = requests, texts
        self._write = write or _to_stderr

    def request(self, **fields: Any) -> None:
        """One request has ended."""
        if self.requests:
            self._line("info", "request", fields)

    def refusal(self, message: str, **fields: Any) -> None:
        """One request was refused; the message may repeat what was asked, so it counts as text."""
        if self.requests:
            self._line("info", "refused", {**fields, "message": message if self.texts else None})

    def failure(self, event: str, error: BaseException) -> None:
        """A defect, or the machine's fault; with the places in the code, which hold nothing of a request.

        Messages may repeat what was asked, unless the system or the interpreter has written them.
        """
        error.__dict__[_TOLD] = True
        shown = self.texts or isinstance(error, OSError | ArithmeticError | OutpaceError) or out_of_memory(error)
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        where = [f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno} {one.name}" for one in frames]
        message = str(error) if shown else None
        self._line("error", event, {"error": type(error).__name__, "message": message, "where": where or None})

    def has(self, error: BaseException) -> bool:
        """Whether this very error was written before."""
        return _TOLD in error.__dict__

    def event(self, event: str, **fields: Any) -> None:
        """Something about the server itself."""
        if self.requests:
            self._line("info", event, fields)

    def _line(self, level: str, event: str, fields: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        shown = {key: value for key, value in fields.items() if value is not None}
        self._write(json.dumps({"time": now, "level": level, "event": event, **shown}, ensure_ascii=False, default=str))


def _to_stderr(line: str) -> None:
    print(line.encode("utf-8", "replace").decode(), file=sys.stderr, flush=True)
