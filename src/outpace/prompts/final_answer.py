"""The final answer of a worked one, and whether it is the known one."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from outpace.prompts.task import ExactAnswer

_NUMBER = re.compile(r"[-−]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-−]?\$?\.\d+")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_SAID = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?\s*(.+)", re.IGNORECASE)
_ARTICLES = re.compile(r"^(?:the|an|a)\s+")


def final_answer(answer: str, task: ExactAnswer) -> str | None:
    """What the answer's text gives as its final answer; None where it gives none.

    Where a number is accepted: the last number after ``####``, else in the last ``\\boxed{...}``, else of the whole
    text. Otherwise what follows ``####``, is boxed or follows "answer is" or "answer:" (the last of each), else the
    last line that is not empty.
    """
    _, marked, after = answer.rpartition("####")
    boxed = _BOXED.findall(answer)
    if any(_number(one) is not None for one in task.accepted):
        for place in ([after] if marked else []) + boxed[-1:] + [answer]:
            if numbers := _NUMBER.findall(place):
                return str(numbers[0] if marked and place is after else numbers[-1])
        return None
    said = _SAID.findall(answer)
    lines = [line for line in (after if marked else answer).splitlines() if line.strip()]
    found = lines[0] if marked and lines else (boxed or said or lines or [""])[-1]
    return str(found).strip() or None


def is_right(final: str, task: ExactAnswer) -> bool:
    """Whether a final answer is one of the accepted: as numbers, or as words up to case, articles and punctuation."""
    number = _number(final)
    return any(
        number == _number(one) if number is not None and _number(one) is not None else _words(final) == _words(one)
        for one in task.accepted
    )


def _number(text: str) -> Decimal | None:
    try:
        found = Decimal(text.strip().rstrip(".").replace(",", "").replace("$", "").replace("−", "-"))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def _words(text: str) -> str:
    words = re.sub(r"[^\w\s]", " ", text.casefold()).split()
    return _ARTICLES.sub("", " ".join(words))
