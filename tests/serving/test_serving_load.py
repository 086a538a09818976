"""Full queues, callers who leave or read slowly, time limits, defects, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from cli_support import toy
from outpace.constraints import compiler
from outpace.constraints.grammar import Grammar
from outpace.core.turns import ROUNDS
from outpace.serving import app
from outpace.serving.answers import ChatAnswers
from outpace.serving.app import build_app
from outpace.serving.logs import Log
from outpace.serving.service import Service
from outpace.serving.tenants import Terms
from serving_support import CHAT, COMPLETE, USER, chat, client, complete, refused, service

LONG: dict[str, Any] = {"model": "toy", "messages": USER, "temperature": 0, "ignore_eos": True, "max_tokens": 300}


class Caller:
    """One HTTP request, driven by hand: ``left`` tells the server that its caller has gone."""

    def __init__(self, served: Service, **body: Any) -> None:
        self._app = build_app(served)
        self._body = json.dumps(LONG | body).encode()
        self.left = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.sent: list[dict[str, Any]] = []
        self.key = "none"
        self.withheld = False
        """Whether its body never comes."""
        self._given = False

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {self.key}".encode())]
        scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "headers": headers}
        await self._app(scope | {"query_string": b"", "client": None}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._given and not self.withheld:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(one.get("body", b"") for one in self.sent).decode()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


@contextmanager
def standing_still() -> Iterator[None]:
    """No round runs meanwhile."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ROUNDS:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_everything_within_a_round(stream: bool) -> None:
    served = service()
    [offered] = served.offered.values()

    async def leave() -> None:
        caller = Caller(served, stream=stream, n=2)
        running = asyncio.create_task(caller.run())
        with standing_still():
            await until(lambda: bool(offered.decoder.running or offered.decoder.waiting))
            caller.left.set()
            await running
        await until(lambda: not offered.decoder.running and not offered.decoder.waiting)
        await until(lambda: offered.decoder._thread is None)  # and has told whom it concerns

    asyncio.run(leave())
    text = served.metrics.text().decode()
    assert 'request_success_total{finished_reason="abort",model_name="toy"} 2.0' in text
    assert 'generation_tokens_total{model_name="toy"} 600' not in text


def test_a_slow_reader_holds_nobody_up() -> None:
    served = service()

    async def read() -> None:
        slow, quick = Caller(served, stream=True), Caller(served, stream=True, max_tokens=40)
        slow.reading.clear()
        tasks = [asyncio.create_task(one.run()) for one in (slow, quick)]
        await tasks[1]
        [offered] = served.offered.values()
        await until(lambda: not offered.decoder.running)  # its answer is complete, too, and waits to be read
        assert slow.sent == []
        slow.reading.set()
        await tasks[0]
        pieces = [json.loads(line[6:]) for line in slow.text.splitlines() if line.startswith("data: {")]
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in pieces)
        assert text == toy().generate(USER, ignore_eos=True, max_new_tokens=300).text

    asyncio.run(read())


async def beside_one_that_runs(served: Service, then: Callable[[], Awaitable[None]]) -> Caller:
    """The caller whose request runs while ``then`` does."""
    [offered] = served.offered.values()
    first = Caller(served)
    with standing_still():
        running = asyncio.create_task(first.run())
        await until(lambda: bool(offered.decoder.running or offered.decoder.waiting))
        await then()
    await running
    return first


def test_a_full_queue_refuses_with_a_time_to_wait() -> None:
    served = service(max_batch=1, max_queue=0)

    async def ask() -> None:
        second = Caller(served)
        first = await beside_one_that_runs(served, second.run)
        assert first.sent[0]["status"] == 200
        assert second.sent[0]["status"] == 429
        assert json.loads(second.text)["error"]["code"] == "queue_full"
        assert int(dict(second.sent[0]["headers"])[b"retry-after"]) >= 1

    asyncio.run(ask())


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_who_is_over_a_limit_is_refused_before_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    served = service(keys={"ann": Terms(key="key-of-ann", requests_per_minute=1)})
    with client(served) as to:
        to.headers["Authorization"] = "Bearer key-of-ann"
        (chat if path == CHAT else complete)(to)
        monkeypatch.setattr(type(served), "requests", lambda *_: 1 / 0)
        monkeypatch.setattr(app, "prompt_ids", lambda *_: 1 / 0)
        monkeypatch.setattr(app, "completion_prompts", lambda *_, **__: 1 / 0)
        assert refused(to, 429, path=path)["code"] == "rate_limit_exceeded"


