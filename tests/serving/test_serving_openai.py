"""Conformance: the real openai client against a server process with the embedded model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pydantic
import pytest

import outpace

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "Count from one to five."}]
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server's address; it must end with code 0 when it is told to."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "outpace", "serve", "--model", "smollm2", "--port", "0", "--threads", "1"]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stderr=stderr, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process,
    ):
        try:
            found = None
            while found is None and process.poll() is None:
                found = re.search(r"^ready: (http://\S+)$", log.read_text(), re.MULTILINE)
                time.sleep(0.1)
            assert found is not None, log.read_text()
            assert httpx.get(f"{found[1]}/ready").status_code == 200
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
            assert log.read_text().splitlines() == [f"ready: {found[1]}"]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> outpace.Result:
    """What the library itself answers."""
    found = outpace.generate(outpace.load("smollm2"), QUESTION, max_new_tokens=24, top_logprobs=2)
    assert isinstance(found, outpace.Result)
    return found


def test_greedy_answers_are_those_of_generate(client: openai.OpenAI, expected: outpace.Result) -> None:
    answer = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY)
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    speculation = (answer.usage.model_extra or {})["speculation"]
    assert 0 < speculation["rounds"] <= answer.usage.completion_tokens
    assert speculation["mean_acceptance_length"] >= 1
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for found, wanted in zip(choice.logprobs.content, expected.logprobs, strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=0.05)
        assert bytes(found.bytes or ()).decode() == found.token
        assert [len(found.top_logprobs), found.top_logprobs[0].token] == [2, found.token]


class Town(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    coastal: bool


def test_answers_are_parsed_into_the_class_that_was_asked_for(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 60, "messages": [{"role": "user", "content": "Invent a town."}]}
    parsed = client.chat.completions.parse(response_format=Town, **asked).choices[0].message.parsed
    assert isinstance(parsed, Town)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": Town.model_json_schema()}}
    ways: list[dict[str, Any]] = [
        {"response_format": schema},
        {"extra_body": {"guided_json": Town.model_json_schema()}},
    ]
    for more in ways:
        answer = client.chat.completions.create(**asked, **more).choices[0]
        assert (answer.finish_reason, Town.model_validate_json(answer.message.content or "")) == ("stop", parsed)
    cut = client.chat.completions.create(response_format=schema, **{**asked, "max_tokens": 3}).choices[0]
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": r"\d{4}-\d\d"}, r"\d{4}-\d\d"),
        ({"guided_grammar": 'start: "<" /[a-c]{2}/ ">"'}, "<[abc]{2}>"),
    ],
)
def test_fields_of_vllm_hold_answers_of_the_model(client: openai.OpenAI, field: dict[str, Any], pattern: str) -> None:
    answer = client.chat.completions.create(messages=QUESTION, extra_body=field, **GREEDY).choices[0]
    assert answer.finish_reason == "stop"
    assert re.fullmatch(pattern, answer.message.content or "")


def test_a_schema_that_nothing_satisfies_is_a_bad_request(client: openai.OpenAI) -> None:
    wrong = {"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}}
    with pytest.raises(openai.BadRequestError, match=r"'guided_json': the schema cannot be used: Unsatisfiable schema"):
        client.chat.completions.create(messages=QUESTION, extra_body=wrong, **GREEDY)


def test_a_stream_is_the_same_answer(client: openai.OpenAI, expected: outpace.Result) -> None:
    stream = client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *parts, last = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in parts) == expected.text
    assert [one.choices[0].finish_reason for one in parts][-1] == expected.finish_reason
    assert last.usage is not None
    assert last.usage.completion_tokens == len(expected.tokens)


def test_many_at_once_are_answered_as_if_alone(server: str, expected: outpace.Result) -> None:
    async def ask(client: openai.AsyncOpenAI, **about: Any) -> list[str | None]:
        answer = await client.chat.completions.create(messages=QUESTION, **GREEDY | about)
        return [one.message.content for one in answer.choices]

    async def read(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)
        return "".join([one.choices[0].delta.content or "" async for one in stream])

    async def everyone() -> Sequence[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            off = {"extra_body": {"speculation": {"off": True}}}
            sampled = {"temperature": 1.0, "n": 2, "seed": 3}
            return await asyncio.gather(ask(client), read(client), ask(client, **off), ask(client, **sampled))

    alone, streamed, without, sampled = asyncio.run(everyone())
    assert alone == without == [streamed] == [expected.text]
    assert len(sampled) == 2


def test_samples_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    fixed = {"speculation": {"method": "pld", "params": {"num_draft_tokens": 3}}}
    about: dict[str, Any] = {"model": "smollm2", "max_tokens": 12, "n": 3, "seed": 11, "extra_body": fixed}
    first, second = (client.chat.completions.create(messages=QUESTION, **about) for _ in range(2))
    texts = [one.message.content for one in first.choices]
    assert texts == [one.message.content for one in second.choices]
    assert len(set(texts)) > 1
    assert [one.index for one in first.choices] == [0, 1, 2]


def test_seeded_answers_of_a_fixed_draft_length_are_those_of_generate_whatever_runs_beside(server: str) -> None:
    repeat: list[Any] = [{"role": "user", "content": "Repeat this list three times: apple, banana, cherry, date."}]
    fixed: dict[str, Any] = {"num_draft_tokens": 3}
    alone = outpace.generate(
        outpace.load("smollm2"), repeat, n=2, seed=11, temperature=0.8, max_new_tokens=40, method="pld", settings=fixed
    )
    assert sum(one.metrics["drafting_rounds"] for one in alone) > 0
    assert len({one.text for one in alone}) == 2
    sampled: dict[str, Any] = {"model": "smollm2", "messages": repeat, "temperature": 0.8, "max_tokens": 40}

    async def ask(client: openai.AsyncOpenAI, **about: Any) -> list[str | None]:
        answer = await client.chat.completions.create(**sampled | about)
        return [one.message.content for one in answer.choices]

    async def read(client: openai.AsyncOpenAI, **about: Any) -> list[str]:
        texts = ["", ""]
        async for one in await client.chat.completions.create(**sampled | about, stream=True):
            for choice in one.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    async def everyone() -> Sequence[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            seeded: dict[str, Any] = {
                "n": 2,
                "seed": 11,
                "extra_body": {"speculation": {"method": "pld", "params": fixed}},
            }
            greedy = {"messages": QUESTION, "temperature": 0, "extra_body": {"speculation": {"off": True}}}
            return await asyncio.gather(
                ask(client, **seeded), ask(client, **greedy), read(client, **seeded), ask(client, n=2)
            )

    whole, _, streamed, _ = asyncio.run(everyone())
    assert whole == streamed == [one.text for one in alone]


def test_stop_and_completions(client: openai.OpenAI, expected: outpace.Result) -> None:
    stop = expected.text[5:8]
    answer = client.chat.completions.create(messages=QUESTION, stop=[stop], **GREEDY)
    assert answer.choices[0].message.content == expected.text[: expected.text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    raw = client.completions.create(prompt=["One, two,", "A, B,"], logprobs=2, echo=False, **GREEDY)
    texts = outpace.generate(outpace.load("smollm2"), ["One, two,", "A, B,"], raw=True, max_new_tokens=24)
    assert [one.text for one in raw.choices] == [one.text for one in texts]
    assert raw.choices[1].index == 1
    assert raw.choices[0].logprobs is not None
    assert "".join(raw.choices[0].logprobs.tokens or ()) == raw.choices[0].text
    parts = client.completions.create(prompt="One, two,", stream=True, **GREEDY)
    assert "".join(one.choices[0].text for one in parts) == raw.choices[0].text


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2"):
        client.chat.completions.create(model="gpt", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature") as refusal:
        client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=-1)
    assert refusal.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            response_format={"type": "json"},
            stream=True,  # type: ignore[call-overload]
        )
    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="smollm2", input="x")
    assert [one.id for one in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_counters_are_the_sum_of_usages_and_leaving_frees_everything(server: str, client: openai.OpenAI) -> None:
    before = _counted(server)
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    after = _counted(server)
    assert answer.usage is not None
    speculation = (answer.usage.model_extra or {})["speculation"]
    for name, figure in (("draft", "drafted"), ("accepted", "accepted")):
        counter = f"outpace:spec_decode_num_{name}_tokens_total"
        assert after[counter] - before[counter] == speculation[figure]
    stream = client.chat.completions.create(
        messages=QUESTION, model="smollm2", temperature=0, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    for _ in range(4):
        next(stream)
    stream.close()
    for _ in range(200):
        if _counted(server)["outpace:num_requests_running"] == 0:
            break
        time.sleep(0.05)
    assert _counted(server)["outpace:num_requests_running"] == 0
    assert _counted(server)['outpace:request_success_total{finished_reason="abort"'] == 1


def _counted(server: str) -> dict[str, float]:
    """Metrics of the one model; the first label alone where there are several."""
    found = {}
    for line in httpx.get(f"{server}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.replace('{model_name="smollm2"}', "").partition(",")[0]] = float(value)
    return found
