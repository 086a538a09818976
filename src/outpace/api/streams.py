"""stream and astream: functions of a model, and its methods of the same names; the iterators that they return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, Unpack

from outpace.api.options import GenerateOptions, with_options
from outpace.api.prompt_forms import Prompt
from outpace.api.requests import LoadedModel, ask_one
from outpace.api.result import Result, result
from outpace.core.errors import BadInput
from outpace.engine.request import Request
from outpace.engine.shared_decoder import SharedDecoder, Ticket


class Stream(Iterator[str]):
    """An answer's text, piece by piece, while it is decoded. See :func:`stream`.

    >>> import outpace
    >>> pieces = outpace.load("smollm2").stream("Tell me a story.")  # doctest: +SKIP
    >>> text = "".join(pieces)                                       # doctest: +SKIP
    >>> pieces.result.metrics["tokens_per_second"]                   # doctest: +SKIP
    """

    def __init__(
        self, decoder: SharedDecoder, request: Request, on_end: Callable[[Ticket], None] | None = None
    ) -> None:
        """``on_end`` is called once, on the decoding thread, before the last piece is handed out."""
        self._pieces = SimpleQueue[str | None]()
        self._ended = False
        [self._ticket] = decoder.submit([(request, partial(_hand_out, self._pieces, on_end))])

    def __next__(self) -> str:
        while not self._ended:
            try:
                piece = self._pieces.get()
            except BaseException:  # Ctrl-C
                self._ticket.cancel()
                raise
            if piece:
                return piece
            if piece is None:
                self._ended = True
                self._ticket.finished()
        raise StopIteration

    def close(self) -> None:
        """Cancel what is left of the answer, and wait until it has left the batch."""
        self._ticket.cancel()
        while not self._ended:
            self._ended = self._pieces.get() is None

    def __del__(self) -> None:
        if hasattr(self, "_ticket"):
            self._ticket.cancel()

    @property
    def result(self) -> Result:
        """The whole answer, after the last piece. Raises BadInput before that."""
        return _whole(self._ticket, self._ended)


class AsyncStream(AsyncIterator[str]):
    """An answer's text, piece by piece, for asyncio. See :func:`astream`.

    >>> import outpace
    >>> async def show(model: outpace.Model) -> None:
    ...     pieces = model.astream("Tell me a story.")
    ...     async for piece in pieces:
    ...         print(piece, end="", flush=True)
    ...     print(pieces.result.metrics["tokens_per_second"])
    """

    def __init__(self, decoder: SharedDecoder, start: Callable[[], Request]) -> None:
        """``start`` makes the request; it runs in another thread, as it may take a while."""
        self._decoder, self._start = decoder, start
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._ticket: Ticket | None = None
        self._ended = False

    async def __anext__(self) -> str:
        if self._ticket is None and not self._ended:
            request = await asyncio.to_thread(self._start)
            listen = partial(_hand_out_later, asyncio.get_running_loop(), self._pieces)
            [self._ticket] = self._decoder.submit([(request, listen)])
        while self._ticket is not None and not self._ended:
            try:
                piece = await self._pieces.get()
            except BaseException:
                self._ticket.cancel()
                self._ended = True
                raise
            if piece:
                return piece
            if piece is None:
                self._ended = True
                self._ticket.finished()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel what is left of the answer, and wait until it has left the batch."""
        if self._ticket is not None and not self._ended:
            self._ticket.cancel()
            while await self._pieces.get() is not None:
                pass
        self._ended = True

    def __del__(self) -> None:
        if getattr(self, "_ticket", None) is not None:
            self._ticket.cancel()  # type: ignore[union-attr]

    @property
    def result(self) -> Result:
        """The whole answer, after the last piece. Raises BadInput before that."""
        return _whole(self._ticket, self._ended)


@with_options
def stream(model: LoadedModel, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
    """Generate the answer to one prompt, and iterate over its text as it is decoded.

    model, prompt: as for :func:`generate`, without batches.

    Returns a :class:`Stream`, an iterator over pieces of text; together they are the text of :func:`generate`. Decoding
    begins at once and goes on in a thread of its own. After the end, ``Stream.result`` has tokens, metrics and seed.
    ``Stream.close()``, or dropping it, cancels the rest.

    Raises BadInput as :func:`generate` does; what fails on the way is raised where the text ends.

    >>> import outpace
    >>> for piece in outpace.load("smollm2").stream("Tell me a story."):  # doctest: +SKIP
    ...     print(piece, end="", flush=True)
    """
    return Stream(model.shared, _streamed(model, prompt, options, "stream"))


@with_options
def astream(model: LoadedModel, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
    """Like :func:`stream`, for asyncio: an asynchronous iterator over the text of one answer.

    model, prompt: as for :func:`stream`. Decoding begins with the first piece that is asked for. Cancelling the task
    that iterates, ``await AsyncStream.aclose()``, or dropping it, cancels the rest. Raises BadInput as :func:`stream`
    does, at the first piece.

    >>> import outpace
    >>> async def show(model: outpace.Model) -> None:
    ...     async for piece in model.astream("Tell me a story."):
    ...         print(piece, end="", flush=True)
    """
    return AsyncStream(model.shared, partial(_streamed, model, prompt, options, "astream"))


def _streamed(model: LoadedModel, prompt: Prompt, options: Mapping[str, Any], what: str) -> Request:
    """The request of a stream. Raises BadInput for what has no answer before its end."""
    found = ask_one(model, prompt, options, what)
    if (population := found.population) is not None:
        raise BadInput(
            f"which of the {population.called} is the answer is known at the end, so {what} cannot show it: "
            "use generate"
        )
    return found


def _whole(ticket: Ticket | None, ended: bool) -> Result:
    if ticket is None or not ended:
        raise BadInput("the answer has not ended; read the stream to its end first")
    return result(ticket.finished())


def _hand_out(
    pieces: SimpleQueue[str | None], on_end: Callable[[Ticket], None] | None, ticket: Ticket, piece: str | None
) -> None:
    """The listener of a Stream. It does not know the stream: one that is dropped is cancelled."""
    try:
        if piece is None and on_end is not None:
            on_end(ticket)
    finally:
        pieces.put(piece)


def _hand_out_later(
    loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[str | None], ticket: Ticket, piece: str | None
) -> None:
    """The listener of an AsyncStream."""
    loop.call_soon_threadsafe(pieces.put_nowait, piece)
