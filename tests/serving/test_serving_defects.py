"""What a soak found, each by itself: lone surrogates, failures before the first token, refusals that counted."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_support import toy
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.scheduler import Limits
from outpace.engine.shared_decoder import SharedDecoder
from outpace.serving import guard
from outpace.serving.errors import ApiError
from outpace.serving.logs import Log
from outpace.serving.offered import Defaults
from outpace.serving.server import OwnLog
from outpace.serving.service import Service
from outpace.serving.tenants import Tenant, Terms
from outpace.traces.trace_format import TraceHeader
from outpace.traces.trace_writer import TraceLog
from serving_support import CHAT, COMPLETE, USER, chat, client, complete, events, refused, service
from test_serving_load import Caller, standing_still, until

FIXED: dict[str, Any] = {"speculation": {"method": "pld", "params": {"num_draft_tokens": 3}}}


@pytest.mark.parametrize(
    "more", [{"\ud800": 1}, {"model": "\ud800"}, {"speculation": {"method": "\ud800"}}, {"user": "\ud800", "n": 0}]
)
def test_an_error_may_repeat_what_utf8_cannot_write(more: dict[str, Any]) -> None:
    with client() as to:
        to.headers["Content-Type"] = "application/json"
        answer = to.post(CHAT, content=json.dumps({"model": "toy", "messages": USER} | more).encode())
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


def test_a_stream_that_fails_before_its_first_token_has_the_status_of_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A time limit that ends while the prompt is read, and one that ends within the answer."""
    served = service(prefill_rows=1)
    [offered] = served.offered.values()
    scheduler, now = offered.decoder.scheduler, 0.0
    honest, late = scheduler.plan, 2
    steps = 0

    def plan(running: Any) -> Any:
        nonlocal now, steps
        steps += 1
        now = 9.0 if steps >= late else 0.0
        return honest(running)

    monkeypatch.setattr(scheduler, "_clock", lambda: now)
    monkeypatch.setattr(scheduler, "plan", plan)
    served.defaults = replace(served.defaults, time_limit=5.0)
    monkeypatch.setattr(offered.model.target, "prefill", lambda *_: None)  # a prompt that is never read
    with client(served) as to:
        refused(to, 504, "limit of 5 s", stream=True)
    monkeypatch.undo()
    monkeypatch.setattr(scheduler, "_clock", lambda: now)
    monkeypatch.setattr(scheduler, "plan", plan)
    now, steps, late = 0.0, 0, 6
    with client(served) as to:
        answer = to.post(CHAT, json={"model": "toy", "messages": USER, "stream": True, "ignore_eos": True})
    found = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert found[-1]["error"]["code"] == "time_limit_exceeded"
    reasons = [choice["finish_reason"] for one in found[:-1] for choice in one["choices"]]
    assert set(reasons) == {None}, "OpenAI's API has no finish_reason 'error'"


def test_what_the_server_turns_away_does_not_count_for_a_tenants_limits() -> None:
    terms = {"ann": Terms(key="key-of-ann", requests_per_minute=2, tokens_per_minute=1000)}
    served = service(keys=terms, max_batch=1, max_queue=0)
    key = {"Authorization": "Bearer key-of-ann"}

    async def ask() -> list[int]:
        [offered] = served.offered.values()
        tenant = served.tenants.find("Bearer key-of-ann")
        callers = [Caller(served, max_tokens=4) for _ in range(4)]
        for one in callers:
            one.key = "key-of-ann"
        with standing_still():
            first = asyncio.create_task(callers[0].run())
            await until(lambda: bool(offered.decoder.running or offered.decoder.waiting))
            for one in callers[1:]:
                await one.run()
        await first
        assert tenant.name == "ann"
        return [one.sent[0]["status"] for one in callers]

    assert asyncio.run(ask()) == [200, 429, 429, 429]
    with client(served) as to:
        to.headers.update(key)
        refused(to, 400, path=COMPLETE, temperature=-1)
        chat(to, max_tokens=4)  # the second that was taken
        refused(to, 429, "requests per minute")


def test_an_amount_that_is_given_back_can_be_used_again() -> None:
    tenant = Tenant("ann", Terms(key="x", requests_per_minute=1, tokens_per_minute=60), lambda: 0.0)
    for _ in range(3):
        tenant.admit(50)
        tenant.give_back(50)
    tenant.admit(60)
    with pytest.raises(ApiError):
        tenant.admit(1)


