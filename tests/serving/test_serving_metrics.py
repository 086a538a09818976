"""Metrics mean what vLLM's of the same names mean: what counts when, and what of the memory is in use."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.shared_decoder import Ticket
from outpace.serving.metrics import RequestWatch
from outpace.serving.service import Service
from serving_support import chat, client, complete, service
from test_serving_load import Caller, standing_still, until


def value(served: Service, name: str) -> float:
    """One of the model's metrics, by its name without the prefix."""
    found = re.search(rf'^outpace:{name}{{model_name="toy"}} (\S+)$', served.metrics.text().decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def test_a_prompt_counts_when_it_has_been_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served = service()
    seen: list[float] = []
    honest = RequestWatch.event

    def event(self: RequestWatch, ticket: Ticket) -> None:
        honest(self, ticket)
        seen.append(value(served, "prompt_tokens_total"))

    monkeypatch.setattr(RequestWatch, "event", event)
    with client(served) as to:
        prompt = chat(to, max_tokens=40, ignore_eos=True)["usage"]["prompt_tokens"]
    assert len(seen) > 3
    assert seen[1:] == [float(prompt)] * (len(seen) - 1)


def test_a_prompt_that_was_never_read_does_not_count() -> None:
    served = service()
    [offered] = served.offered.values()

    async def leave() -> None:
        caller = Caller(served)
        running = asyncio.create_task(caller.run())
        with standing_still():
            await until(lambda: bool(offered.decoder.running or offered.decoder.waiting))
            caller.left.set()
            await running
        await until(lambda: not offered.decoder.running and not offered.decoder.waiting)

    asyncio.run(leave())
    if value(served, "generation_tokens_total") == 0:
        assert value(served, "prompt_tokens_total") == 0
    assert value(served, "request_prompt_tokens_count") == 1


def test_cached_prompts_are_no_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    served = service(kv_bytes=400_000)
    [offered] = served.offered.values()
    offered.model.target.kv_bytes_per_token = 1000
    offered.decoder.prefixes = PrefixCache(offered.model.target, 200_000)
    offered.decoder._most_cached = 200_000
    used: list[float] = []
    with client(served) as to:
        decoder = offered.decoder
        honest = decoder._advance

        def advance(given: Any) -> Any:
            found = honest(given)
            used.append(value(served, "kv_cache_usage_perc"))
            return found

        monkeypatch.setattr(decoder, "_advance", advance)
        complete(to, prompt="some words " * 8, max_tokens=8)
        asyncio.run(until(lambda: not decoder.running and decoder.kv_bytes == 0))
    assert value(served, "prefix_cache_bytes") > 0
    assert max(used) > 0.1
    assert value(served, "kv_cache_usage_perc") == 0


def test_the_times_of_a_request_add_up() -> None:
    served = service()
    with client(served) as to:
        chat(to, max_tokens=40, ignore_eos=True)
    time = {
        name: value(served, f"{name}_seconds_sum")
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "time_to_first_token",
            "e2e_request_latency",
        )
    }
    assert all(one > 0 for one in time.values())
    queue, prefill, decode, whole, first, everything = time.values()
    assert queue + prefill == pytest.approx(first)
    assert prefill + decode == pytest.approx(whole)
    assert first + decode <= everything