def test_what_a_full_queue_refuses_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    served = service(max_batch=1, max_queue=0)

    async def ask() -> None:
        second = Caller(served)

        async def unread() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(app, "prompt_ids", lambda *_: 1 / 0)
                await second.run()

        await beside_one_that_runs(served, unread)
        assert second.sent[0]["status"] == 429

    asyncio.run(ask())


def test_grammars_of_one_tenant_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten that take long to compile, by a tenant within its limits."""
    served = service(keys={name: Terms(key=f"key-of-{name}") for name in ("ann", "bob")})
    over, compiling, honest = threading.Event(), [], compiler.ParsedConstraint

    def slow(grammar: Grammar, *about: Any) -> Any:
        if grammar.source.startswith("b{"):
            compiling.append(grammar.source)
            over.wait(30)
        return honest(grammar, *about)

    monkeypatch.setattr(compiler, "ParsedConstraint", slow)

    async def ask() -> None:
        known = [Caller(served, guided_regex="ab", ignore_eos=None, max_tokens=9) for _ in range(2)]
        many = [Caller(served, guided_regex=f"b{{1,{at + 1}}}", ignore_eos=None, max_tokens=9) for at in range(10)]
        plain = Caller(served, max_tokens=9)
        for one in (*known, plain):
            one.key = "key-of-bob"
        for one in many:
            one.key = "key-of-ann"
        await known[0].run()
        tasks = [asyncio.create_task(one.run()) for one in many]
        try:
            await until(lambda: bool(compiling))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(10):
                await plain.run()
                await known[1].run()
        finally:
            over.set()
        await asyncio.gather(*tasks)
        assert [one.sent[0]["status"] for one in (*known, plain, *many)] == [200] * 13

    asyncio.run(ask())


def test_more_answers_than_the_server_ever_takes_are_refused_for_good() -> None:
    with client(service(max_batch=2, max_queue=1)) as to:
        refused(to, 400, "asks for 4 answers", "takes 3", n=4)
        refused(to, 400, "asks for 4 answers", path=COMPLETE, prompt=["a", "b"], n=2)
        assert len(chat(to, n=3, temperature=1)["choices"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit_ends_a_request(stream: bool) -> None:
    served = service()
    served.defaults = replace(served.defaults, time_limit=1e-9)
    with client(served) as to:
        error = refused(to, 504, "limit of 1e-09 s", stream=stream)
    assert error["code"] == "time_limit_exceeded"


def test_a_defect_fails_its_requests_in_words_and_the_server_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    served = service(log=Log(write=lines.append))
    [offered] = served.offered.values()
    target = offered.model.target
    with client(served) as to:
        with monkeypatch.context() as broken:
            broken.setattr(target, "score", lambda *_, **__: 1 / 0)
            error = refused(to, 500)
        assert "division" not in error["message"]
        assert "division by zero" in lines[0]
        where = json.loads(lines[0])["where"]
        assert any("engine/round.py" in one for one in where)
        assert any("test_serving_load.py" in one and one.endswith("<lambda>") for one in where)
        chat(to)


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(
    ("error", "harmless"),
    [
        (KeyError("a secret"), False),
        (RuntimeError("a secret"), False),
        (UnicodeEncodeError("ascii", "a secret \xe9", 9, 10, "ordinal not in range"), False),
        (OSError(28, "No space left on device"), True),
        (MemoryError("Unable to allocate 8 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
    ],
)
def test_a_defects_message_is_logged_only_if_texts_are(
    monkeypatch: pytest.MonkeyPatch, error: Exception, harmless: bool, texts: bool
) -> None:
    lines: list[str] = []
    served = service(log=Log(requests=True, texts=texts, write=lines.append))
    [offered] = served.offered.values()

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    with client(served) as to:
        monkeypatch.setattr(offered.model.target, "score", broken)
        refused(to, 500)
    [line] = [one for one in map(json.loads, lines) if one["event"] == "request failed"]
    assert (line["error"], line.get("message")) == (type(error).__name__, str(error) if texts or harmless else None)
    assert line["where"]


def test_an_error_in_the_middle_of_a_stream_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    served = service(log=Log(write=lambda _: None))
    [offered] = served.offered.values()
    target, calls = offered.model.target, 0
    honest = target.score

    def score(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return honest(*given, **named) if calls < 5 else 1 / 0

    with client(served) as to:
        monkeypatch.setattr(target, "score", score)
        answer = to.post(CHAT, json=LONG | {"stream": True})
    assert answer.status_code == 200
    *parts, last, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    assert json.loads(last)["error"]["type"] == "server_error"
    assert json.loads(parts[1])["choices"][0]["delta"]["content"]


@pytest.mark.parametrize("logprobs", [False, True])
def test_log_probabilities_are_written_beside_the_event_loop(logprobs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loop: list[bool] = []
    honest = ChatAnswers.whole

    def whole(self: ChatAnswers) -> dict[str, Any]:
        on_the_loop.append(asyncio._get_running_loop() is not None)
        return honest(self)

    monkeypatch.setattr(ChatAnswers, "whole", whole)
    with client() as to:
        answer = chat(to, logprobs=logprobs)
    assert on_the_loop == [not logprobs]
    assert (answer["choices"][0]["logprobs"] is not None) == logprobs


def test_draining_finishes_what_is_under_way_and_refuses_the_rest() -> None:
    served = service()

    async def drain() -> None:
        caller = Caller(served)
        running = asyncio.create_task(caller.run())
        with standing_still():
            [offered] = served.offered.values()
            await until(lambda: bool(offered.decoder.running or offered.decoder.waiting))
            draining = asyncio.create_task(asyncio.to_thread(served.drain))
            await until(lambda: not served.ready)
            await asyncio.sleep(0.05)
            late = Caller(served)
            await late.run()
            assert late.sent[0]["status"] == 503
        assert await draining
        await running
        assert json.loads(caller.text)["usage"]["completion_tokens"] == 300

    asyncio.run(drain())
    with client(served) as to:
        assert to.get("/ready").status_code == 503
        assert to.get("/health").status_code == 200


def test_logs_have_figures_and_texts_only_if_asked() -> None:
    for texts in (False, True):
        lines: list[str] = []
        with client(service(log=Log(requests=True, texts=texts, write=lines.append))) as to:
            answer = chat(to)
        [line] = [json.loads(one) for one in lines]
        content = answer["choices"][0]["message"]["content"]
        assert line["id"] == answer["id"]
        assert line["completion_tokens"] == answer["usage"]["completion_tokens"]
        assert line["status"] == 200
        assert ("tale" in lines[0], json.dumps(content)[1:-1] in lines[0]) == (texts, texts)


def test_refusals_are_logged_and_their_words_only_if_asked() -> None:
    for texts in (False, True):
        lines: list[str] = []
        served = service(keys={"ann": Terms(key="key-of-ann")}, log=Log(True, texts, write=lines.append))
        with client(served) as to:
            refused(to, 401)
            to.headers["Authorization"] = "Bearer key-of-ann"
            refused(to, 404, "'secret'", model="secret")
            refused(to, 400, nonsense=1)
        unknown, model, field = map(json.loads, lines)
        assert (unknown["status"], unknown["path"], "tenant" in unknown) == (401, CHAT, False)
        assert (model["tenant"], model["status"], model["code"]) == ("ann", 404, "model_not_found")
        assert (field["status"], field["param"]) == (400, "nonsense")
        assert all(("message" in one) == texts for one in (unknown, model, field))
        assert ("secret" in lines[1]) == texts


def test_pages_of_other_origins_only_if_allowed() -> None:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with client() as to:
        assert "Access-Control-Allow-Origin" not in to.get("/v1/models", headers=asked).headers
    with client(origins=["https://page.example"]) as to:
        allowed = to.options(CHAT, headers=asked)
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://page.example"
        sent = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,x-stainless-retry-count"}
        theirs = to.options(CHAT, headers=asked | sent)  # of OpenAI's client for browsers
        assert theirs.status_code == 200
        assert "x-stainless-lang" in theirs.headers["Access-Control-Allow-Headers"]
        other = to.options(CHAT, headers=asked | {"Origin": "https://other.example"})
        assert "Access-Control-Allow-Origin" not in other.headers
