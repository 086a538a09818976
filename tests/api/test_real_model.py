"""The Python API on the embedded model: every way of asking gives the same greedy answer."""

from __future__ import annotations

import asyncio

import pytest

from outpace.model import Model

PROMPT = "Name three colours."
LENGTH = 16


@pytest.mark.model
def test_every_way_of_asking_gives_the_same_answer(smollm2: Model) -> None:
    model = smollm2
    expected = model.generate(PROMPT, method="none", max_new_tokens=LENGTH)
    ids = model.tokenizer.chat([{"role": "user", "content": PROMPT}])
    assert model.generate([{"role": "user", "content": PROMPT}], max_new_tokens=LENGTH).text == expected.text
    assert [one.tokens for one in model.generate([PROMPT, ids, "Hello"], max_tokens=LENGTH)][:2] == [
        expected.tokens
    ] * 2
    assert "".join(model.stream(PROMPT, max_new_tokens=LENGTH, do_sample=False)) == expected.text

    async def ask() -> list[str]:
        pieces = [piece async for piece in model.astream(PROMPT, max_new_tokens=LENGTH)]
        both = await asyncio.gather(
            *(model.agenerate(PROMPT, max_new_tokens=LENGTH, method=name) for name in ("pld", "sam"))
        )
        return ["".join(pieces), *(one.text for one in both)]

    assert asyncio.run(ask()) == [expected.text] * 3


@pytest.mark.model
def test_a_conversation_keeps_its_kv_and_a_seed_repeats(smollm2: Model) -> None:
    with smollm2.chat(max_new_tokens=LENGTH) as talk:
        first = talk.say(PROMPT)
        second = talk.say("And three fruits?")
        assert talk.kept_tokens > first.prompt_tokens + len(first.tokens)
        history = talk.history[:3]
    assert smollm2.generate(history, max_new_tokens=LENGTH).text == second.text
    options = {"temperature": 0.8, "max_new_tokens": LENGTH, "method": "none", "n": 2}
    drawn = smollm2.generate(PROMPT, **options)  # type: ignore[call-overload]
    again = smollm2.generate(PROMPT, seed=drawn[0].seed, **options)  # type: ignore[call-overload]
    assert [one.text for one in drawn] == [one.text for one in again]
