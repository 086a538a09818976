"""Prompts after which every kind of drafter drafts: heads do so anywhere, lookups where texts repeat."""

from __future__ import annotations

import random
from collections.abc import Sequence

_WORDS = ("red", "green", "blue", "one", "two", "three")


def engine_prompts(texts: Sequence[str]) -> list[str]:
    """In turn: a text as it is, one whose repetition was begun, and a random sequence of few words.

    A lookup's draft is nearly certain in the second, and often wrong in the third, where a wrong rule shows.
    """
    return [_FORMS[number % len(_FORMS)](text, number) for number, text in enumerate(texts)]


def _begun(text: str, number: int) -> str:
    return f"{text}\n\n{text}\n\n{text[: len(text) // 2]}"


def _random(text: str, number: int) -> str:
    return ", ".join(random.Random(number).choices(_WORDS, k=40)) + ","


def _itself(text: str, number: int) -> str:
    return text


_FORMS = (_itself, _begun, _random)
