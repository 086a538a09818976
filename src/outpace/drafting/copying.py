"""What drafters that copy from text share: the text they copy from, and the continuation of a match."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Annotated, NamedTuple, TypeVar

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.calibration import Calibration
from outpace.targets.base import Target


def separated(texts: Iterable[Seq[int]]) -> list[int]:
    """Texts end to end, each followed by a negative number that occurs once: no match and no copy crosses it."""
    whole: list[int] = []
    for number, text in enumerate(texts, start=1):
        whole.extend(text)
        whole.append(-number)
    return whole


def continuation(text: Seq[int], start: int, count: int, *, periodic: bool) -> list[int]:
    """Up to ``count`` tokens of ``text`` from ``start``, ending before a separator.

    ``periodic``: where the copy reaches the end of ``text``, which the model is writing, it goes on with what was just
    copied. The match shows that the text repeats itself at that distance, so a loop is drafted to any length.
    """
    copied = list(text[start : start + count])
    if copied and min(copied) < 0:
        return copied[: next(index for index, token in enumerate(copied) if token < 0)]
    if periodic and copied:
        period = len(copied)
        copied.extend(copied[index % period] for index in range(count - period))
    return copied


NumDraftTokens = Annotated[
    int | None,
    Field(
        ge=0, le=512, description="maximum number of draft tokens per round; by default chosen by the measured costs"
    ),
]


def length_controller(target: Target, num_draft_tokens: int | None) -> Controller:
    """A fixed number of draft tokens, or, for None, as many as the measured costs justify."""
    return CostModel(target.costs) if num_draft_tokens is None else Fixed(num_draft_tokens, max_nodes=num_draft_tokens)


INDEX_BYTES_PER_TOKEN = 600
"""Most bytes of memory that an index takes for a token of reference text (a suffix automaton)."""

LONGEST = 16
"""Matches of this length and longer are all of one kind."""
SHARES = (1.0, 0.42, 0.35, 0.21)
"""How often a copied token is right that has so many rivals, beside one that has none."""


class CopyKind(NamedTuple):
    """The ``origin`` of the match that a token is copied from, the ``length`` of the match behind the token, and how
    many ``rivals`` the token has: other tokens that have followed the match. None where that is not known."""

    origin: str
    length: int
    rivals: int | None = None


@dataclass(slots=True)
class Match:
    """A match of the last ``length`` tokens: ``text[start:]`` is what followed them."""

    text: Seq[int]
    start: int
    length: int
    periodic: bool = True
    """Whether ``text`` ends where the model is writing."""
    origin: str = ""
    """Copies of different origins have acceptance rates of their own."""
    rivals: int | None = None
    """How many other tokens have followed the matched tokens; None where that is not known."""


NOTHING: tuple[Seq[CopyKind], Seq[int]] = (), ()
"""Kinds and tokens of a round in which nothing could be copied."""


@dataclass(slots=True)
class CopyState(DraftState):
    """What a copying drafter keeps of one request; subclasses add the texts that are searched."""

    calibration: Calibration
    fed: int = 0
    """Tokens of the sequence that were taken into the texts."""
    copied: tuple[Seq[CopyKind], Seq[int]] = NOTHING
    """Kinds and tokens of all that could have been copied in this round."""

    def fresh(self) -> list[int]:
        """The tokens that arrived since the last call."""
        tokens = self.sequence.tokens[self.fed :]
        self.fed += len(tokens)
        return tokens


S = TypeVar("S", bound=CopyState)


class CopyDrafter(Drafter[S], ABC):
    """Drafts what followed the last tokens where they occurred before: a deterministic chain.

    How likely a copied token is accepted depends on the length of the match behind it, the tokens copied before it
    included; every request learns these rates for itself.
    """

    weighs_costs = True
    states_draft_steps = True

    @abstractmethod
    def match(self, state: S) -> Match | None:
        """The match to copy from, if any, once the tokens that arrived (``state.fresh()``) are taken in."""

    def most(self, match: Match) -> int:
        """How many tokens to copy after a match where no costs are known, the budget aside."""
        return sys.maxsize

    def prior(self, kind: CopyKind) -> float:
        """The acceptance rate of a kind before anything was observed (how it was fitted: LOG.md, 28 November 2026)."""
        if kind.rivals is None:
            return 1.0 - 0.85 / math.pow(kind.length, 0.83)
        return (1.0 - 0.64 / math.pow(kind.length, 0.67)) * SHARES[min(kind.rivals, len(SHARES) - 1)]

    def propose(self, state: S, budget: Budget) -> TokenTree:
        state.copied = NOTHING
        depth = min(budget.depth, budget.max_nodes)
        if depth <= 0 or (match := self.match(state)) is None:
            return TokenTree()
        count = depth if budget.relative_costs else min(depth, self.most(match))
        first = _first_kind(match)
        if state.calibration.rate(first) <= budget.price:  # later tokens are no likelier: none is worth a row
            state.copied = (first,), continuation(match.text, match.start, 1, periodic=False)
            return TokenTree()
        tokens = continuation(match.text, match.start, count, periodic=match.periodic)
        kinds = _kinds(first, len(tokens))
        state.copied = kinds, tokens
        path_acceptance_probs = list(accumulate(_rates(state.calibration, kinds, first), mul))
        size = budget.best_draft_size(path_acceptance_probs)
        return TokenTree.chain(tokens[:size], path_acceptance_probs=path_acceptance_probs[:size])

    def observe(self, state: S, verdict: Verdict) -> None:
        """All that could have been copied teaches, drafted or not."""
        for kind, token, committed in zip(*state.copied, verdict.committed, strict=False):
            state.calibration.learn(kind, token == committed)
            if token != committed:
                break
        state.copied = NOTHING

    def rested(self, states: Seq[S], verdicts: Seq[Verdict]) -> None:
        """Nothing was looked up; tokens are taken in with the next match."""


def _first_kind(match: Match) -> CopyKind:
    rivals = None if match.rivals is None else min(match.rivals, len(SHARES) - 1)
    return CopyKind(match.origin, min(match.length, LONGEST), rivals)


def _rates(calibration: Calibration, kinds: Seq[CopyKind], first: CopyKind) -> list[float]:
    """The acceptance rates of tokens that are copied after one match; those after the longest matches have one."""
    rates = list(map(calibration.rate, kinds[: 2 + LONGEST - first.length]))
    return rates + rates[-1:] * (len(kinds) - len(rates))


@lru_cache(maxsize=1024)
def _kinds(first: CopyKind, count: int) -> tuple[CopyKind, ...]:
    """The kinds of ``count`` tokens that are copied after one match; ``first``: that of the first of them."""
    later = (CopyKind(first.origin, min(first.length + index, LONGEST)) for index in range(1, count))
    return (first, *later)[:count]
