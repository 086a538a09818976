"""Job: one call of the API on its way through the decoder, as one or several requests; its pieces arrive on the event
loop.

The decoding thread only puts pieces into a queue. A reader who is slow lets them collect there, at most as much as the
answers are long; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outpace.core.metrics import RequestMetrics, total
from outpace.engine.request import Generation, Logprob, Request
from outpace.engine.shared_decoder import SharedDecoder, Ticket
from outpace.serving.metrics import Metrics, RequestWatch


@dataclass(frozen=True, slots=True)
class Piece:
    """What a round gave to one choice: text that was released, and the tokens (the text of some may come later)."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: str | None = None
    """Set in a choice's last piece."""


@dataclass(slots=True)
class Job:
    """``requests``: one for each choice, in order. Made on the event loop that reads it."""

    id: str
    model: str
    requests: Seq[Request]
    decoder: SharedDecoder
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    tickets: list[Ticket] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _pieces: asyncio.Queue[tuple[int, Piece | None]] = field(default_factory=asyncio.Queue)

    def start(self) -> None:
        """Submit the requests. Raises QueueFull and Closed."""
        listeners = [
            partial(_listen, self._loop, self._pieces, _Reader(index, RequestWatch(self.metrics, self.model)))
            for index in range(len(self.requests))
        ]
        self.tickets = self.decoder.submit(list(zip(self.requests, listeners, strict=True)))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every choice's pieces as they come. Raises what ended a choice, if that was an error."""
        left = len(self.requests)
        while left:
            index, piece = await self._pieces.get()
            if piece is None:
                self.tickets[index].finished()
                left -= 1
            else:
                yield piece

    async def wait(self) -> None:
        """Until every choice has ended. Raises as :meth:`pieces` does."""
        async for _ in self.pieces():
            pass

    def cancel(self) -> None:
        """Let what has not ended leave before the next round."""
        for ticket in self.tickets:
            ticket.cancel()

    @property
    def generations(self) -> list[Generation]:
        """Those whose turn has come."""
        return [one.generation for one in self.tickets if one.generation is not None]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once, however many choices it has."""
        return sum({id(one.prompt): len(one.prompt) for one in self.requests}.values())

    @property
    def counted(self) -> RequestMetrics:
        """The counters of all choices."""
        return total(one.metrics for one in self.generations)

    def timelines(self) -> list[list[dict[str, Any]]]:
        """What has happened to each choice, in milliseconds after its arrival."""
        return [[{"event": event, "ms": round(1e3 * at, 3)} for event, at in one.timeline] for one in self.tickets]


class _Reader:
    """What of one choice has been handed on; on the decoding thread alone."""

    def __init__(self, index: int, watch: RequestWatch) -> None:
        self.index, self.watch = index, watch
        self.tokens = self.logprobs = 0

    def read(self, ticket: Ticket, text: str) -> Piece | None:
        """The piece of this round; None where there is nothing new."""
        one = ticket.generation
        assert one is not None
        tokens, logprobs = tuple(one.tokens[self.tokens :]), tuple(one.logprobs[self.logprobs :])
        self.tokens += len(tokens)
        self.logprobs += len(logprobs)
        if not (text or tokens or logprobs or one.finish_reason):
            return None
        return Piece(self.index, text, tokens, logprobs, one.finish_reason)


def _listen(
    loop: asyncio.AbstractEventLoop,
    pieces: asyncio.Queue[tuple[int, Piece | None]],
    reader: _Reader,
    ticket: Ticket,
    text: str | None,
) -> None:
    """The listener of one choice."""
    put: Callable[[tuple[int, Piece | None]], None] = pieces.put_nowait
    if text is None:
        reader.watch.end(ticket)
        loop.call_soon_threadsafe(put, (reader.index, None))
        return
    reader.watch.event(ticket)
    if (piece := reader.read(ticket, text)) is not None:
        loop.call_soon_threadsafe(put, (reader.index, piece))
