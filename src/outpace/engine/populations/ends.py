"""When a sequence of a group has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.core.text import Tokenizer

if TYPE_CHECKING:
    from outpace.engine.request import Request

_TAIL = 16
"""Tokens that are looked at for a stop string, beside one for each of its bytes."""


class Ends:
    """The ends of one request's answers: ``limit`` new tokens, its stop tokens and, with a tokenizer, stop strings."""

    def __init__(self, request: Request, limit: int, tokenizer: Tokenizer | None = None) -> None:
        self.request, self.limit = request, limit
        self._tokenizer = tokenizer
        self._tail = _TAIL + max((len(stop.encode()) for stop in request.stop_strings), default=0)

    def reason(self, tokens: tuple[int, ...]) -> str | None:
        """Why a sequence with these new tokens has ended, as none of its beginnings has; None: it has not."""
        if tokens[-1] in self.request.stop_ids:
            return "stop"
        if self.request.stop_strings and self._tokenizer is not None:
            text = self._tokenizer.decode(tokens[-self._tail :])
            if any(stop in text for stop in self.request.stop_strings):
                return "stop"
        return "length" if len(tokens) >= self.limit else None
