"""Task: what the answer to a prompt can be scored by, where a row of a prompt file says so.

``answer``: the known answer (a text, a number, or a list of accepted ones); of GSM8K's worked solutions, what follows
``####``. ``entry_point`` and ``test``: a function to write and its tests, in HumanEval's form, where ``test`` defines
``check(candidate)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST = 100
"""Characters of an answer that can be matched exactly; a longer one is a reference text."""


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """Answers of which the final answer must be one."""

    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CodeTests:
    """A function to write. ``tests`` define ``check(candidate)``, which raises where the function is wrong.

    ``prompt``: the text that the answer may continue; it holds the imports and helpers that the function needs.
    """

    entry_point: str
    tests: str
    prompt: str


Task = ExactAnswer | CodeTests


def task_of(row: Mapping[str, Any], prompt: str) -> Task | None:
    """The task of a row; None where there is nothing to score. Raises ValueError saying what is wrong with it."""
    tests = row.get("test")
    if "entry_point" in row or (isinstance(tests, str) and "def check(" in tests):
        for key in ("entry_point", "test"):
            value = row.get(key)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(
                    f"'{key}' must be text: a code task needs 'entry_point' (the function's name) and 'test' (Python "
                    "that defines check(candidate))"
                )
        return CodeTests(row["entry_point"].strip(), row["test"], prompt)
    given = row.get("answer")
    accepted = [_exact(one) for one in (given if isinstance(given, list) else [given])]
    return ExactAnswer(tuple(one for one in accepted if one)) if any(accepted) else None


def _exact(answer: Any) -> str:
    """An answer that another can equal; "" for what is none: reference texts, objects, nothing."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return ""
    text = str(answer).rpartition("####")[2].strip()
    return text if len(text) <= LONGEST and "\n" not in text else ""
