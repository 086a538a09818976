"""The forms of a prompt: what is one, what is a batch, and what is neither."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import outpace
from cli_support import Letters, toy
from outpace.api.prompt_forms import read_prompts
from outpace.core.errors import BadInput

LETTERS = Letters()
HI = LETTERS.chat([{"role": "user", "content": "hi"}])
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", HI),
        ([USER], HI),
        ((USER,), HI),
        ([{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}], HI),
        ([1, 2, 3], [1, 2, 3]),
        ((1, 2, 3), [1, 2, 3]),
        ([np.int64(1), np.int32(2)], [1, 2]),
        (torch.tensor([1, 2]), [1, 2]),
        (np.array([1, 2], dtype=np.uint16), [1, 2]),
        ({"input_ids": [1, 2]}, [1, 2]),
        ({"input_ids": torch.tensor([0, 1, 2]), "attention_mask": torch.tensor([0, 1, 1])}, [1, 2]),
    ],
)
def test_one_prompt(given: Any, ids: list[int]) -> None:
    found = read_prompts(LETTERS, given)
    assert (found.ids, found.batch) == ([ids], False)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["hi"], [HI]),
        (("hi", "hi"), [HI, HI]),
        (["hi", [USER], [1, 2]], [HI, HI, [1, 2]]),
        ([torch.tensor([3]), {"input_ids": [4]}, torch.tensor([[5]])], [[3], [4], [5]]),
        ([[1], (2, 3)], [[1], [2, 3]]),
        ([[USER], [USER, {"role": "assistant", "content": "yes"}]], None),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({"input_ids": [[1, 2], [3]]}, [[1, 2], [3]]),
        ({"input_ids": [[0, 2], [3, 4]], "attention_mask": [[0, 1], [1, 1]]}, [[2], [3, 4]]),
        (
            {"input_ids": np.array([[0, 2], [3, 4]]), "attention_mask": np.array([[False, True], [True, True]])},
            [[2], [3, 4]],
        ),
    ],
)  # fmt: skip
def test_a_batch(given: Any, ids: list[list[int]] | None) -> None:
    found = read_prompts(LETTERS, given)
    assert found.batch
    assert found.ids == (ids or found.ids)
    assert len(found.ids) == (len(given) if ids is None else len(ids))


def test_raw_text_is_taken_as_it_is() -> None:
    assert read_prompts(LETTERS, "hi", raw=True).ids == [LETTERS.encode("hi")]
    assert read_prompts(LETTERS, ["hi", [1]], raw=True).ids == [LETTERS.encode("hi"), [1]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "not int 5"),
        (None, "not None"),
        (iter(["a"]), "not a list_iterator"),
        ([], "empty list"),
        ([[]], "prompt 1 of 1: the prompt is an empty list"),
        ([True, False], "not True or False"),
        ([1.5], "a list of float;"),
        ([1, "a"], "prompt 1 of 2: the prompt must be a text"),
        (["a", 5], "prompt 2 of 2: the prompt must be a text"),
        (["a", None], "not None"),
        ([1, USER], "a list of int, dict"),
        ([USER, "a"], "prompt 1 of 2: a message alone"),
        (["a", ["b"]], "prompt 2 of 2: a list of prompts inside a batch"),
        (["a", torch.ones(2, 2, dtype=torch.long)], "prompt 2 of 2: a batch of 2 inside a batch"),
        (USER, "a message alone"),
        ({}, '"input_ids"; it has nothing'),
        ({"text": "a"}, '"input_ids"; it has text'),
        ([{"role": "user"}], 'a text for "role" and for "content"'),
        ([{"content": "a"}], 'a text for "role" and for "content"'),
        ([{"role": "user", "content": [{"type": "image", "image": 1}]}], "not a part of type 'image'"),
        ([{"role": "user", "content": ["a"]}], "not a part str 'a'"),
        (torch.tensor(1), "not 0"),
        (torch.ones(1, 1, 1, dtype=torch.long), "not 3"),
        (torch.ones(2), "not float32"),
        (torch.ones(2, dtype=torch.bool), "not bool"),
        (np.array(["a"]), "whole numbers"),
        (torch.ones(0, 3, dtype=torch.long), "no rows"),
        ({"input_ids": np.array([[1, 2]]), "attention_mask": np.array([1])}, "equal"),
        ({"input_ids": np.array([[1, 2]]), "attention_mask": np.array([[0, 0]])}, "empty"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1]]}, "1 rows"),
        ({"input_ids": "text"}, "whole numbers"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_in_one_line(given: Any, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_prompts(LETTERS, given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_messages_are_never_raw() -> None:
    with pytest.raises(BadInput, match="leave out raw"):
        read_prompts(LETTERS, [USER], raw=True)


def test_ids_outside_the_vocabulary_are_refused_before_anything_runs() -> None:
    model = toy()
    with pytest.raises(BadInput, match="prompt 2 of 3: the prompt holds token 99; the vocabulary has 30"):
        outpace.generate(model, [[1, 2], [99], [3]])
    with pytest.raises(BadInput, match=r"^the prompt holds token -1"):
        outpace.generate(model, [-1])
    with pytest.raises(BadInput, match="prompt 1 of 2: the prompt has 500 tokens"):
        outpace.generate(model, [[1] * 500, [2]])
