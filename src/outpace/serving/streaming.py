"""Answers on their way to a caller: whole, or as server-sent events. A caller who leaves cancels the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outpace.serving.answers import Answers
from outpace.serving.errors import ApiError
from outpace.serving.jobs import Job, Piece

T = TypeVar("T")
Done = Callable[[int], None]
"""Called once with the status code of the answer, or :data:`GONE`."""
GONE = 499
"""The caller has left before the end."""


class Answering(Response):
    """Waits for a job while it listens for the caller's leaving.

    ``done`` is called at the end; ``failed`` turns an error into what the caller is told of it.
    """

    def __init__(
        self,
        job: Job,
        answers: Answers,
        done: Done,
        failed: Callable[[BaseException], ApiError],
        *,
        usage: bool = False,
    ) -> None:
        super().__init__()
        self.job, self.answers, self._done, self._failed, self._usage = job, answers, done, failed, usage
        self._about = {"X-Request-Id": job.id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = GONE
        try:
            answered = await until_gone(receive, self._answer(scope, receive, send))
            status = GONE if answered is None else answered
        except asyncio.CancelledError:
            pass  # the server ends, and the caller has not read its answer: the connection is closed
        finally:
            self._done(status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Send everything. Returns the status code."""
        try:
            await self.job.wait()
            # Log-probabilities of a long answer are megabytes of JSON, which must not hold up everybody's streams.
            large = any(one.logprobs for one in self.job.generations)
            response: Response = await asyncio.to_thread(self._whole) if large else self._whole()
            status = 200
        except Exception as error:
            self.job.cancel()
            known = self._failed(error)
            response, status = error_response(known, self._about), known.status
        await response(scope, receive, send)
        return status

    def _whole(self) -> Response:
        return Response(to_json(self.answers.whole()), headers=self._about, media_type="application/json")


class Streaming(Answering):
    """The same as server-sent events. What fails before the first piece has its own status code; later, an event."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        pieces = self.job.pieces()
        try:
            first = await anext(pieces)
        except Exception as error:
            self.job.cancel()
            known = self._failed(error)
            await error_response(known, self._about)(scope, receive, send)
            return known.status
        about = {**self._about, "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        about["X-Accel-Buffering"] = "no"  # a proxy such as nginx passes each event on at once
        headers = [(key.lower().encode(), value.encode()) for key, value in about.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        status = 200
        try:
            async for event in self._events(first, pieces):
                await _send(send, event)
        except OSError:  # the connection is broken
            raise
        except Exception as error:
            self.job.cancel()
            known = self._failed(error)
            status = known.status
            await _send(send, known.body)
        await _send(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return status

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[dict[str, Any]]:
        for chunk in self.answers.begin():
            yield chunk
        for chunk in self.answers.chunks(first):
            yield chunk
        async for piece in pieces:
            for chunk in self.answers.chunks(piece):
                yield chunk
        if self._usage:
            yield self.answers.usage_chunk()


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as an answer."""
    return JSONResponse(error.body, error.status, {**(headers or {}), **error.headers})


async def _send(send: Send, event: dict[str, Any] | str) -> None:
    data = event.encode() if isinstance(event, str) else to_json(event)  # json.dumps takes several times as long
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def until_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of ``work``, or None, and ``work`` is ended, where the caller leaves before. The body must have been
    received."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for one in (working, leaving):
            one.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
