"""Candidates: the next prompts to be answered, from all kinds of sources by their shares, and which are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from outpace.core.errors import BadInput, OutpaceError
from outpace.model import Model
from outpace.prompts.given_passages import GivenPassages
from outpace.prompts.overlap import Overlap, Seen
from outpace.prompts.passages import PassagePrompts
from outpace.prompts.prompt import Prompt
from outpace.training.data_config import DataConfig
from outpace.training.dataset import held_out
from outpace.training.dialogues import answer_text
from outpace.training.prompt_log import Log
from outpace.training.self_written import SelfWritten
from outpace.training.shards import Conversation

_TURNS = 64
"""Turns that the model is asked to write at once."""
_VAIN = 8
"""Requests for turns in a row without a usable one after which the model is taken to write none."""


class Candidates:
    """Judges prompts one after the other and writes each verdict to ``log``; those taken are in ``log.prompts``.

    ``excluded``: texts with which no prompt may overlap. ``longest``: tokens of a prompt within its chat template.
    A run that was stopped and begun again with the same log judges the same prompts in the same order.
    """

    def __init__(self, model: Model, config: DataConfig, excluded: Overlap, log: Log, longest: int) -> None:
        self._model, self._config, self._excluded = model, config, excluded
        self._log, self._longest = log, longest
        self._own = SelfWritten(model, config.seed, config.answering)
        self._passages: PassagePrompts | GivenPassages = config.texts or PassagePrompts(config.seed)
        self._seen = Seen()
        for prompt in log.prompts:
            self._seen.add(prompt.text)
        self._given = _in_turns([iter(one) for one in config.sources])
        self._given_left = bool(config.sources)
        self._turns: list[Prompt] = []
        self._written = False
        self._vain = self._owned = 0

    def add_answered(self, conversations: Iterable[Conversation]) -> None:
        """Enter prompts that were answered and are not in the log: no further prompt may be like them."""
        for one in conversations:
            opening = one.tokens[: one.answers[0][0]]
            self._seen.add(self._model.tokenizer.decode(self._own.turn.inside(opening)))

    def add_passages(self, conversations: Iterable[Conversation]) -> None:
        """Take answers as passages for further prompts.

        Answers to prompts about passages are left out, and so are those of the held-out split.
        """
        asked = {one.key: one for one in self._log.prompts if not one.id.startswith(f"{PassagePrompts.name}:")}
        for one in conversations:
            prompt = asked.pop(one.key, None)  # later turns that are conversations of their own have the same key
            if prompt is not None and not held_out(one.key):
                start, stop = one.answers[0]
                self._passages.add(prompt.text, answer_text(self._model, one.tokens[start:stop]))

    def more(self, count: int) -> bool:
        """Judge up to ``count`` more prompts, of the kind of source that is furthest behind its share.

        False when no source has any left. Raises BadInput when the model writes no usable turns.
        """
        log, config = self._log, self._config
        if log.passages < config.passages * len(log.prompts) and log.passages_judged < len(self._passages):
            self._judge([self._passages.prompt(log.passages_judged)])
            return True
        others = len(log.prompts) - log.passages
        share = config.self_written or 0.0
        texts = config.texts is not None and config.passages > 0.0  # they have their share from the beginning
        if self._given_left and log.own >= share * others:
            self._take_given(1 if share or texts else count)
            return True
        if config.self_written == 0.0:
            return False
        self._take_own(1 if texts or (0.0 < share < 1.0 and self._given_left) else count)
        return True

    def _take_given(self, count: int) -> None:
        taken = 0
        while taken < count:
            prompt = next(self._given, None)
            if prompt is None:
                self._given_left = False
                return
            if (prompt.id, prompt.key) not in self._log.judged:
                self._judge([prompt])
                taken += 1

    def _take_own(self, count: int) -> None:
        """Judge up to ``count`` of the turns that the model has written; it writes some where there are none."""
        if not self._turns:
            self._write_turns()
        some, self._turns = self._turns[:count], self._turns[count:]
        self._judge(some)

    def _write_turns(self) -> None:
        """Let the model write the next turns.

        The log counts turns once they are used up: until then a run that goes on writes the same ones again.
        """
        if self._written:
            self._log.write([{"turns": self._log.turns + _TURNS}])
            self._vain = 0 if self._log.own > self._owned else self._vain + 1
            if self._vain >= _VAIN:
                raise BadInput(
                    f"the model wrote no users' turns that can be used ({_VAIN * _TURNS} were asked for); "
                    "give prompts: --prompts FILE"
                )
        self._owned = self._log.own
        over = self._config.plan.half_of_data_over()  # they are to be answered as well
        found = self._own.turns(self._log.turns, _TURNS, self._config.together, over)
        self._turns = [prompt for prompt in found if (prompt.id, prompt.key) not in self._log.judged]
        self._written = True

    def _judge(self, prompts: Iterable[Prompt]) -> None:
        self._log.write([self._entry(prompt) for prompt in prompts])

    def _entry(self, prompt: Prompt) -> dict[str, Any]:
        """The log's line for a prompt; one that is taken counts as seen from here on."""
        entry: dict[str, Any] = {"origin": prompt.id, "key": prompt.key}
        if reason := self._against(prompt):
            return entry | {"removed": reason}
        self._seen.add(prompt.text)
        entry |= {"text": prompt.text} | ({"system": prompt.system} if prompt.system else {})
        later = prompt.turns[1 : self._config.turns]
        return entry | ({"later": list(later)} if later else {})

    def _against(self, prompt: Prompt) -> str:
        """Why this prompt is not answered, or ""."""
        if self._seen.duplicate(prompt.text):
            return "duplicates"
        if any(text in self._excluded for text in prompt.turns):
            return "overlaps with bench prompts"
        if self._seen.near(prompt.text):
            return "near duplicates"
        try:
            size = len(self._model.tokenizer.chat(prompt.messages))
        except OutpaceError:
            return "refused by the chat template"
        return "" if 0 < size <= self._longest else "too long"


def _in_turns(sources: list[Iterator[Prompt]]) -> Iterator[Prompt]:
    """One prompt of each source in turn, until all have ended."""
    while sources:
        for one in list(sources):
            prompt = next(one, None)
            if prompt is None:
                sources.remove(one)
            else:
                yield prompt
