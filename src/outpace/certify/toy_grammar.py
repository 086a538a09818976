"""A grammar over the tokens of toy targets, for the exact level: no package is needed to certify with it."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.constraint import Bits, bits_of

_DEEPEST = 2


@dataclass(frozen=True, slots=True)
class Nesting:
    """The state: ``depth`` brackets are open."""

    depth: int = 0

    @property
    def complete(self) -> bool:
        return self.depth == 0

    def allowed(self, size: int) -> Bits:
        return bits_of([token for token in range(size) if self._allows(token)], size)

    def advance(self, token: int) -> Nesting | None:
        if not self._allows(token):
            return None
        return Nesting(self.depth + (1, -1)[token]) if token < 2 else self

    def forced(self) -> tuple[int, ...]:
        return (1,) if self.depth == _DEEPEST else ()

    def _allows(self, token: int) -> bool:
        return self.depth > 0 if token == 1 else self.depth < _DEEPEST


class Brackets:
    """Brackets in pairs, two open at most: token 0 opens, 1 closes, and any other stands wherever a bracket may open.
    What may follow depends on the whole path, and some token always may. At the beginning one token is forbidden and
    several are allowed: where one alone is, what becomes of forbidden draws cannot show. Inside two brackets one is."""

    def begin(self) -> Nesting:
        return Nesting()

    def accepts(self, text: str) -> bool:
        return True
