"""Options: their names and other names, their types, and what help() says of them."""

from __future__ import annotations

import inspect
import math
import pydoc
from typing import Any, get_type_hints

import pytest

import outpace
from cli_support import EOS, toy
from outpace.api.chosen import Chosen, choose
from outpace.api.options import GenerateOptions, options, other_names
from outpace.api.result import Result
from outpace.constraints.grammar import Grammar
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.populations.beam_options import BeamOptions


def answer(**given: Any) -> Result:
    options: dict[str, Any] = {"max_new_tokens": 8, "method": "none", **given}
    found: Result = outpace.generate(toy(), "abc", **options)
    return found


@pytest.mark.parametrize("call", [outpace.generate, outpace.stream, outpace.agenerate, outpace.astream, outpace.chat])
def test_signatures_and_help_name_every_option(call: Any) -> None:
    parameters = inspect.signature(call).parameters
    assert set(options()) <= set(parameters)
    for one in parameters.values():
        assert one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        assert one.annotation is not one.empty
    shown = pydoc.plain(pydoc.render_doc(call))
    for name, (_, option) in options().items():
        assert parameters[name].default == option.default
        assert f"{name}: " in shown
    assert "**options" not in shown


def test_every_option_is_read() -> None:
    read = {*Chosen.__dataclass_fields__, *SamplingParams.__dataclass_fields__, "do_sample"}
    read |= set(BeamOptions.__dataclass_fields__)
    assert set(options()) <= read
    assert set(other_names().values()) <= set(options())
    assert set(get_type_hints(GenerateOptions)) >= set(options()) | set(other_names())


def test_a_text_is_one_item_not_its_characters() -> None:
    assert choose({"stop": "light"}).stop == ("light",)
    assert choose({"references": "text"}).references == ("text",)
    assert choose({"stop": ["a", "b"]}).stop == ("a", "b")
    plain = answer().text
    assert answer(stop="zzz" + plain[0]).text == plain  # not at any of its characters


def test_other_names_mean_the_same() -> None:
    assert choose({"max_tokens": 7}).max_new_tokens == 7
    assert choose({"max_completion_tokens": 7}).max_new_tokens == 7
    assert choose({"stop_sequences": "a"}) == choose({"stop_strings": ["a"]}) == choose({"stop": "a"})
    assert choose({"top_k": -1}).params.top_k == 0
    assert choose({"sampling_params": SamplingParams(0.5)}).params.temperature == 0.5
    assert choose({"temperature": None, "stop": None, "max_tokens": None}) == choose({})
    assert choose({"num_beams": 1, "use_cache": True, "pad_token_id": 3}) == choose({})
    assert choose({"eos_token_id": 5}).stop_ids(frozenset({1})) == {5}
    assert choose({"stop_token_ids": [5]}).stop_ids(frozenset({1})) == {1, 5}
    assert choose({"ignore_eos": True, "stop_token_ids": [5]}).stop_ids(frozenset({1})) == {5}


def test_do_sample() -> None:
    assert choose({"do_sample": False}).params.greedy
    assert choose({"do_sample": True}).params.temperature == 1.0
    assert choose({"do_sample": True, "temperature": 0.3}).params.temperature == 0.3
    assert choose({"do_sample": True, "params": SamplingParams(top_p=0.5)}).params == SamplingParams(1.0, top_p=0.5)
    assert choose({"do_sample": False, "params": SamplingParams(0.7)}).params.greedy
    for sample, temperature in ((True, 0.0), (False, 0.7)):
        with pytest.raises(BadInput, match="contradict each other"):
            choose({"do_sample": sample, "temperature": temperature})


def test_max_length_counts_the_prompt() -> None:
    prompt = len(toy().tokenizer.encode("abc"))
    assert len(answer(raw=True, max_length=prompt + 3, max_new_tokens=None).tokens) == 3
    with pytest.raises(BadInput, match="max_length=3 counts the prompt's tokens too, and it has 3"):
        answer(raw=True, max_length=prompt, max_new_tokens=None)


def test_logprobs_as_a_number_ask_for_alternatives() -> None:
    assert [len(one.top) for one in answer(logprobs=2).logprobs] == [2] * 8
    assert [len(one.top) for one in answer(logprobs=True).logprobs] == [0] * 8
    assert [len(one.top) for one in answer(top_logprobs=3).logprobs] == [3] * 8
    assert answer(logprobs=0).logprobs
    assert not answer().logprobs
    assert SamplingParams(logprobs=2) == SamplingParams(logprobs=True, top_logprobs=2)
    with pytest.raises(BadInput, match="contradict"):
        SamplingParams(logprobs=2, top_logprobs=3)


