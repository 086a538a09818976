"""Job: one call of the API on its way through the decoder, as one or several requests; its pieces arrive on the event
loop.

The decoding thread only puts pieces into a queue. A reader who is slow lets them collect there, at most as much as the
answers are long; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from outpace.core.metrics import RequestMetrics, total
from outpace.engine.populations.answers import Answer, answer_tokens, answers
from outpace.engine.request import Generation, Logprob, Request, TokenSource
from outpace.engine.shared_decoder import SharedDecoder, Ticket
from outpace.serving.metrics import Metrics, RequestWatch


@dataclass(frozen=True, slots=True)
class Piece:
    """What a round gave to one choice: text that was released, and the tokens (the text of some may come later)."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    sources: tuple[TokenSource, ...] = ()
    """One for each of ``tokens``, if the request asks for them."""
    finish_reason: str | None = None
    """Set in a choice's last piece."""


Timeline = tuple[tuple[str, float], ...]
"""Events of one choice, and the seconds after its arrival."""
Pieces = asyncio.Queue[tuple[int, Piece | None]]


class Mail:
    """From the decoding threads to the jobs of one event loop, which is woken once for all that a round gave."""

    _known: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Mail]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._posted: deque[tuple[Pieces, tuple[int, Piece | None]]] = deque()
        self._woken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Mail:
        """That of an event loop; called on it."""
        found = cls._known.get(loop)
        if found is None:
            found = cls._known[loop] = cls(loop)
        return found

    def post(self, to: Pieces, item: tuple[int, Piece | None]) -> None:
        """From any thread. Raises RuntimeError where the event loop is closed."""
        self._posted.append((to, item))
        if not self._woken:
            loop = self._loop()
            if loop is None:
                raise RuntimeError("the event loop is gone")
            self._woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from now on wakes the loop again
        while self._posted:
            to, item = self._posted.popleft()
            to.put_nowait(item)


@dataclass(slots=True)
class Job:
    """``requests``: one for each choice, in order. Made on the event loop that reads it."""

    id: str
    model: str
    requests: Seq[Request]
    decoder: SharedDecoder
    metrics: Metrics
    n: int = 1
    """Choices of each request that has beams."""
    created: int = field(default_factory=lambda: int(time.time()))
    tickets: list[Ticket] = field(default_factory=list)
    _mail: Mail = field(default_factory=lambda: Mail.of(asyncio.get_running_loop()))
    _pieces: Pieces = field(default_factory=asyncio.Queue)

    def start(self) -> None:
        """Submit the requests. Raises QueueFull and Closed."""
        listeners = [
            partial(_listen, self._mail, self._pieces, _Reader(index, RequestWatch(self.metrics, self.model)))
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
    def answers(self) -> list[tuple[int, Generation | Answer]]:
        """The choices, of requests with beams the best of these, each with its number. A prompt has the numbers of
        ``n`` choices, also where it has fewer beams."""
        found: list[tuple[int, Generation | Answer]] = []
        for at, one in enumerate(self.generations):
            if one.request.beams is None:
                found.append((at, one))
            else:
                found.extend(enumerate(answers(one, self.decoder.tokenizer, self.n), at * self.n))
        return found

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices, without making their texts."""
        found = 0
        for one in self.generations:
            if one.request.beams is None:
                found += len(one.tokens)
            else:
                found += sum(len(answer_tokens(one.request, each)) for each in one.hypotheses[: self.n])
        return found

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once, however many choices it has."""
        return sum({id(one.prompt): len(one.prompt) for one in self.requests}.values())

    @property
    def counted(self) -> RequestMetrics:
        """The counters of all choices."""
        return total(one.metrics for one in self.generations)

    def timelines(self) -> list[Timeline]:
        """What has happened to each choice."""
        return [tuple(one.timeline) for one in self.tickets]


def shown(timelines: Iterable[Timeline]) -> list[list[dict[str, Any]]]:
    """Timelines as a caller gets them, in milliseconds after the arrival."""
    return [[{"event": event, "ms": round(1e3 * at, 3)} for event, at in one] for one in timelines]


class _Reader:
    """What of one choice has been handed on; on the decoding thread alone."""

    def __init__(self, index: int, watch: RequestWatch) -> None:
        self.index, self.watch = index, watch
        self.tokens = self.logprobs = 0

    def read(self, ticket: Ticket, text: str) -> Piece | None:
        """The piece of this round; None where there is nothing new. That a request failed is told by its error."""
        one = ticket.generation
        assert one is not None
        tokens, logprobs = tuple(one.tokens[self.tokens :]), tuple(one.logprobs[self.logprobs :])
        sources = tuple(one.sources[self.tokens :])
        self.tokens += len(tokens)
        self.logprobs += len(logprobs)
        reason = one.finish_reason if one.error is None else None
        if not (text or tokens or logprobs or reason):
            return None
        return Piece(self.index, text, tokens, logprobs, sources, reason)


def _listen(mail: Mail, pieces: Pieces, reader: _Reader, ticket: Ticket, text: str | None) -> None:
    """The listener of one choice."""
    if text is None:
        reader.watch.end(ticket)
        mail.post(pieces, (reader.index, None))
        return
    reader.watch.event(ticket)
    if (piece := reader.read(ticket, text)) is not None:
        mail.post(pieces, (reader.index, piece))