@pytest.mark.parametrize("stream", [False, True])
def test_the_seed_that_was_drawn_is_reported_and_repeats_the_answer(stream: bool) -> None:
    body: dict[str, Any] = {"temperature": 1, "n": 2, "max_tokens": 20, **FIXED}
    with client() as to:
        if stream:
            *parts, last = events(to, CHAT, messages=USER, stream_options={"include_usage": True}, **body)
            texts = ["", ""]
            for one in parts:
                [choice] = one["choices"]
                texts[choice["index"]] += choice["delta"].get("content", "")
            seed = last["usage"]["speculation"]["seed"]
        else:
            answer = chat(to, **body)
            texts = [one["message"]["content"] for one in answer["choices"]]
            seed = answer["usage"]["speculation"]["seed"]
        again = chat(to, **body, seed=seed)
        assert [one["message"]["content"] for one in again["choices"]] == texts
        second = chat(to, **(body | {"n": 1}), seed=seed + 1)
        assert second["choices"][0]["message"]["content"] == texts[1]
        assert again["usage"]["speculation"]["seed"] == seed
        assert chat(to)["usage"]["speculation"]["seed"] is None  # greedy
        assert chat(to, **body)["usage"]["speculation"]["seed"] != seed


def test_equal_prompts_of_one_call_have_seeds_of_their_own() -> None:
    with client() as to:
        answer = complete(to, prompt=["ab", "ab", "ab"], n=2, temperature=1, max_tokens=30, **FIXED)
        texts = [one["text"] for one in answer["choices"]]
        seed = answer["usage"]["speculation"]["seed"]
        alone = [complete(to, temperature=1, max_tokens=30, seed=seed + at, **FIXED) for at in range(6)]
    assert len(set(texts)) == 6
    assert [one["choices"][0]["text"] for one in alone] == texts


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.01)
    served = service()

    async def ask() -> None:
        caller = Caller(served)
        caller.withheld = True
        await caller.run()
        assert caller.sent[0]["status"] == 408
        assert json.loads(caller.text)["error"]["type"] == "timeout_error"

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_a_prompt_is_read_frees_everything(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served = service(prefill_rows=1)
    [offered] = served.offered.values()
    target = offered.model.target
    honest = target.score

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(0.005)
        return honest(*given, **named)

    monkeypatch.setattr(target, "score", slow)

    async def leave() -> None:
        early = Caller(served, max_tokens=200)  # so that the long prompt is read in parts, one row a step
        long = [{"role": "user", "content": "abc " * 60}]
        caller = Caller(served, stream=stream, messages=long, max_tokens=5)
        tasks = [asyncio.create_task(one.run()) for one in (early, caller)]

        def reading() -> bool:
            found = [one.generation for one in offered.decoder.running]
            return any(one and len(one.request.prompt) > 200 and target.length(one.sequence.kv) > 5 for one in found)

        await until(reading)
        caller.left.set()
        await tasks[1]
        await until(lambda: not any(len(one.request.prompt) > 200 for one in offered.decoder.running))
        assert not offered.decoder.waiting
        early.left.set()
        await tasks[0]
        await until(lambda: not offered.decoder.running)

    asyncio.run(leave())


@pytest.mark.parametrize("method", ["pld", "sam", "recycling"])
@pytest.mark.parametrize("stop", ["", "ab", "zzz"])
def test_stop_words_across_rounds_and_drafts_end_at_the_same_character(method: str, stop: str) -> None:
    """A stop word may end within a draft, or begin in one round and end in another."""
    with client() as to:
        whole = complete(to, max_tokens=200, ignore_eos=True, speculation={"off": True})["choices"][0]["text"]
        stops = [stop] if stop else [whole[at : at + 3] for at in (5, 40, 90)]
        for word in stops:
            expected = whole.split(word)[0]
            about: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "stop": [word], "prompt": "ab"}
            for wish in ({"method": method}, {"method": method, "params": {"num_draft_tokens": 4}}):
                if method == "recycling" and "params" in wish:
                    continue
                parts = events(to, COMPLETE, speculation=wish, **about)
                assert "".join(one["choices"][0]["text"] for one in parts) == expected
                assert parts[-1]["choices"][0]["finish_reason"] == ("stop" if word in whole else "length")


def test_cached_prompts_hold_less_when_requests_need_the_memory() -> None:
    served = service(kv_bytes=400_000)
    [offered] = served.offered.values()
    target = offered.model.target
    target.kv_bytes_per_token = 1000
    offered.decoder.prefixes = PrefixCache(target, 200_000)
    offered.decoder._most_cached = 200_000
    with client(served) as to:
        for at in range(6):
            complete(to, prompt=f"{'abcdef'[at]} some words " * 8, max_tokens=8)
            decoder = offered.decoder
            assert decoder.prefixes is not None
            assert decoder.kv_bytes + decoder.prefixes.bytes <= 400_000


def test_a_body_that_has_not_come_when_the_server_ends_is_refused_in_words() -> None:
    """uvicorn cancels what is left some seconds after the end of the answers."""
    served = service()

    async def end() -> None:
        caller = Caller(served)
        caller.withheld = True
        running = asyncio.create_task(caller.run())
        await asyncio.sleep(0.05)
        running.cancel()
        await running
        assert caller.sent[0]["status"] == 503
        assert json.loads(caller.text)["error"]["code"] == "shutting_down"

    asyncio.run(end())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_read_when_the_server_ends_is_no_defect(stream: bool) -> None:
    served = service()
    [offered] = served.offered.values()

    async def end() -> None:
        caller = Caller(served, stream=stream, max_tokens=20)
        caller.reading.clear()
        running = asyncio.create_task(caller.run())
        whole = 'request_generation_tokens_count{model_name="toy"} 1.0'
        await until(lambda: whole in served.metrics.text().decode())
        await until(lambda: not offered.decoder.running and not offered.decoder.waiting)
        running.cancel()
        await running
        assert not any(one.get("more_body") is False for one in caller.sent), "it must not look complete"

    asyncio.run(end())


