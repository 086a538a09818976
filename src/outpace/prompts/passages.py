"""Prompts about passages: summaries, questions with the passages that answer them, rewritings.

Users paste long texts, and answers repeat parts of them: a head that was trained on short questions alone drafts badly
there. The passages are the target's own longer answers, and the questions the prompts that they answered, so that no
data set is needed. The caller leaves out answers of the held-out split.
"""

from __future__ import annotations

import random
import re

from outpace.prompts.overlap import words
from outpace.prompts.prompt import Prompt

SHORTEST = 240
"""Characters of a passage, at least."""
NEW = 0.7
"""Share of a passage's word triples that are distinct, at least: small targets repeat themselves in loops."""
_STEP = 2
"""Passages by which a prompt begins after the one before; it takes up to three, so neighbours share one."""
_END = re.compile(r"[.!?][\"')\]]*(?=\s|$)")
SUMMARIES = (
    "Summarize: {text}",
    "Summarize the following text.\n\n{text}",
    "{text}\n\nSummarize the above in a few sentences.",
    "Give me a short summary of this article:\n\n{text}",
    "{text}\n\nTL;DR",
    "What are the main points of this text?\n\n{text}",
    "Write a summary: {text}",
    "Read this and tell me briefly what it says:\n{text}",
)
ANSWERS = (
    "{text}\n{question}",
    "{text}\n\nQuestion: {question}",
    "Context:\n{text}\n\nQuestion: {question}\nAnswer:",
    "Use this information to answer the question.\n\n{text}\n\n{question}",
    "{question}\n\nHere is what I found:\n{text}",
)
REWRITINGS = (
    "Rewrite this in simpler words: {text}",
    "Correct any mistakes in the following text and give me the result:\n\n{text}",
    "{text}\n\nList the facts in this text.",
    "Shorten this paragraph:\n\n{text}",
)
_KINDS = (SUMMARIES, ANSWERS, REWRITINGS)
SHARES = (4, 4, 1)


class PassagePrompts:
    """Prompts about passages, by number: the same number, passages and seed, the same prompt."""

    name = "read"
    """Of their ids, ``read:NUMBER``: logs of earlier versions have it too."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._texts: list[tuple[str, str]] = []

    def add(self, question: str, answer: str) -> None:
        """One more passage, if it is long enough and not repetitive, and the prompt that it answers."""
        ends = [found.end() for found in _END.finditer(answer)]
        whole = answer[: ends[-1]].strip() if ends else ""  # an answer may have been cut off in a sentence
        if len(whole) >= SHORTEST and _new(whole) >= NEW:
            self._texts.append((question.strip(), whole))

    def __len__(self) -> int:
        """How many prompts the passages are enough for."""
        return max(0, (len(self._texts) - 1) // _STEP)

    def prompt(self, number: int) -> Prompt:
        """The prompt of a number in [0, ``len``)."""
        chance = random.Random(f"{self._seed} reading {number}")
        some = self._texts[number * _STEP : number * _STEP + _STEP + 1]
        forms = chance.choices(_KINDS, SHARES)[0]
        question = some[0][0]
        if forms is ANSWERS:  # among passages about other things
            passages = [text for _, text in some[: chance.choice((1, 2, 3))]]
            chance.shuffle(passages)
        else:
            passages = [text for _, text in some[: 1 if chance.random() < 0.5 else 2]]
        text = "\n\n".join(passages)
        return Prompt.single(f"{self.name}:{number}", chance.choice(forms).format(text=text, question=question))


def _new(text: str) -> float:
    said = words(text)
    triples = list(zip(said, said[1:], said[2:], strict=False))
    return len(set(triples)) / max(1, len(triples))
