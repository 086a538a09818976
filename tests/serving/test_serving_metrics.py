"""Metrics mean what vLLM's of the same names mean: what counts when, and what of the memory is in use."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.shared_decoder import Ticket
from outpace.serving.metrics import RequestWatch, read_bounds
from outpace.serving.offered import Defaults
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


def caching() -> Service:
    """A service whose model keeps beginnings of prompts."""
    served = service(kv_bytes=400_000)
    [offered] = served.offered.values()
    offered.model.target.kv_bytes_per_token = 1000
    offered.decoder.prefixes = PrefixCache(offered.model.target, 200_000)
    offered.decoder._most_cached = 200_000
    return served


def test_cached_prompts_are_no_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    served = caching()
    [offered] = served.offered.values()
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


def per_position(served: Service) -> list[float]:
    """Accepted draft tokens by position, in order of positions."""
    name = r"outpace:spec_decode_num_accepted_tokens_per_pos_total"
    pattern = rf'^{name}{{model_name="toy",position="(\d+)"}} (\S+)$'
    found = re.findall(pattern, served.metrics.text().decode(), re.MULTILINE)
    return [float(count) for _, count in sorted(found, key=lambda one: int(one[0]))]


def test_drafts_are_counted_as_the_answers_say() -> None:
    served = service(defaults=Defaults(method="pld", settings={"num_draft_tokens": 4}))
    with client(served) as to:
        said = [
            chat(to, max_tokens=40, ignore_eos=True)["usage"]["speculation"],
            complete(to, prompt="abcabcabcabc", max_tokens=40, ignore_eos=True)["usage"]["speculation"],
        ]
        complete(to, max_tokens=20, speculation={"off": True})
    assert sum(one["accepted"] for one in said) > 0
    for name, counter in (("drafted", "draft_tokens"), ("accepted", "accepted_tokens")):
        assert value(served, f"spec_decode_num_{counter}_total") == sum(one[name] for one in said)
    drafts = value(served, "spec_decode_num_drafts_total")
    assert 0 < drafts <= sum(one["rounds"] for one in said)
    assert value(served, "spec_decode_num_draft_tokens_total") <= 4 * drafts
    accepted = per_position(served)
    assert sum(accepted) == sum(one["accepted"] for one in said)
    assert accepted == sorted(accepted, reverse=True) and len(accepted) <= 4 and accepted[0] <= drafts


def test_gaps_between_rounds_are_timed_and_first_tokens_once() -> None:
    served = service()
    with client(served) as to:
        usage = complete(to, max_tokens=30, ignore_eos=True, speculation={"off": True})["usage"]
    rounds = usage["speculation"]["rounds"]
    assert rounds == 30
    assert value(served, "time_to_first_token_seconds_count") == 1
    assert value(served, "inter_token_latency_seconds_count") == rounds - 1
    assert value(served, "inter_token_latency_seconds_sum") <= value(served, "e2e_request_latency_seconds_sum")


def test_a_prompt_that_is_cached_is_a_hit_for_its_tokens() -> None:
    served = caching()
    with client(served) as to:
        first = complete(to, prompt="a long beginning " * 8, max_tokens=4)["usage"]
        assert value(served, "prefix_cache_hits_total") == 0
        again = complete(to, prompt="a long beginning " * 8, max_tokens=4)["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert value(served, "prefix_cache_hits_total") == cached > 0
    assert cached <= value(served, "prefix_cache_queries_total") <= first["prompt_tokens"] + again["prompt_tokens"]


@pytest.mark.parametrize(("bounds", "good"), [
    ([], True), (["ttft:600000", "tpot:600000", "e2e:600000"], True), (["ttft:0.000001"], False),
    (["tpot:0.000001"], False), (["e2e:0.000001", "ttft:600000"], False),
])  # fmt: skip
def test_goodput_counts_complete_answers_within_all_bounds(bounds: list[str], good: bool) -> None:
    served = service(bounds=read_bounds(bounds))
    with client(served) as to:
        tokens = complete(to, max_tokens=12, ignore_eos=True)["usage"]["completion_tokens"]
    assert tokens == 12
    assert value(served, "goodput_requests_total") == good
    assert value(served, "goodput_tokens_total") == good * tokens
