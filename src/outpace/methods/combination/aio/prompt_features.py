"""What a prompt tells of how well drafts will be accepted, in a few numbers from 0 to 1.

They are counts over the prompt: none of its words is kept. Words are looked for in English; a prompt in another
language has the numbers of an open question, and the shares of repeated n-grams, code and given text, which need no
words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Seq
from contextlib import suppress

from outpace.core.errors import BadInput
from outpace.models.base import ChatTokenizer

FEATURES = ("any", "length", "repeated", "code", "given", "edit", "grounded", "translate", "math")
"""The numbers in order. ``any`` is always 1; ``length``: the logarithm of the number of tokens, 1 from 8,192 on;
``repeated``: share of the n-grams that occurred before in the prompt; ``code``: share of lines that look like code;
``given``: share of the prompt that is a text to work on, beside the instruction; the rest is 1 for the kind of question
(:data:`KINDS`), and 0 for all others; an open question has none."""
KINDS = {
    "edit": r"fix|correct|rewrite|rephrase|refactor|edit|proofread|debug|rename|reformat|convert|improve",
    "translate": r"translat\w*",
    "grounded": r"question|summar\w*|tl;?dr|extract|according to|based on|passages?|documents?|article|paragraph",
    "math": r"calculate|compute|solve|how (?:many|much|far|long)|total|percent|equation|sum of|\d+ *[-+*/^=] *\d+",
}
"""Words of an instruction by which a question's kind is told, the first kind that fits."""
NGRAM = 3
MOST = 4096
"""Tokens of a prompt that are looked at, the last ones."""
_LONG = 13.0
_TEXT, _FEW = 20, 3
"""Words after a colon that are taken for a text to work on; words that a line of instruction has at least."""
_KINDS = {kind: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for kind, words in KINDS.items()}
_CODE = re.compile(
    r"[;{}]\s*$|^\s*[{}\]]|^(?: {2,}|\t)\S"
    r"|^\s*(?:def|class|import|from \w+ import|return|function|const|let|var|public|private|static|#include|@\w+)\b"
    r"|^\s*(?:if|for|while|elif|else|try|except|with)\b.*[:{]\s*$"
)


class PromptFeatures:
    """Reads prompts of one tokenizer. Without one only length and n-grams are known; the rest is 0."""

    def __init__(self, tokenizer: ChatTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._frame: list[int] | None = None

    def of(self, prompt: Seq[int]) -> tuple[float, ...]:
        """The numbers of :data:`FEATURES` for a prompt's token ids."""
        own = self._without_frame(prompt)[-MOST:]
        text = "" if self._tokenizer is None else self._tokenizer.decode(own)
        where, given = _divided(text)
        kind = next((kind for kind, words in _KINDS.items() if words.search(where)), None)
        lines = [line for line in text.splitlines() if line.strip()]
        return (
            1.0,
            min(1.0, math.log2(1 + len(prompt)) / _LONG),
            _repeated(own),
            sum(_CODE.search(line) is not None for line in lines) / max(1, len(lines)),
            given,
            *(float(kind == one) for one in FEATURES[5:]),
        )

    def _without_frame(self, prompt: Seq[int]) -> Seq[int]:
        """The prompt without what the chat template writes around every question."""
        frame = self._template()
        shorter = min(len(frame), len(prompt))
        first = next((at for at in range(shorter) if frame[at] != prompt[at]), shorter)
        rest = shorter - first
        last = next((at for at in range(rest) if frame[-1 - at] != prompt[-1 - at]), rest)
        return prompt[first : len(prompt) - last]

    def _template(self) -> list[int]:
        if self._frame is None:
            self._frame = []
            if self._tokenizer is not None and self._tokenizer.has_chat_template:
                with suppress(BadInput):  # of a template that refuses this the frame counts as the user's
                    self._frame = list(self._tokenizer.chat([{"role": "user", "content": "?"}]))
        return self._frame


def _repeated(tokens: Seq[int]) -> float:
    grams = [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _divided(text: str) -> tuple[str, float]:
    """Where a prompt says what is wanted, and the share of the prompt that is not the instruction.

    What is wanted stands in the first or the last line: the instruction is the shorter one that has a few words; of a
    single line what is before a colon after which a longer text follows.
    """
    text = text.strip()
    lines = [one for one in text.splitlines() if len(one.split()) >= _FEW]
    if len(lines) > 1:
        where, instruction = f"{lines[0]}\n{lines[-1]}", min(lines[0], lines[-1], key=len)
    else:
        head, colon, rest = text.partition(":")
        where = instruction = head if colon and len(rest.split()) >= _TEXT else text
    return where, 1.0 - len(instruction) / len(text) if text else 0.0
