"""Prompts that the target writes itself, for training without a data set.

An instruct model that is given the beginning of a user's turn continues it with what users are likely to say (Magpie:
Xu et al. 2024, arXiv 2406.08464). A base model continues with text of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from outpace.core.errors import OutpaceError
from outpace.model import Model
from outpace.models.base import Message
from outpace.prompts.prompt import Prompt
from outpace.training.answers import Answering, PromptTokens, answered, seed_of

_PROBES = ("Qz", "7 x", "zebra", "¿")
"""Texts whose first and last tokens differ: what their conversations have in common is the template's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of the chat template before (``head``) and after (``tail``) a user's turn; ``ends``: what ends one."""

    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()

    def inside(self, prompt: Sequence[int]) -> Sequence[int]:
        """The tokens of the user's words in a prompt of this template."""
        head, tail = list(self.head), list(self.tail)
        start = len(head) if list(prompt[: len(head)]) == head else 0
        stop = len(prompt) - len(tail) if tail and list(prompt[-len(tail) :]) == tail else len(prompt)
        return prompt[start:stop]


def user_turn(model: Model) -> Turn:
    """The template's tokens around a user's turn. Without a template: the first tokens of a text, and no end."""
    words = model.tokenizer
    wrapped = _with_user(model, [])
    bare = [words.encode(text) for text in _PROBES]
    if wrapped == bare:
        return Turn(tuple(_common(bare) or sorted(model.eos_ids)[:1] or words.encode("\n")))
    head = _common(wrapped)
    tail = _common([one[len(head) :][::-1] for one in wrapped])[::-1]
    begins = tuple(head) or tuple(sorted(model.eos_ids)[:1])
    return Turn(begins, tuple(tail), frozenset({*tail[:1], *model.eos_ids}))


def _with_user(model: Model, before: Sequence[Message]) -> list[list[int]]:
    """The tokens of messages and one more of the user, which differs."""
    return [model.tokenizer.chat([*before, {"role": "user", "content": text}]) for text in _PROBES]


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """The longest common prefix."""
    first = list(rows[0])
    differs = (at for at in range(len(first)) if any(list(row[at : at + 1]) != [first[at]] for row in rows))
    return first[: next(differs, len(first))]


class SelfWritten:
    """User turns that the model writes, by number: the same number and seed, the same turn."""

    name = "self"
    longest = 160
    """Tokens within which a turn must have ended."""
    beginning = 24
    """Tokens of a base model's text that make a prompt."""
    shortest = 8
    """Characters that a turn must have."""

    def __init__(self, model: Model, seed: int = 0, answering: Answering | None = None) -> None:
        """``answering``: what writes in the target's place."""
        self._model, self._seed = model, seed
        self._answered: Answering = answering or partial(answered, model.target)
        self.turn = user_turn(model)

    @property
    def template(self) -> bool:
        """Whether the model has a chat template; without one it continues any text."""
        return bool(self.turn.ends)

    def turns(self, start: int, count: int, together: int, over: Callable[[], bool] = lambda: False) -> list[Prompt]:
        """The usable ones of turns ``start`` to ``start + count``, sampled at temperature 1, ``together`` at once.

        Those that have ended by then, once ``over`` says that the time is used up.
        """
        prompts = (
            PromptTokens(str(number), self.turn.head, 1.0, seed_of(f"{self._seed} turn {number}"))
            for number in range(start, start + count)
        )
        most = min(self.longest if self.template else self.beginning, self._model.target.context_length // 2)
        stops = self.turn.ends or self._model.eos_ids
        found: dict[int, str] = {}
        for one in self._answered(prompts, (), most=most, stop_ids=stops, together=together, over=over):
            if text := self._usable(one.answer, stops):
                found[int(one.key)] = text
        return [Prompt.single(f"{self.name}:{number}", found[number]) for number in sorted(found)]

    def _usable(self, tokens: Sequence[int], stops: frozenset[int]) -> str:
        """What was written, in words; "" for what is no turn: one must have ended, the beginning of a text must not."""
        ended = tokens[-1] in stops
        if ended is not self.template:
            return ""
        text = self._model.tokenizer.decode(tokens[:-1] if ended else tokens).strip()
        return text if len(text) >= self.shortest and "\ufffd" not in text else ""

    def follow_ups(
        self,
        dialogues: Mapping[str, Sequence[Message]],
        turn: int,
        together: int,
        over: Callable[[], bool] = lambda: False,
        longest: int | None = None,
    ) -> dict[str, str]:
        """What the user says next in ``dialogues``, by their keys: of those where something usable was written.

        ``turn``: which turn it is, for the seed. ``longest``: tokens of a dialogue, at most. A model without a chat
        template writes none.
        """
        if not self.template:
            return {}
        prompts = []
        for key, messages in dialogues.items():
            try:
                before = tuple(_common(_with_user(self._model, messages)))
            except OutpaceError:  # the template refuses it
                continue
            if longest is None or len(before) + self.longest <= longest:
                prompts.append(PromptTokens(key, before, 1.0, seed_of(f"{self._seed} turn {turn} of {key}")))
        ends = self.turn.ends
        answers = self._answered(prompts, (), most=self.longest, stop_ids=ends, together=together, over=over)
        texts = {one.key: self._usable(one.answer, ends) for one in answers}
        return {prompt.key: texts[prompt.key] for prompt in prompts if texts.get(prompt.key)}
