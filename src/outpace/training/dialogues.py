"""Further turns of conversations: the user speaks again, and the target answers again.

What the user says next comes from the prompt where it has several turns, and is otherwise written by the model itself,
which is given the conversation and the beginning of a user's turn. A conversation whose tokens begin with those of the
turn before is one row with several answers; where the chat template writes earlier answers otherwise, each turn is a
row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outpace.core.errors import OutpaceError
from outpace.model import Model
from outpace.models.base import Message
from outpace.prompts.overlap import Overlap
from outpace.prompts.prompt import Prompt
from outpace.training.answers import PromptTokens, seed_of
from outpace.training.data_config import DataConfig
from outpace.training.self_written import SelfWritten
from outpace.training.shards import Conversation


def answer_text(model: Model, answer: Sequence[int]) -> str:
    """An answer in words, without the token that ends it."""
    ended = bool(answer) and answer[-1] in model.eos_ids
    return model.tokenizer.decode(answer[:-1] if ended else answer)


def turns_of(prompt: Prompt, most: int) -> int:
    """How many turns a conversation is to have: its prompt's own, or one to ``most`` by the prompt's key."""
    drawn = 1 + seed_of(f"{prompt.key} turns") % most
    return min(most, max(len(prompt.turns), drawn))


def joined(before: Sequence[Conversation], after: Conversation) -> list[Conversation]:
    """A conversation's rows with one more turn, ``after``: part of the last row where that is how it begins."""
    last = before[-1]
    begun = last.tokens
    if after.prompt[: len(begun)] != begun:
        return [*before, after]
    after.earlier = last.answers
    return [*before[:-1], after]


class Dialogues:
    """The conversations of some prompts beyond the first turn. ``longest``: tokens before an answer, at most.

    ``excluded``: texts with which no turn may overlap.
    """

    def __init__(
        self, model: Model, config: DataConfig, excluded: Overlap, longest: int, prompts: Sequence[Prompt]
    ) -> None:
        self._model, self._config, self._excluded, self._longest = model, config, excluded, longest
        self._going = {prompt.key: prompt for prompt in prompts if turns_of(prompt, config.turns) > 1}
        self._messages: dict[str, list[Message]] = {key: list(one.messages) for key, one in self._going.items()}
        self._writer = SelfWritten(model, config.seed, config.answering)

    def next_turn(self, turn: int, answered: Mapping[str, Sequence[Conversation]]) -> list[PromptTokens]:
        """What the target is to answer in ``turn`` (from 1), after what it has ``answered`` by key."""
        going, self._going = self._going, {}
        given: dict[str, str] = {}
        for key, prompt in going.items():
            rows = answered.get(key, ())
            ended = bool(rows) and rows[-1].answer[-1] in self._model.eos_ids
            said = answer_text(self._model, rows[-1].answer) if ended else ""
            if said.strip() and turns_of(prompt, self._config.turns) > turn:
                self._going[key] = prompt
                self._messages[key].append({"role": "assistant", "content": said})
                if turn < len(prompt.turns):
                    given[key] = prompt.turns[turn]
        open_ones = {key: self._messages[key] for key in self._going if key not in given}
        plan = self._config.plan
        written = self._writer.follow_ups(open_ones, turn, self._config.together, plan.data_over, self._longest)
        return self._asked(turn, {key: (given | written).get(key, "") for key in self._going})

    def _asked(self, turn: int, texts: Mapping[str, str]) -> list[PromptTokens]:
        found = []
        for key, text in texts.items():
            self._messages[key].append({"role": "user", "content": text})
            tokens = self._tokens(key) if text and text not in self._excluded else ()
            if 0 < len(tokens) <= self._longest:
                found.append(PromptTokens(key, tokens, *self._config.sampling.of(f"{key} turn {turn}")))
            else:
                del self._going[key]
        return found

    def _tokens(self, key: str) -> tuple[int, ...]:
        """The conversation so far; () where the template refuses it."""
        try:
            return tuple(self._model.tokenizer.chat(self._messages[key]))
        except OutpaceError:
            return ()
