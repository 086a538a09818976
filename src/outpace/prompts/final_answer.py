"""The final answer of a worked one, and whether it is the known one."""

from __future__ import annotations

import re
from decimal import Decimal, DivisionByZero, InvalidOperation

from outpace.prompts.task import ExactAnswer

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGN = r"(?:(?<![\w)\]}%])[-−])?"  # behind a digit or a word it joins two: 2019-2020
_NUMBER = re.compile(rf"{_SIGN}\$?(?:{_DIGITS})")
_FRACTION = re.compile(rf"{_SIGN}\d+/\d+(?!\d)|{_NUMBER.pattern}")
_WHOLE = re.compile(rf"[-−+]?\$?(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}})?")
_MARK = re.compile(r"(?<!#)####(?!#)")
# The number is taken whole or not at all; "#### 2. Add up" is a heading.
_MARKED = re.compile(rf"{_MARK.pattern}[\s*_]*((?>{_FRACTION.pattern}))(?![.):]+[ \t]+\w)")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SAID = re.compile(r".*\banswer\b[*_`]*(?:\s+is\b|\s*:)[*_`]*\s*:?\s*(.+)", re.IGNORECASE)
_ARTICLES = re.compile(r"^(?:the|an|a)\s+")
_LATEX = (
    (re.compile(r"\{,\}|\\[,!]|(?<=\d)[\u00a0\u2009\u202f](?=\d{3})"), ""),  # between thousands
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\d?frac\s*\{(\d+)\}\s*\{(\d+)\}"), r"\1/\2"),
    (re.compile(r"\\\$"), "$"),
)
_MARKUP = (
    (re.compile(r"[–—−]"), "-"),
    (re.compile(r"""["'“”‘’*`$,;:!?]|\\[()]|\.+(?=\s|$)|(?<=[^\W\d])-(?=[^\W\d])|(?<=\d)%(?!\w)"""), " "),
    (re.compile(r"\s*([^\w\s])\s*"), r"\1"),  # x = 5
    (re.compile(r"^\((\w+)\)$"), r"\1"),  # the letter of a choice
)
_CLAUSE = re.compile(r"[.,;!?]\s")


def final_answer(answer: str, task: ExactAnswer) -> str | None:
    """What the answer's text gives as its final answer; None where it gives none.

    Where a number is accepted: the last number right behind ``####``, else in the last ``\\boxed{...}``, else of the
    whole text. Otherwise what follows ``####``, is boxed or follows "answer is" or "answer:" (the last of each), else
    the last line that is not empty. Where numbers and words are accepted: the one of both that is right.
    """
    answer = _plain(answer)
    numeric = [_number(one) is not None for one in task.accepted]
    number = _final_number(answer, fractions=any("/" in one for one in task.accepted)) if any(numeric) else None
    if all(numeric) or (number is not None and is_right(number, task)):
        return number
    return _final_words(answer) or number


def _final_number(answer: str, *, fractions: bool) -> str | None:
    if marked := _MARKED.findall(answer):
        return str(marked[-1])
    numbers = _FRACTION if fractions else _NUMBER
    for box in _BOXED.findall(answer)[-1:]:
        if found := numbers.findall(box.rpartition("=")[2]):
            return str(found[0])  # what comes after it is its unit
    found = numbers.findall(answer)
    return str(found[-1]) if found else None


def _final_words(answer: str) -> str | None:
    *before, after = _MARK.split(answer)
    marked = bool(before)
    boxed, said = _BOXED.findall(answer), _SAID.findall(answer)
    lines = [line for line in (after if marked else answer).splitlines() if line.strip()]
    found = lines[0] if marked and lines else (boxed or said or lines or [""])[-1]
    return str(found).strip() or None


def is_right(final: str, task: ExactAnswer) -> bool:
    """Whether a final answer is one of the accepted: as numbers, or as words up to case, articles and punctuation, with
    what a sentence goes on with left out."""
    number = _number(final)
    said = {_words(final), _words(_CLAUSE.split(final, maxsplit=1)[0])} - {""}
    return any(
        number == _number(one) if number is not None and _number(one) is not None else _words(one) in said
        for one in task.accepted
    )


def _number(text: str) -> Decimal | None:
    """The value of a text that is a number, or a fraction of two, and nothing else."""
    parts = text.strip().rstrip(".").split("/")
    if len(parts) > 2 or not all(_WHOLE.fullmatch(part.strip()) for part in parts):
        return None
    try:
        values = [Decimal(re.sub(r"[,$\s]", "", part).replace("−", "-")) for part in parts]
        return values[0] / values[1] if values[1:] else values[0]
    except (InvalidOperation, DivisionByZero):
        return None


def _plain(text: str) -> str:
    for latex, plain in _LATEX:
        text = latex.sub(plain, text)
    return text


def _words(text: str) -> str:
    text = text.casefold().strip()
    for markup, plain in _MARKUP:
        text = markup.sub(plain, text).strip()
    return _ARTICLES.sub("", " ".join(text.split()))
