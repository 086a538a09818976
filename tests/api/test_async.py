"""agenerate and astream: the event loop is free, calls are batched, cancelling leaves the batch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import outpace
from cli_support import Failing, toy
from outpace.core.errors import BadInput
from outpace.engine.decoder import Decoder
from test_shared_decoder import counting, idle


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests every round served."""
    seen: list[int] = []
    honest = Decoder.round

    def spy(self: Decoder, active: Any) -> None:
        seen.append(len(active))
        honest(self, active)

    monkeypatch.setattr(Decoder, "round", spy)
    return seen


def test_concurrent_calls_share_rounds(batches: list[int]) -> None:
    model = toy()
    texts = ["abc", "the end", "x", "why"]
    alone = [model.generate(text, max_new_tokens=40, ignore_eos=True).text for text in texts]
    batches.clear()

    async def ask() -> list[str]:
        found = await asyncio.gather(*(model.agenerate(text, max_new_tokens=40, ignore_eos=True) for text in texts))
        return [one.text for one in found]

    assert asyncio.run(ask()) == alone
    assert max(batches) > 1


def test_batches_and_samples_are_awaited_too() -> None:
    model = toy()

    async def ask() -> None:
        both = await model.agenerate(["abc", "x"], max_new_tokens=5)
        assert [one.text for one in both] == [one.text for one in model.generate(["abc", "x"], max_new_tokens=5)]
        drawn = await outpace.agenerate(model, "abc", n=2, temperature=1.0, max_new_tokens=5)
        assert len({one.seed for one in drawn}) == 2

    asyncio.run(ask())


def test_the_event_loop_is_free_meanwhile() -> None:
    """A round that waits for the event loop would wait for ever if it ran there."""
    model = toy()
    gate = threading.Event()

    def wait(ids: list[int], logits: Any) -> Any:
        assert gate.wait(60)
        return logits

    async def ask() -> str:
        task = asyncio.create_task(model.agenerate("abc", max_new_tokens=3, processors=wait))
        for _ in range(5):
            await asyncio.sleep(0)
        gate.set()
        return (await task).text

    assert asyncio.run(ask()) == model.generate("abc", max_new_tokens=3).text


def test_a_task_that_is_cancelled_leaves_the_batch_and_others_go_on() -> None:
    model, target = counting()

    async def ask() -> str:
        long = asyncio.create_task(model.agenerate("abc", max_new_tokens=3000, ignore_eos=True))
        short = asyncio.create_task(model.agenerate("x", max_new_tokens=60, ignore_eos=True))
        while not model.shared._running:
            await asyncio.sleep(0.001)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return (await short).text

    assert asyncio.run(ask()) == model.generate("x", max_new_tokens=60, ignore_eos=True).text
    idle(model)
    assert target.open_kv == 0


def test_streams_give_the_text_and_then_the_result() -> None:
    model = toy()

    async def read() -> str:
        pieces = model.astream("abc", max_new_tokens=20, ignore_eos=True)
        with pytest.raises(BadInput, match="has not ended"):
            _ = pieces.result
        text = "".join([piece async for piece in pieces])
        assert pieces.result.text == text
        assert [piece async for piece in pieces] == []
        return text

    assert asyncio.run(read()) == model.generate("abc", max_new_tokens=20, ignore_eos=True).text


def test_streams_that_are_closed_dropped_or_cancelled_leave() -> None:
    model, target = counting()

    async def read() -> None:
        closed = model.astream("abc", max_new_tokens=3000, ignore_eos=True)
        await anext(closed)
        await closed.aclose()
        assert [piece async for piece in closed] == []
        assert closed.result.finish_reason == "cancelled"
        never = model.astream("abc")
        await never.aclose()
        assert [piece async for piece in never] == []
        async for _ in model.astream("abc", max_new_tokens=3000, ignore_eos=True):
            break

        async def all_of_it() -> None:
            async for _ in model.astream("abc", max_new_tokens=3000, ignore_eos=True):
                pass

        task = asyncio.create_task(all_of_it())
        while not model.shared._running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read())
    idle(model)
    assert target.open_kv == 0


def test_errors_travel() -> None:
    model = toy()

    async def ask() -> None:
        with pytest.raises(BadInput, match="did you mean 'temperature'"):
            await model.agenerate("abc", temprature=1)  # type: ignore[call-overload]
        with pytest.raises(BadInput, match="Failing"):
            await model.agenerate("abc", max_new_tokens=9, processors=Failing())
        with pytest.raises(BadInput, match=r"prompt \d of 2: logits processor 'Failing'"):
            await model.agenerate(["abc", "x"], max_new_tokens=9, processors=Failing())
        pieces = model.astream("abc", max_new_tokens=9, processors=Failing())
        read = []
        with pytest.raises(BadInput, match="Failing"):
            async for piece in pieces:
                read.append(piece)  # noqa: PERF401 - what came before the error counts
        assert len("".join(read)) == 3
        with pytest.raises(BadInput, match="astream takes one prompt"):
            await anext(model.astream(["abc"]))

    asyncio.run(ask())


def test_several_event_loops_and_threads_share_one_model() -> None:
    model, target = counting()
    expected = model.generate("abc", max_new_tokens=40, ignore_eos=True).text
    found: list[str] = []

    async def ask() -> None:
        both = await asyncio.gather(*(model.agenerate("abc", max_new_tokens=40, ignore_eos=True) for _ in range(2)))
        found.extend(one.text for one in both)

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(3)]
    threads += [
        threading.Thread(target=lambda: found.append(model.generate("abc", max_new_tokens=40, ignore_eos=True).text))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 7
    idle(model)
    assert target.open_kv == 0


def test_an_event_loop_that_is_closed_meanwhile_leaves_nothing_behind() -> None:
    model, target = counting()
    gate = threading.Event()

    def wait(ids: list[int], logits: Any) -> Any:
        gate.wait(60)
        return logits

    async def ask() -> None:
        pieces = model.astream("abc", max_new_tokens=3000, ignore_eos=True, processors=wait)
        kept.append(pieces)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(pieces), 0.05)

    kept: list[Any] = []
    asyncio.run(ask())
    gate.set()
    idle(model)
    assert target.open_kv == 0
