"""Logits processors of transformers, and functions, beside outpace's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import outpace
from cli_support import toy
from outpace.api.processor_forms import read_processors
from outpace.core.errors import BadInput

FAVOURED = 5


class Favour(hf.LogitsProcessor):  # type: ignore[misc]
    """Raises one token's score after every token but itself."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        assert input_ids.dtype == torch.long
        if input_ids[0, -1] != FAVOURED:
            scores[0, FAVOURED] += 100.0  # in place, as many do
        return scores


def favour(ids: list[int], logits: Tensor) -> Tensor:
    if ids[-1] != FAVOURED:
        logits[FAVOURED] += 100.0
    return logits


def named_as_transformers(input_ids: Tensor, scores: Tensor) -> Tensor:
    return Favour()(input_ids, scores)


class Protocol:
    def begin(self, prompt: Sequence[int]) -> int:
        return prompt[-1]

    def advance(self, state: int, token: int) -> int:
        return token

    def process(self, state: int, logits: Tensor) -> Tensor:
        return favour([state], logits.clone())


FORMS = [
    Favour(),
    [Favour()],
    hf.LogitsProcessorList([Favour()]),
    [hf.LogitsProcessorList([Favour()])],
    favour,
    [favour],
    (favour,),
    named_as_transformers,
    Protocol(),
]


@pytest.mark.parametrize("method", ["none", "sam"])
@pytest.mark.parametrize("given", FORMS)
def test_every_form_gives_the_same_answer(given: Any, method: str) -> None:
    expected = outpace.generate(toy(), "abc", method="none", max_new_tokens=24, processors=Protocol())
    assert FAVOURED in expected.tokens
    found = outpace.generate(toy(), "abc", method=method, max_new_tokens=24, processors=given)
    assert found.tokens == expected.tokens


def test_three_arguments_are_prompt_answer_and_logits() -> None:
    seen: list[tuple[int, int]] = []

    def watch(prompt: list[int], answer: list[int], logits: Tensor) -> Tensor:
        seen.append((len(prompt), len(answer)))
        return logits

    found = outpace.generate(toy(), [1, 2, 3], method="none", max_new_tokens=4, processors=watch)
    assert seen == [(3, at) for at in range(len(found.tokens))]


def test_what_they_do_wrong_is_said_with_their_names() -> None:
    def broken(ids: list[int], logits: Tensor) -> Tensor:
        raise ValueError("no such rule")

    with pytest.raises(BadInput, match="logits processor 'broken' raised ValueError in process: no such rule"):
        outpace.generate(toy(), "abc", processors=broken)
    with pytest.raises(BadInput, match="logits processor 'forgetful' returned NoneType instead of logits"):
        outpace.generate(toy(), "abc", processors=forgetful)


def forgetful(ids: list[int], logits: Tensor) -> None:
    logits[3] = 0.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "processors must be a logits processor"),
        ([favour, 3], r"processors\[1\] must be a logits processor"),
        (Favour, "is the class Favour; give an object of it"),
        ([lambda ids: ids], "takes 1 arguments"),
    ],
)
def test_what_is_no_processor_is_refused(given: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_processors(given)
