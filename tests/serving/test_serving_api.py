"""The routes, with the toy model in this process: answers are those of outpace.generate, and no field is ignored."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cli_support import Letters, toy
from outpace.serving.schemas import ChatRequest, CompletionRequest
from serving_support import CHAT, COMPLETE, USER, chat, client, complete, events, refused


def test_greedy_answers_are_those_of_generate() -> None:
    model = toy()
    with client() as to:
        answer = chat(to)
        text = complete(to)["choices"][0]["text"]
    expected = model.generate(USER, max_new_tokens=12)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "toy"
    assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)
    assert text == model.generate("ab", raw=True, max_new_tokens=12).text


def test_seeded_answers_are_those_of_generate_and_repeat() -> None:
    about: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    with client() as to:
        first, second = (chat(to, n=3, **about) for _ in range(2))
        other = chat(to, n=3, temperature=1.0, seed=20)
    texts = [one["message"]["content"] for one in first["choices"]]
    assert texts == [one["message"]["content"] for one in second["choices"]]
    assert texts != [one["message"]["content"] for one in other["choices"]]
    expected = toy().generate(USER, n=3, method="pld", max_new_tokens=12, **about)
    assert texts == [one.text for one in expected]
    assert len(set(texts)) == 3


def test_a_request_samples_at_temperature_1_unless_it_says_otherwise() -> None:
    with client() as to:
        [one] = to.post(CHAT, json={"model": "toy", "messages": USER, "seed": 3, "max_tokens": 12}).json()["choices"]
    assert (
        one["message"]["content"] == toy().generate(USER, method="pld", temperature=1.0, seed=3, max_new_tokens=12).text
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stream_is_the_same_answer_in_pieces(path: str) -> None:
    body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": ["ab", "cd"]}
    about: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, **body}
    with client() as to:
        whole = to.post(path, json={"model": "toy", "max_tokens": 12, **about}).json()
        chunks = events(to, path, stream_options={"include_usage": True}, **about)
    *parts, last = chunks
    assert {one["id"] for one in chunks} == {chunks[0]["id"]}
    assert all(one["usage"] is None and len(one["choices"]) == 1 for one in parts)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [one["choices"][0] for one in parts if one["choices"][0]["index"] == choice["index"]]
        pieces = [one["delta"].get("content", "") if path == CHAT else one["text"] for one in mine]
        assert "".join(pieces) == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
        if path == CHAT:
            assert mine[0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_every_chunk_may_have_the_counts_so_far(path: str) -> None:
    """As clients of vLLM ask for it."""
    body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "ab"}
    asked = {"include_usage": True, "continuous_usage_stats": True}
    with client() as to:
        *parts, last = events(to, path, stream_options=asked, ignore_eos=True, **body)
        counted = [one["usage"]["completion_tokens"] for one in parts]
        assert counted == sorted(counted)
        assert counted[-1] == last["usage"]["completion_tokens"] == 12
        assert {one["usage"]["prompt_tokens"] for one in parts} == {last["usage"]["prompt_tokens"]}
        refused(
            to, 400, "needs 'include_usage'", path=path, stream=True, stream_options={"continuous_usage_stats": True}
        )


def test_without_stream_options_chunks_have_no_usage() -> None:
    with client() as to:
        assert not any("usage" in one for one in events(to, CHAT, messages=USER))


def test_an_answer_ends_before_a_stop_text() -> None:
    with client() as to:
        text = chat(to)["choices"][0]["message"]["content"]
        stop = text[4:6]
        for given in (stop, [stop, "never"]):
            [found] = chat(to, stop=given)["choices"]
            assert found["message"]["content"] == text[: text.index(stop)]
            assert found["finish_reason"] == "stop"


def test_penalties_and_biases_change_the_answer_as_in_generate() -> None:
    with client() as to:
        for name, value in (("presence_penalty", 1.5), ("frequency_penalty", 2.0), ("repetition_penalty", 3.0)):
            about: dict[str, Any] = {name: value}
            expected = toy().generate(USER, max_new_tokens=12, **about).text
            assert chat(to, **{name: value})["choices"][0]["message"]["content"] == expected
        biased = chat(to, logit_bias={"4": 100})["choices"][0]["message"]["content"]
    assert biased == "d" * 12


def test_logprobs_of_a_chat() -> None:
    with client() as to:
        answer = chat(to, logprobs=True, top_logprobs=2)
        streamed = events(to, CHAT, messages=USER, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    expected = toy().generate(USER, max_new_tokens=12, top_logprobs=2).logprobs
    assert len(content) == answer["usage"]["completion_tokens"] == len(expected)
    assert "".join(one["token"] for one in content) == answer["choices"][0]["message"]["content"]
    for one, wanted in zip(content, expected, strict=True):
        assert bytes(one["bytes"]).decode() == one["token"]
        assert math.isclose(one["logprob"], wanted.logprob, abs_tol=1e-5)
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]  # greedy: the token is the likeliest
        assert len(one["top_logprobs"]) == 2
    parts = [one["choices"][0]["logprobs"] for one in streamed]
    assert [token for part in parts if part for token in part["content"]] == content


def test_logprobs_of_a_completion_have_offsets_into_its_text() -> None:
    with client() as to:
        found = complete(to, logprobs=1)["choices"][0]
    shown = found["logprobs"]
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert found["text"][offset : offset + len(token)] == token
    assert "".join(shown["tokens"]) == found["text"] != ""
    assert len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == len(shown["tokens"])


def test_prompts_of_a_completion_may_be_ids_or_several() -> None:
    with client() as to:
        one = complete(to, prompt="ab")["choices"][0]["text"]
        other = complete(to, prompt="cd")["choices"][0]["text"]
        for given in (["ab", "cd"], [[1, 2], [3, 4]]):
            answer = complete(to, prompt=given)
            assert [choice["text"] for choice in answer["choices"]] == [one, other]
            assert answer["usage"]["prompt_tokens"] == 4
        assert complete(to, prompt=[1, 2], echo=True)["choices"][0]["text"] == "ab" + one


def test_best_of_returns_the_likeliest() -> None:
    about: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    with client() as to:
        every = complete(to, n=4, logprobs=0, **about)["choices"]
        best = complete(to, n=2, best_of=4, **about)
    ranked = sorted(every, key=lambda one: -sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["tokens"]))
    assert [one["text"] for one in best["choices"]] == [one["text"] for one in ranked[:2]]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == sum(len(one["logprobs"]["tokens"]) for one in every)


def test_a_request_chooses_how_it_drafts() -> None:
    with client() as to:
        usual = chat(to)
        off = chat(to, speculation={"off": True})
        other = chat(to, speculation={"method": "sam", "params": {"num_draft_tokens": 3}})
        predicted = chat(
            to, prediction={"type": "content", "content": usual["choices"][0]["message"]["content"]}, max_tokens=12
        )
    assert off["usage"]["speculation"]["drafted"] == 0
    assert off["usage"]["speculation"]["mean_acceptance_length"] == 1
    assert usual["usage"]["speculation"]["method"] == "pld"
    assert other["usage"]["speculation"]["method"] == "sam"
    assert predicted["usage"]["speculation"]["accepted"] > usual["usage"]["speculation"]["accepted"]
    assert {one["choices"][0]["message"]["content"] for one in (usual, off, other, predicted)} == {
        usual["choices"][0]["message"]["content"]
    }


def test_a_method_is_built_once_for_its_name_settings_and_rule() -> None:
    from outpace.serving.schemas import Speculation
    from serving_support import service

    [offered] = service().offered.values()
    wish = Speculation(method="sam", params={"num_draft_tokens": 3})
    assert offered.method(wish) is offered.method(wish.model_copy())
    assert offered.method(wish) is not offered.method(Speculation(method="sam"))
    assert offered.method(None) is offered.method(Speculation(namespace="x"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("functions", []),
        ("function_call", "auto"),
        ("reasoning_effort", "low"),
        ("store", True),
        ("service_tier", "flex"),
        ("best_of", 2),
        ("web_search_options", {}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with client() as to:
        error = refused(to, 400, f"'{field}' cannot be honoured: ", **{field: value})
    assert error["param"] == field


def test_values_that_change_nothing_are_accepted() -> None:
    neutral: dict[str, Any] = {name: values[0] for name, values in ChatRequest.NEUTRAL.items()}
    empty = dict.fromkeys(ChatRequest.REFUSED)
    harmless = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s"}
    with client() as to:
        assert chat(to, **neutral, **harmless)["choices"] == chat(to)["choices"] == chat(to, **empty)["choices"]
        assert complete(to, suffix="", user="u")["choices"] == complete(to)["choices"]


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_unknown_fields_are_refused_with_a_near_name(model: type[ChatRequest | CompletionRequest]) -> None:
    path = CHAT if model is ChatRequest else COMPLETE
    with client() as to:
        error = refused(to, 400, "there is no field 'temprature'", "'temperature'", path=path, temprature=1)
        assert error["param"] == "temprature"
        inner = refused(to, 400, "'include_usage'", path=path, stream=True, stream_options={"include_usages": True})
    assert inner["param"] == "stream_options.include_usages"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("n", 0),
        ("n", 10**6),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("seed", 2**63),
        ("seed", "x"),
        ("presence_penalty", 3),
        ("logit_bias", {"4": 1000}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"\uff11": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"1": 1, " 1": 2}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"4000": 1}),
        ("top_logprobs", 50),
        ("messages", []),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "boss", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", "hello"),
        ("stream_options", {"include_usage": True}),
        ("speculation", {"method": "plx"}),
        ("speculation", {"method": "pld", "params": {"num_draft_tokens": 10**9}}),
        ("speculation", {"method": "pld", "rule": "none such"}),
        ("speculation", {"off": True, "method": "pld"}),
        ("speculation", {"off": True, "rule_params": {"delta": 1}}),
        ("speculation", {"rule_params": {"delta": 1}}),
        ("speculation", {"rule": "cactus", "rule_params": {"delta": -1}}),
        ("speculation", {"rule": "cactus", "rule_params": {"detla": 1}}),
        ("priority", 5),
        ("tool_choice", "auto"),
        ("model", 5),
    ],
)
def test_absurd_values_are_refused(field: str, value: Any) -> None:
    with client() as to:
        error = refused(to, 400, **{field: value})
        assert error["type"] == "invalid_request_error"
        chat(to)  # the server lives on


def test_a_lossy_rule_is_used_where_it_is_asked_for_and_named_in_the_usage() -> None:
    with client() as to:
        wish = {"method": "pld", "rule": "tas", "rule_params": {"epsilon": 0.2}}
        answer = chat(to, speculation=wish)
        named = "typical(epsilon=0.2, delta=0.3, greedy_first=True)"
        assert answer["usage"]["speculation"]["lossy"] == named
        assert answer["lossy"] == named
        assert all(chunk["lossy"] == named for chunk in events(to, CHAT, messages=USER, speculation=wish))
        plain = chat(to)
        assert plain["usage"]["speculation"]["lossy"] is None
        assert "lossy" not in plain
        assert 'outpace:lossy_requests_total{model_name="toy",rule="typical"} 2.0' in to.get("/metrics").text


def test_bodies_that_are_no_json_are_refused() -> None:
    with client() as to:
        for body in (b"{", b"", b"[]", b'"x"', b"{" * 50_000, b'{"a":' * 50_000, b"\xff", b"1" * 5000):
            answer = to.post(CHAT, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, body[:20]
            assert answer.json()["error"]["message"]
        answer = to.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
        assert "Content-Type" in answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused() -> None:
    with client(most_bytes=1000) as to:
        refused(to, 413, "1,000 bytes", messages=[{"role": "user", "content": "x" * 2000}])

        def parts() -> Any:
            for _ in range(10):
                yield b" " * 200

        answer = to.post(CHAT, content=parts(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with client() as to:
        for about in ({"max_tokens": 500}, {"messages": [{"role": "user", "content": "x" * 500}]}):
            error = refused(to, 400, "400 tokens", **about)
            assert error["code"] == "context_length_exceeded"
        full = chat(to, ignore_eos=True, max_tokens=None)
    assert full["choices"][0]["finish_reason"] == "length"
    assert full["usage"]["total_tokens"] == 400


LENGTHY = [{"role": "user", "content": "x" * 500}]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"max_tokens": 390}, "max_tokens", "asks for 390"),
        (CHAT, {"max_completion_tokens": 390}, "max_completion_tokens", "asks for 390"),
        (CHAT, {"messages": LENGTHY, "max_completion_tokens": 5}, "messages", "leaves no room"),
        (CHAT, {"messages": LENGTHY}, "messages", "leaves no room"),
        (COMPLETE, {"max_tokens": 399}, "max_tokens", "asks for 399"),
        (COMPLETE, {"prompt": "x" * 500, "max_tokens": 5}, "prompt", "leaves no room"),
        (COMPLETE, {"prompt": "x" * 500}, "prompt", "leaves no room"),
    ],
)
def test_what_is_too_long_is_named(path: str, body: dict[str, Any], param: str, says: str) -> None:
    with client() as to:
        error = refused(to, 400, "400 tokens", says, path=path, **body)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_a_completion_without_a_limit_may_fill_the_context() -> None:
    with client() as to:
        body = {"model": "toy", "prompt": "x" * 395, "temperature": 0, "ignore_eos": True}
        answer = to.post(COMPLETE, json=body).json()
    assert answer["usage"]["total_tokens"] == 400


def test_unknown_models_and_paths() -> None:
    with client() as to:
        error = refused(to, 404, "there is no model 'toys'", "'toy'", model="toys")
        assert error["code"] == "model_not_found"
        assert to.get("/v1/models/toys").status_code == 404
        assert to.get("/nothing").json()["error"]["type"] == "not_found_error"
        assert to.get(CHAT).status_code == 405
        assert to.post("/v1/embeddings", json={"input": "x"}).status_code == 400
        assert "embeddings" in to.post("/v1/embeddings", json={}).json()["error"]["message"]
        assert [one["id"] for one in to.get("/v1/models").json()["data"]] == ["toy"]
        assert to.get("/v1/models/toy").json()["object"] == "model"
        assert to.get("/health").status_code == to.get("/ready").status_code == 200
        assert to.head("/health").status_code == to.head("/ready").status_code == 200
        assert to.get("/openapi.json").status_code == 404


def test_ids_of_tokens_are_returned_on_request() -> None:
    """As vLLM names the fields; log-probabilities are by id. In a stream the ids of the prompt come once."""
    with client() as to:
        asked: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 2}
        choice = complete(to, **asked)["choices"][0]
        assert choice["prompt_token_ids"] == Letters().encode("ab")
        assert Letters().decode(choice["token_ids"]) == choice["text"]
        named = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == named
        assert all(name in top for name, top in zip(named, choice["logprobs"]["top_logprobs"], strict=True))
        assert choice["logprobs"]["text_offset"] == list(range(len(named)))
        parts = [one["choices"][0] for one in events(to, COMPLETE, prompt="ab", **asked)]
        assert [token for one in parts for token in one["token_ids"]] == choice["token_ids"]
        assert [one["prompt_token_ids"] for one in parts if one["prompt_token_ids"]] == [choice["prompt_token_ids"]]
        assert "token_ids" not in complete(to)["choices"][0]
