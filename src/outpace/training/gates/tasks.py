"""Tasks with one right number, made up by a seed, for gates that are trained without a file of tasks.

Copying, looking up, small sums and comparisons: what models of a hundred million parameters answer, in many wordings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from outpace.prompts.prompt import OTHER, Prompt
from outpace.prompts.task import ExactAnswer

_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Lena")
_THINGS = ("apples", "books", "coins", "pencils", "stamps", "eggs", "cards", "shells", "stones", "tickets")
_PLACES = ("Room", "Bus", "Gate", "Platform", "Office", "Seat", "Locker", "Table")


def tasks(seed: int) -> Iterator[Prompt]:
    """Tasks without end; the same seed, the same tasks."""
    draw = random.Random(seed)
    number = 0
    while True:
        text, answer = draw.choice(_FORMS)(draw)
        yield Prompt(f"task:{number}", OTHER, (text,), task=ExactAnswer((str(answer),)))
        number += 1


def _sum(draw: random.Random) -> tuple[str, int]:
    one, other = draw.randint(1, 12), draw.randint(1, 9)
    return f"What is {one} plus {other}? Explain how you add them, then give the result.", one + other


def _gained(draw: random.Random) -> tuple[str, int]:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    had, got = draw.randint(1, 9), draw.randint(1, 9)
    return f"{name} has {had} {thing} and gets {got} more {thing}. How many {thing} does {name} have now?", had + got


def _told(draw: random.Random) -> tuple[str, int]:
    first, second = draw.sample(_NAMES, 2)
    ages = draw.sample(range(5, 90), 2)
    return (
        f"{first} is {ages[0]} years old. {second} is {ages[1]} years old. Write a sentence that says how old {second} "
        "is.",
        ages[1],
    )


def _copied(draw: random.Random) -> tuple[str, int]:
    value = draw.randint(100, 9999)
    return f"The code is {value}. Repeat the code in a short sentence.", value


def _placed(draw: random.Random) -> tuple[str, int]:
    place, value, thing = draw.choice(_PLACES), draw.randint(2, 99), draw.choice(_THINGS)
    return f"The {thing} are in {place} {value}. Where are the {thing}? Answer in one sentence.", value


def _next(draw: random.Random) -> tuple[str, int]:
    value = draw.randint(1, 40)
    return f"Which number comes right after {value}? Answer in one sentence.", value + 1


_FORMS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (_sum, _gained, _told, _copied, _placed, _next)
