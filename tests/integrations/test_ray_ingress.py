"""The ingress in front of several replicas: answers, keys, limits, errors and the end, without Ray."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from outpace.engine.scheduler import QueueFull
from outpace.integrations.ray.in_process_call import call_app
from outpace.integrations.ray.ingress import Ingress
from outpace.integrations.ray.messages import Call, Head, Message, ReplicaLost, Reply, Tail, collected
from outpace.integrations.ray.replay import ATTEMPTS
from outpace.integrations.ray.replica import STUCK_SECONDS, AppEngine, Unhealthy
from outpace.serving.app import build_app
from outpace.serving.logs import Log
from outpace.serving.tenants import Tenants, Terms
from ray_support import STREAM, LocalReplicas, local
from serving_support import CHAT, COMPLETE, USER, chat, complete, events, refused, service

ANN = {"Authorization": "Bearer key-of-ann"}
TERMS = {"ann": Terms(key="key-of-ann"), "bob": Terms(key="key-of-bob", priority=3)}


def client(replicas: Any, keys: dict[str, Terms] | None = None, log: Log | None = None, **about: Any) -> TestClient:
    limit = about.pop("time_limit", None)
    return TestClient(Ingress(replicas, Tenants(keys), log, time_limit=limit).app(**about))


def direct(path: str, **body: Any) -> Any:
    """The answer of a single server to the same request."""
    served = service()
    with TestClient(build_app(served)) as to:
        found = to.post(path, json={"model": "toy", "temperature": 0, "max_tokens": 12, **body}).json()
    served.stop()
    return found


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in found if one["choices"])


def test_answers_are_those_of_a_single_server() -> None:
    with local() as replicas:
        to = client(replicas)
        assert chat(to)["choices"] == direct(CHAT, messages=USER)["choices"]
        assert complete(to, n=2)["choices"] == direct(COMPLETE, prompt="ab", n=2)["choices"]
        assert (
            text_of(events(to, CHAT, messages=USER)) == direct(CHAT, messages=USER)["choices"][0]["message"]["content"]
        )


def test_pages_models_and_errors_pass_through() -> None:
    with local() as replicas:
        to = client(replicas)
        assert to.get("/v1/models").json()["data"][0]["id"] == "toy"
        assert to.get("/v1/models/toy").status_code == 200
        assert "text/html" in to.get("/").headers["content-type"]
        assert to.get("/nowhere").status_code == 404
        refused(to, 404, "no model 'tov'", model="tov")
        refused(to, 400, "no field 'nonsense'", nonsense=1)
        assert to.post(CHAT, content=b"{", headers={"Content-Type": "application/json"}).status_code == 400


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_whole_answer_survives_its_replica(after: int) -> None:
    with local(deaths=[after]) as replicas:
        assert chat(client(replicas))["choices"] == direct(CHAT, messages=USER)["choices"]
        assert len(replicas.asked) == 2


def test_a_stream_survives_its_replica_until_its_first_event() -> None:
    with local(deaths=[1]) as replicas:
        to = client(replicas)
        found = events(to, CHAT, messages=USER)
        assert text_of(found) == direct(CHAT, messages=USER)["choices"][0]["message"]["content"]
        assert len({one["id"] for one in found}) == 1
        assert "outpace:ingress_replays_total 1.0" in to.get("/metrics").text


class Breaking:
    """Replicas whose first reply breaks after an event that holds some text."""

    def __init__(self, replicas: LocalReplicas) -> None:
        self._replicas, self._whole = replicas, False
        self.ask_all, self.running = replicas.ask_all, replicas.running

    async def ask(self, call: Call) -> AsyncGenerator[Message, None]:
        async for message in self._replicas.ask(call):
            if not isinstance(message, bytes) or self._whole:
                yield message
                continue
            events = message.split(b"\n\n")
            kept = next(
                (at for at, event in enumerate(events) if b'"content":"' in event and b"role" not in event), None
            )
            yield b"".join(event + b"\n\n" for event in events[: None if kept is None else kept + 1] if event)
            if kept is not None:
                self._whole = True
                raise ReplicaLost("killed")


def test_a_greedy_stream_that_had_begun_goes_on_from_another_replica() -> None:
    with local() as replicas:
        to = client(Breaking(replicas))
        found = events(to, CHAT, messages=USER, stream_options={"include_usage": True})
        assert text_of(found) == direct(CHAT, messages=USER)["choices"][0]["message"]["content"]
        assert len({one["id"] for one in found}) == 1
        assert [one["choices"][0]["delta"].get("role") for one in found if one["choices"]].count("assistant") == 1
        assert found[-1]["usage"]["completion_tokens"] == 12
        assert len(replicas.asked) == 2


def test_another_stream_that_had_begun_ends_with_an_error_event() -> None:
    lines: list[str] = []
    with local() as replicas:
        to = client(Breaking(replicas), log=Log(True, write=lines.append))
        body = {"model": "toy", "messages": USER, "temperature": 1, "seed": 3, "max_tokens": 12, "stream": True}
        answer = to.post(CHAT, json=body)
        assert answer.status_code == 200
        *begun, error, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert begun
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "replica_died"
        assert "outpace:ingress_broken_streams_total 1.0" in to.get("/metrics").text
        assert any("broken stream" in line for line in lines)


def test_a_request_that_kills_every_replica_gets_503_in_words() -> None:
    with local(deaths=[0] * 10) as replicas:
        error = refused(client(replicas), 503, f"{ATTEMPTS} replicas died", messages=USER)
        assert error["code"] == "replica_died"
        assert len(replicas.asked) == ATTEMPTS


def test_keys_are_checked_by_the_ingress_and_replicas_learn_only_who_asks() -> None:
    with local() as replicas:
        to = client(replicas, TERMS)
        assert refused(to, 401)["code"] == "missing_api_key"
        assert replicas.asked == []
        answer = to.post(CHAT, headers=ANN, json={"model": "toy", "messages": USER, "max_tokens": 2})
        assert answer.status_code == 200
        [call] = replicas.asked
        assert call.tenant == "ann"
        assert "key-of-ann" not in repr(call)


def test_the_priority_of_a_key_holds_in_the_replicas() -> None:
    with local() as replicas:
        to = client(replicas, TERMS)
        body = {"model": "toy", "messages": USER, "max_tokens": 2, "priority": 3}
        assert to.post(CHAT, headers={"Authorization": "Bearer key-of-bob"}, json=body).status_code == 200
        assert to.post(CHAT, headers=ANN, json=body).status_code == 400


def test_a_limit_of_requests_holds_for_all_replicas_together() -> None:
    keys = {"ann": Terms(key="key-of-ann", requests_per_minute=3)}
    with local() as replicas:
        to = client(replicas, keys)
        to.headers.update(ANN)
        for _ in range(3):
            chat(to)
        assert refused(to, 429)["code"] == "rate_limit_exceeded"
        assert len(replicas.asked) == 3


def test_a_limit_of_tokens_counts_prompts_and_answers_of_all_replicas() -> None:
    prompt = chat_tokens()
    keys = {"ann": Terms(key="key-of-ann", tokens_per_minute=2 * (prompt + 12) - 1)}
    with local() as replicas:
        to = client(replicas, keys)
        to.headers.update(ANN)
        chat(to, ignore_eos=True)
        list(events(to, CHAT, messages=USER, ignore_eos=True))
        refused(to, 429, "tokens per minute")


def test_the_tokens_of_a_stream_that_is_cut_short_count_for_the_limit() -> None:
    keys = {"ann": Terms(key="key-of-ann", tokens_per_minute=30)}
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a\\n\\n"}}]}\n\n'

    class Cut:
        async def ask(self, call: Call) -> AsyncGenerator[Message, None]:
            yield Head(200, STREAM, "r0", 5)
            for _ in range(5):
                yield event * 5
            raise ReplicaLost("killed")

    to = client(Cut(), keys)
    to.headers.update(ANN)
    assert "replica_died" in to.post(CHAT, json={"messages": USER, "stream": True}).text
    refused(to, 429, "tokens per minute")


def chat_tokens() -> int:
    counted: int = direct(CHAT, messages=USER)["usage"]["prompt_tokens"]
    return counted


def test_refused_requests_count_for_no_limit() -> None:
    keys = {"ann": Terms(key="key-of-ann", requests_per_minute=1)}
    with local(deaths=[0] * ATTEMPTS) as replicas:
        to = client(replicas, keys)
        to.headers.update(ANN)
        refused(to, 503, messages=USER)
        refused(to, 404, model="other")
        chat(to)
        refused(to, 429)


def test_full_replicas_are_told_in_words() -> None:
    class Full:
        async def ask(self, call: Call) -> AsyncGenerator[Message, None]:
            raise QueueFull(7, 2.0)
            yield Tail()

        async def running(self) -> int:
            return 0

    to = client(Full())
    answer = to.post(CHAT, json={"model": "toy", "messages": USER})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert to.get("/health").status_code == 200
    assert to.get("/ready").status_code == 503


def test_a_time_limit_ends_the_wait_for_a_replica() -> None:
    class Nobody:
        async def ask(self, call: Call) -> AsyncGenerator[Message, None]:
            await asyncio.sleep(60)
            yield Tail()

    assert refused(client(Nobody(), time_limit=0.05), 504)["code"] == "time_limit_exceeded"


def test_a_timeline_is_found_wherever_the_request_was_answered() -> None:
    with local() as replicas:
        to = client(replicas)
        for _ in range(2):
            found = to.get(f"/v1/requests/{chat(to)['id']}/timeline")
            assert found.status_code == 200
            assert found.json()["choices"]
        assert to.get("/v1/requests/none/timeline").status_code == 404


def test_metrics_are_those_of_all_replicas() -> None:
    with local() as replicas:
        to = client(replicas)
        chat(to), chat(to)
        text = to.get("/metrics").text
        for name in ("r0", "r1"):
            assert f'outpace:request_success_total{{replica="{name}",' in text
            assert f'outpace:ingress_replica_requests_total{{replica="{name}"}} 1.0' in text
        assert 'outpace:ingress_requests_total{status="200"} 2.0' in text


def test_draining_waits_for_requests_and_refuses_new_ones() -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow:
        async def ask(self, call: Call) -> AsyncGenerator[Message, None]:
            begun.set()
            await asyncio.to_thread(go.wait)
            yield Head(200, (("content-type", "application/json"),), "a")
            yield b"{}"
            yield Tail()

        async def running(self) -> int:
            return 1

    ingress = Ingress(Slow(), Tenants())  # type: ignore[arg-type]
    to = TestClient(ingress.app())
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(to.post(CHAT, json={}).status_code))
    asking.start()
    assert begun.wait(10)
    draining = threading.Thread(target=ingress.drain)
    draining.start()
    while to.get("/ready").status_code != 503:
        pass
    assert refused(to, 503)["code"] == "shutting_down"
    assert draining.is_alive()
    go.set()
    draining.join(10)
    asking.join(10)
    assert (draining.is_alive(), answers) == (False, [200])


def test_a_reader_who_leaves_cancels_the_call_in_the_replica() -> None:
    served = service()
    app = build_app(served)
    body = json.dumps(
        {"model": "toy", "messages": USER, "stream": True, "ignore_eos": True, "max_tokens": 300}
    ).encode()
    call = Call("POST", CHAT, (("content-type", "application/json"),), body)

    async def leave() -> None:
        messages = call_app(app, call, "r")
        await anext(messages)
        await messages.aclose()
        while served.offered["toy"].decoder.running:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 20))
    ended = served.metrics.ended.labels("toy", "abort")._value.get()
    served.stop()
    assert ended == 1


def test_an_application_that_fails_raises_in_the_replica() -> None:
    async def app(*_: object) -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        asyncio.run(_whole(app))


async def _whole(app: Any) -> Reply:
    return await collected(call_app(app, Call("GET", "/"), "r"))


def test_an_engine_that_ends_no_step_is_not_well() -> None:
    decoder = SimpleNamespace(running=[], steps=0)
    hanging = SimpleNamespace(offered={"toy": SimpleNamespace(decoder=decoder)})
    now = [0.0]
    engine = AppEngine(None, hanging, clock=lambda: now[0])  # type: ignore[arg-type]
    engine.check()
    now[0] += 10 * STUCK_SECONDS
    engine.check()  # idle
    decoder.running = [1]
    engine.check()
    now[0] += STUCK_SECONDS - 1
    decoder.steps += 1
    engine.check()
    now[0] += STUCK_SECONDS - 1
    engine.check()
    now[0] += 2
    with pytest.raises(Unhealthy, match="'toy'"):
        engine.check()