@pytest.mark.parametrize("told_before", [False, True])
def test_a_defect_is_in_the_log_once_and_without_texts(told_before: bool) -> None:
    """The HTTP server logs what goes through it with its message and stack; a request's text may be in both."""
    lines: list[str] = []
    log = Log(write=lines.append)
    records = logging.getLogger("test of defects")
    records.addFilter(OwnLog(log))
    shown: list[logging.LogRecord] = []
    records.addHandler(_Kept(shown))
    try:
        raise ValueError("a secret prompt")  # noqa: TRY301
    except ValueError as error:
        if told_before:
            log.failure("request failed", error)
        records.exception("Exception in ASGI application")
    records.warning("something of its own")
    assert [one.getMessage() for one in shown] == ["something of its own"]
    [line] = lines
    assert "secret" not in line and json.loads(line)["error"] == "ValueError"


class _Kept(logging.Handler):
    def __init__(self, kept: list[logging.LogRecord]) -> None:
        super().__init__()
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


def test_a_trace_that_can_no_longer_be_written_costs_no_answer(tmp_path: Path) -> None:
    lines: list[str] = []
    served = service(log=Log(write=lines.append))
    trace = TraceLog(tmp_path / "trace.jsonl", TraceHeader({"name": "toy"}, "open", 1, "a test"))
    served.trace = trace

    def full(text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trace._write = full  # type: ignore[method-assign]
    with client(served) as to:
        for _ in range(2):
            assert complete(to, max_tokens=2)
    assert served.trace is None
    assert [json.loads(line)["event"] for line in lines] == ["the trace ends here"]


def test_a_prediction_is_no_longer_than_an_answer_can_be() -> None:
    with client() as to:
        error = refused(
            to, 400, "'prediction' has 4,000 tokens", prediction={"type": "content", "content": "ab" * 2000}
        )
    assert error["param"] == "prediction"


def test_the_names_of_fields_and_models_are_repeated_as_far_as_they_are_names() -> None:
    name = "x" * (1 << 20)
    with client() as to:
        more: dict[str, Any] = {name: 1}
        for error in (refused(to, 400, "there is no field", **more), refused(to, 404, "no model", model=name)):
            assert len(json.dumps(error)) < 2000


def test_timelines_are_bounded_by_the_choices_that_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.serving.service.MOST_CHOICES", 5)
    with client() as to:
        ids = [complete(to, n=2)["id"] for _ in range(4)]
        codes = [to.get(f"/v1/requests/{one}/timeline").status_code for one in ids]
        whole = complete(to, n=9)["id"]
        assert len(to.get(f"/v1/requests/{whole}/timeline").json()["choices"]) == 9
    assert codes == [404, 404, 200, 200]


@pytest.mark.parametrize("leave", [False, True])
def test_what_is_prepared_is_bounded_like_what_waits(leave: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the queue, by the time limit, and by its caller's patience."""
    served = service(max_batch=1, max_queue=1)
    if not leave:
        served.defaults = replace(served.defaults, time_limit=0.2)
    compiled: list[float] = []
    honest = served.requests

    def slow(*given: Any) -> Any:
        compiled.append(time.monotonic())
        time.sleep(0.5)
        return honest(*given)

    monkeypatch.setattr(served, "requests", slow)

    async def ask() -> list[int]:
        callers = [Caller(served, guided_regex="a+", max_tokens=3) for _ in range(4)]
        tasks = [asyncio.create_task(one.run()) for one in callers]
        await until(lambda: bool(compiled))
        if leave:
            for one in callers[1:]:
                one.left.set()
        await asyncio.gather(*tasks)
        return sorted(one.sent[0]["status"] for one in callers if one.sent)

    codes = asyncio.run(ask())
    served.stop()
    assert codes == ([200, 429, 429, 499] if leave else [429, 429, 504, 504])
    assert len(compiled) == 1
    assert not any(one.preparing for one in served.offered.values())


def test_calls_that_are_prepared_for_one_model_do_not_fill_the_queue_of_another() -> None:
    models = [toy("large"), toy("small")]
    for one in models:
        one.shared = SharedDecoder(one.target, one.tokenizer, Limits(max_batch=1, max_queue=1))
    served = Service(models, defaults=Defaults("pld"))
    served.offered["large"].preparing[""] = 9
    with client(served) as to:
        refused(to, 429, "9 requests are waiting", path=COMPLETE, model="large")
        assert complete(to, model="small", max_tokens=3)["choices"]
