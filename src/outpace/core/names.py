"""Names that users write: compared without case, '-' and '_'; for unknown ones, the nearest known names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from outpace.core.errors import BadInput, shortened

_NEAR = 0.65
"""Share of equal characters from which on a name is near."""
_MOST = 3
_FEW = 20
"""How many names are listed where no name is near, if a command lists them too."""
LONGEST = 100
"""Letters of a name that anybody may have meant, and that a message repeats."""
_SHORTEST = 3  # letters that the beginnings of two names must have in common
_WORD = re.compile(r"[-_ ]")


def normalised(name: str) -> str:
    """What two spellings of a name have in common: eagle3 for EAGLE-3, eagle_3 and eagle3."""
    return name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")


def nearest(name: str, known: Iterable[str] | Mapping[str, str]) -> list[str]:
    """Up to three known names that may be meant, the nearest first; none for a text that is too long for a name.

    A mapping gives for every name that may be written, aliases included, the one to suggest.
    """
    if len(name) > LONGEST:  # comparing takes time for each letter
        return []
    suggested = known if isinstance(known, Mapping) else {one: one for one in known}
    scores: dict[str, float] = {}
    for written, one in suggested.items():
        score = _likeness(name, written)
        if score >= _NEAR:
            scores[one] = max(score, scores.get(one, 0.0))
    return sorted(scores, key=lambda one: -scores[one])[:_MOST]


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """ "did you mean 'pld' or 'sam'?"; "" where no known name is near."""
    near = [f"'{one}'" for one in nearest(name, known)]
    return f"did you mean {' or '.join([', '.join(near[:-1]), near[-1]] if near[1:] else near)}?" if near else ""


def unknown(what: str, name: str, known: Iterable[str] | Mapping[str, str], see: str = "") -> BadInput:
    """The error for a name that does not exist: what may be meant, else the known names where these are few.

    ``see``: the command that lists them.
    """
    names = dict.fromkeys(known.values() if isinstance(known, Mapping) else known)
    near, name = did_you_mean(name, known), shortened(name, LONGEST)
    if near:
        return BadInput(f"unknown {what} '{name}'; {near}" + (f" See: {see}" if see else ""))
    many = see and len(names) > _FEW
    return BadInput(f"unknown {what} '{name}'; " + (f"see: {see}" if many else f"known: {', '.join(names)}"))


def split_outside_brackets(text: str) -> list[str]:
    """The parts between commas that stand in no brackets, without space around them and without empty ones.

    >>> split_outside_brackets("pld, sam@top-beta(tau=1,beta=2)")
    ['pld', 'sam@top-beta(tau=1,beta=2)']
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _likeness(one: str, other: str) -> float:
    """Between 0 and 1. Near are also a name that another one begins with, and names with the same first word."""
    short, long = sorted((normalised(one), normalised(other)), key=len)
    first, second = (_WORD.split(name.strip().lower())[0] for name in (one, other))
    begins = len(short) >= _SHORTEST and long.startswith(short)
    shares = len(first) >= _SHORTEST and first == second
    return max(SequenceMatcher(None, short, long).ratio(), 0.8 if begins else 0.7 if shares else 0.0)


def number_text(value: float) -> str:
    """A number as names of methods and rules show it: six digits where these give it back, else all of them."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
