"""A replica that dies: what was not begun is answered by another, what was begun ends with an error in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from outpace.integrations.ray.messages import Head, Message, Tail
from outpace.integrations.ray.replay import ATTEMPTS, ReplicasLost, StreamBroken, replayed
from ray_support import STREAM, WHOLE, scripted

END = Tail(3)


def played(*replies: AsyncGenerator[Message, None]) -> tuple[list[Message], int, BaseException | None]:
    """What is passed on of a call whose attempts have these replies, how often it was repeated, and its error."""
    waiting = list(replies)
    got: list[Message] = []
    again = 0

    def count() -> None:
        nonlocal again
        again += 1

    async def run() -> None:
        async for message in replayed(lambda: waiting.pop(0), count):
            got.append(message)  # noqa: PERF401 - what came before an error counts

    error: BaseException | None = None
    try:
        asyncio.run(run())
    except Exception as raised:
        error = raised
    return got, again, error


def test_a_reply_passes_as_it_is() -> None:
    for headers in (STREAM, WHOLE):
        messages: list[Message] = [Head(200, headers, "a"), b"1", b"2", END]
        assert played(scripted(*messages)) == (messages, 0, None)


def test_a_whole_answer_is_replayed_however_much_of_it_had_come() -> None:
    good: list[Message] = [Head(200, WHOLE, "b"), b"answer", END]
    for before in ([], [Head(200, WHOLE, "a")], [Head(200, WHOLE, "a"), b"ans"]):
        assert played(scripted(*before, dies=True), scripted(*good)) == (good, 1, None)


def test_a_stream_is_replayed_until_its_first_event_was_sent() -> None:
    good: list[Message] = [Head(200, STREAM, "b"), b"data: 1", END]
    for before in ([], [Head(200, STREAM, "a")]):
        assert played(scripted(*before, dies=True), scripted(*good)) == (good, 1, None)


def test_a_stream_that_had_begun_is_not_begun_again() -> None:
    begun: list[Message] = [Head(200, STREAM, "a"), b"data: 1"]
    got, again, error = played(scripted(*begun, dies=True), scripted(Head(200, STREAM, "b"), END))
    assert (got, again) == (begun, 0)
    assert isinstance(error, StreamBroken)
    assert error.body["error"]["code"] == "replica_died"


def test_a_reply_without_an_end_counts_as_lost() -> None:
    good: list[Message] = [Head(200, WHOLE, "b"), b"x", END]
    assert played(scripted(Head(200, WHOLE, "a"), b"x"), scripted(*good)) == (good, 1, None)
    _, _, error = played(scripted(Head(200, STREAM, "a"), b"data: 1"))
    assert isinstance(error, StreamBroken)


def test_a_request_that_brings_down_its_replicas_is_given_up() -> None:
    got, again, error = played(*(scripted(dies=True) for _ in range(ATTEMPTS + 1)))
    assert (got, again) == ([], ATTEMPTS - 1)
    assert isinstance(error, ReplicasLost)
    assert error.status == 503


def test_another_error_is_not_replayed() -> None:
    async def fails() -> AsyncGenerator[Message, None]:
        yield Head(200, WHOLE, "a")
        raise ValueError("a defect")

    got, again, error = played(fails())
    assert (got, again) == ([], 0)
    assert isinstance(error, ValueError)


def test_the_reply_is_closed_when_its_reader_leaves() -> None:
    closed = []

    async def endless() -> AsyncGenerator[Message, None]:
        try:
            yield Head(200, STREAM, "a")
            while True:
                yield b"data"
        finally:
            closed.append(True)

    async def run() -> None:
        messages = replayed(endless)
        await anext(messages)
        await messages.aclose()

    asyncio.run(run())
    assert closed == [True]
