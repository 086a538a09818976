"""Turns that the target writes in its users' stead: prompts where there is no data at hand.

An instruct model that is shown the beginning of a user's turn goes on with one: what users say, as far as the model
knows (Magpie: Xu et al. 2024, arXiv 2406.08464). A base model goes on with text of any kind. So a head can be trained
on what its target is likely to meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.model import Model
from outpace.prompts.sources import Ask, seed_of
from outpace.training.answers import Prompt, answered

_PROBES = ("Qz", "7 x", "zebra", "¿")
"""Texts whose tokens differ at both ends: what all of their conversations share is the template's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's turn in tokens: what comes before its first words, and after its last. ``ends``: tokens that end one."""

    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()

    def inside(self, prompt: Sequence[int]) -> Sequence[int]:
        """The user's words in a prompt of this template, as tokens."""
        head, tail = list(self.head), list(self.tail)
        start = len(head) if list(prompt[: len(head)]) == head else 0
        stop = len(prompt) - len(tail) if tail and list(prompt[-len(tail) :]) == tail else len(prompt)
        return prompt[start:stop]


def user_turn(model: Model) -> Turn:
    """The template's part of a user's turn. Without a template: what a text begins with, and no end."""
    words = model.tokenizer
    wrapped = [words.chat([{"role": "user", "content": text}]) for text in _PROBES]
    bare = [words.encode(text) for text in _PROBES]
    if wrapped == bare:
        return Turn(tuple(_common(bare) or sorted(model.eos_ids)[:1] or words.encode("\n")))
    head = _common(wrapped)
    tail = _common([one[len(head) :][::-1] for one in wrapped])[::-1]
    begins = tuple(head) or tuple(sorted(model.eos_ids)[:1])
    return Turn(begins, tuple(tail), frozenset({*tail[:1], *model.eos_ids}))


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """What all of them begin with."""
    first = list(rows[0])
    end = next(
        (at for at in range(len(first)) if any(list(row[at : at + 1]) != [first[at]] for row in rows)), len(first)
    )
    return first[:end]


class SelfWritten:
    """Turns that the model writes in its users' stead, by number: the same number, the same turn."""

    name = "self"
    longest = 160
    """Tokens within which a turn must have ended."""
    beginning = 24
    """Tokens of a base model's text that make a prompt."""
    shortest = 8
    """Characters that a turn must have."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        self._model, self._seed = model, seed
        self.turn = user_turn(model)

    @property
    def template(self) -> bool:
        """Whether the model has users, or goes on with any text."""
        return bool(self.turn.ends)

    def origin(self, number: int) -> str:
        """What a turn of this number is called."""
        return f"{self.name}:{number}"

    def turns(self, start: int, count: int, together: int) -> list[Ask]:
        """The usable ones among turns ``start`` to ``start + count``, written at temperature 1."""
        prompts = (
            Prompt(str(number), self.turn.head, 1.0, seed_of(f"{self._seed} turn {number}"))
            for number in range(start, start + count)
        )
        most = min(self.longest if self.template else self.beginning, self._model.target.context_length // 2)
        stops = self.turn.ends or self._model.eos_ids
        found: dict[int, str] = {}
        for one in answered(self._model.target, prompts, (), most=most, stop_ids=stops, together=together):
            ended = one.answer[-1] in stops
            if ended is not self.template:
                continue  # a turn without an end is no turn; a text that ends at once is no beginning
            text = self._model.tokenizer.decode(one.answer[:-1] if ended else one.answer).strip()
            if len(text) >= self.shortest and "\ufffd" not in text:
                found[int(one.key)] = text
        return [Ask(self.origin(number), found[number]) for number in sorted(found)]
