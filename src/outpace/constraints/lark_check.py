"""Rules of Lark grammars that have no finite text: found before anything is decoded, as answers would not end.

The engine has read the grammar before, so that only rules and what they demand are looked at here: what a rule has of
other rules, which are 1 where a finite text is known and 0 elsewhere, is reduced to one of the two.
"""

from __future__ import annotations

import re

from outpace.core.errors import BadInput

_MOST_STEPS = 200_000
_TEXT = re.compile(
    r"//[^\n]*|#[^\n]*|^%(?:ignore|llguidance)\b[^\n]*"
    r'|((?:"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/)[imslux]*)',
    re.MULTILINE,
)
"""Comments and settings; and, as a group, what stands for itself, with its flags."""
_HEAD = re.compile(r"^[?!]*(\w+)(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_OPTIONAL = re.compile(r"[01]\s*(?:[?*]|~\s*1(?:\s*\.\.\s*1)?|\{[1,\s]*\})")
_REPEATED = re.compile(r"([01])\s*\+")
_GROUP = re.compile(r"\(([^()\[\]]*)\)|\[[^()\[\]]*\]")


def check_lark(rules: str) -> None:
    """Raise BadInput for a rule that has no finite text. What cannot be told, as in grammars with others inside, is
    taken for finite."""
    plain = _TEXT.sub(lambda found: " T " if found[1] else " ", rules)
    if "%" in plain:
        return
    _, *parts = _HEAD.split(plain)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    endless, steps = {name for name in bodies if name.islower()}, 0
    found = True
    while found and endless:
        found = False
        for name in reversed(bodies):  # rules mostly stand before those that they are made of
            if name in endless:
                steps += 1
                if _finite(bodies[name], endless):
                    endless.remove(name)
                    found = True
        if steps > _MOST_STEPS:
            return
    if endless:
        name = next(name for name in bodies if name in endless)
        raise BadInput(
            f"the grammar's rule '{name}' has no finite text: each of its alternatives goes on without end; give the "
            "recursion another branch"
        )


def _finite(body: str, endless: set[str]) -> bool:
    """Whether one of a rule's alternatives demands none of the rules that may be endless."""
    before, now = "", re.sub(r"\w+", lambda name: "0" if name[0] in endless else "1", body)
    while now != before:
        before = now
        now = _REPEATED.sub(r"\1", _OPTIONAL.sub("1", now))
        now = _GROUP.sub(lambda group: "1" if group[1] is None or _any(group[1]) else "0", now)
    return _any(now)


def _any(alternatives: str) -> bool:
    return any("0" not in one for one in alternatives.split("|"))
