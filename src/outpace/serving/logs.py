"""The server's log: one JSON object a line, on standard error. Prompts and answers are in it only if asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any


class Log:
    """``requests``: a line for each request; ``texts``: with its prompt and answer. Failures are always written."""

    def __init__(
        self, requests: bool = False, texts: bool = False, write: Callable[[str], object] | None = None
    ) -> None:
        self.requests, self.texts = requests, texts
        self._write = write or _to_stderr

    def request(self, **fields: Any) -> None:
        """One request has ended, or was refused."""
        if self.requests:
            self._line("info", "request", fields)

    def failure(self, event: str, error: BaseException) -> None:
        """A defect, or the machine's fault."""
        self._line("error", event, {"error": type(error).__name__, "message": str(error)})

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
