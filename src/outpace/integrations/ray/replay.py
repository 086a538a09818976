"""A reply that outlives its replica: it is asked for again as long as nothing of it has been passed on.

A whole answer is passed on when it is complete, a stream from its first event on. Therefore an answer that is not
streamed never breaks. A greedy stream goes on from another replica; others break after their caller has seen a part.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from outpace.integrations.ray.messages import Head, Message, ReplicaLost, Tail
from outpace.integrations.ray.resumed_stream import ResumedStream
from outpace.serving.errors import ApiError

ATTEMPTS = 3
"""Replicas that one request may lose: what itself brings replicas down must not bring down all of them."""


class StreamBroken(ApiError):
    """A stream's replica died after the caller had seen a part of the answer."""

    def __init__(self) -> None:
        super().__init__(
            "the replica that computed this answer died; what was sent is a part of the answer. Send the request again",
            503,
            code="replica_died",
        )


class ReplicasLost(ApiError):
    """Every replica that tried to answer a request died."""

    def __init__(self, attempts: int) -> None:
        super().__init__(
            f"{attempts} replicas died while they computed this answer; nothing of it was sent",
            503,
            code="replica_died",
            retry_after=5,
        )


async def replayed(
    ask: Callable[[], AsyncGenerator[Message, None]],
    again: Callable[[], object] = lambda: None,
    attempts: int = ATTEMPTS,
    resumed: ResumedStream | None = None,
) -> AsyncGenerator[Message, None]:
    """The messages of the first reply that is complete, of at most ``attempts``; ``again`` is called before another.

    ``resumed``: another replica goes on with the stream where one dies. Raises StreamBroken where a part was passed on
    and cannot be continued, and ReplicasLost where none was.
    """
    begun = False
    for attempt in range(1, attempts + 1):
        try:
            async with aclosing(_held(ask())) as messages:
                rest = resumed.rest(messages) if begun and resumed is not None else messages
                async for message in rest:
                    begun = True
                    if resumed is not None and isinstance(message, bytes):
                        resumed.sent(message)
                    yield message
        except ReplicaLost as error:
            if begun and (resumed is None or attempt == attempts):
                raise StreamBroken from error
            if attempt == attempts:
                raise ReplicasLost(attempts) from error
            again()
        except ValueError as error:
            if begun and attempt > 1:
                raise StreamBroken from error
            raise
        else:
            return


async def _held(messages: AsyncGenerator[Message, None]) -> AsyncGenerator[Message, None]:
    """The same messages: those of a stream as they come, its head with the first event; others when all are there."""
    held: list[Message] = []
    streams = complete = False
    async for message in messages:
        held.append(message)
        if isinstance(message, Head):
            streams = message.streams
            continue
        complete = isinstance(message, Tail)
        if streams or complete:
            for one in held:
                yield one
            held.clear()
    if not complete:
        raise ReplicaLost("the reply has no end")