WRONG: dict[str, list[Any]] = {
    "temperature": ["hot", True, [1], -1.0, math.nan, math.inf],
    "top_k": ["5", 2.5, -2],
    "top_p": ["x", 0.0, 1.5],
    "min_p": ["x"],
    "repetition_penalty": [0, "x"],
    "max_new_tokens": ["5", 2.5, True, 0, -1, 1.0],
    "max_length": ["5", 0],
    "stop": [3, [3], [""], "", "\ud800", {"a": 1}],
    "references": [7, [7], b"bytes"],
    "logit_bias": [[1], "x", {"a": 1}, {1: "b"}, {1: math.inf}, {1: math.nan}, {999: 1.0}, {-1: 1.0}],
    "processors": [3, [object()], "x", [dict], [lambda a, b, c, d: a]],
    "grammar": [3, [], [3], ["a", "a"], "", {"type": "no type"}, Grammar.regex("(")],
    "constraint_weighting": [3, "fov", "fvo(max_nodes=x)", "fvo"],
    "grammar_limits": [3, (1, 2)],
    "seed": ["x", 1.5, True],
    "logprobs": ["x", -1, 1.5],
    "top_logprobs": ["x", -1, 5000],
    "method": [3, "no such method", None.__class__],
    "settings": [3, [1], "a"],
    "rule": [3, "no such rule"],
    "rule_settings": [3, [1], "a"],
    "controller": [3, "no such controller"],
    "controller_settings": [3, [1], {"threshold": 0.5}],
    "draft_model": [3, [3], {"a": 3}],
    "head": [3, [3], {"a": 3}],
    "datastore": [3],
    "namespace": [3],
    "raw": ["yes", 1],
    "ignore_eos": ["yes"],
    "do_sample": ["yes", 1],
    "eos_token_id": ["x", 1.5, [None], True],
    "stop_token_ids": ["x", [1.5], 1.5],
    "num_beams": ["x", 0, 2.5, True, 10**6],
    "length_penalty": ["x", math.nan, True],
    "early_stopping": ["later", 1],
    "best_of": ["x", 0, 2.5, True],
    "params": [3, {"temperature": 1}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_types_are_refused_in_one_line_that_names_them(name: str, value: Any) -> None:
    given = {name: value, **({"max_new_tokens": None} if name == "max_length" else {})}
    if name == "datastore":
        given["method"] = "rest"
    with pytest.raises(BadInput) as refused:
        answer(**given)
    said = str(refused.value)
    assert "\n" not in said
    assert any(
        word in said for word in (name, "stop string", "no such", "method", "choices", "choice", "schema", "expression")
    )


def test_wrong_types_cover_every_option() -> None:
    assert set(WRONG) == set(options()) - {"presence_penalty", "frequency_penalty"}  # as the repetition penalty


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("temprature", "did you mean 'temperature'?"),
        ("temp", "did you mean 'temperature'?"),
        ("topk", "did you mean 'top_k'?"),
        ("max_new_token", "did you mean 'max_new_tokens'?"),
        ("generation_config", "outpace.accelerate"),
        ("input_ids", "give the encoding as the prompt"),
        ("stream", "call stream()"),
        ("qqq", "help(outpace.generate)"),
    ],
)
def test_unknown_names_are_answered_with_what_was_meant(name: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        answer(**{name: 1})
    assert f"there is no option '{name}'" in str(refused.value)
    assert said in str(refused.value)


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(BadInput, match="num_beam_groups=4 cannot be honoured: diverse beam search"):
        answer(num_beam_groups=4)
    with pytest.raises(BadInput, match="use_cache=False cannot be honoured"):
        answer(use_cache=False)
    with pytest.raises(BadInput, match="max_new_tokens and max_tokens are the same option"):
        answer(max_tokens=3)
    with pytest.raises(BadInput, match="both limit"):
        answer(max_length=300)


def test_eos_token_id_goes_before_the_models_own() -> None:
    plain = answer(ignore_eos=True, max_new_tokens=30).tokens
    assert answer(eos_token_id=plain[2], max_new_tokens=30).tokens == plain[: plain.index(plain[2])]
    assert answer(stop_token_ids=[plain[2]], max_new_tokens=30).finish_reason == "stop"
    assert EOS not in answer(max_new_tokens=30).tokens
