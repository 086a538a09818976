"""GrammarDrafter: drafts what a request's grammar forces, and what followed earlier where it allowed the same tokens.

Under a grammar most of an answer's frame is known: keys, punctuation, quotes. Four kinds of guesses, each with a
learned acceptance rate:

* a token that is the only one allowed, which is certain;
* the usual spelling of text that the grammar forces. The same text has other spellings, so it is verified like any
  draft;
* tokens that followed earlier in the answer where the same tokens were allowed, after the same last token or after any:
  how objects of a list repeat their structure, and which values of an enum come;
* where nothing followed yet and few tokens are allowed: the longest of them, which begin a value of an enum, an
  optional key, or the punctuation behind a value.

All are allowed by the grammar, functions of the context alone, and hence deterministic proposals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.constraint import Bits, ConstraintState, GrammarState, KnowsSpelling, holds, single
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.drafting.best_first import BestFirst, CandidateState, Successor
from outpace.drafting.calibration import Calibration
from outpace.targets.base import Sequence

MOST_NODES = 32
"""Guesses that are looked at in a round: the grammar is asked about each, which takes a part of a millisecond."""
_KEPT = 3
"""Tokens kept of those that followed a place."""
_BINS = 4


class Kind(NamedTuple):
    """``source``: "only", "forced", "last" (of a forced text), "same" or "alike" (what followed the same place after
    the same token, or after any); ``certainty``: for the last two, the share that the token had of what followed, in
    quarters, and whether that was seen once only (0)."""

    source: str
    certainty: int = 0


_PRIORS = {"only": 0.999, "forced": 0.97, "last": 0.85}
_GRADED = {"same": (0.6, 0.15, 0.35, 0.6, 0.93), "alike": (0.15, 0.05, 0.12, 0.3, 0.6), "first": (0.6, 0.35, 0.2, 0.05)}


def prior(kind: Kind) -> float:
    """The acceptance rate of a kind before anything was observed."""
    return _PRIORS[kind.source] if kind.source in _PRIORS else _GRADED[kind.source][kind.certainty]


class _Place(NamedTuple):
    """Where a draft stands: the grammar's state before its last token, that token, and what is left of a forced text.
    The state after it is looked up when the draft goes on there, which most do not."""

    before: GrammarState
    last: int
    forced: tuple[int, ...] = ()
    moved: bool = False
    """Whether ``before`` is the state after the token already."""


Key = tuple[int, int | None]
"""A digest of the tokens that were allowed, and the token before; None: any."""


@dataclass(slots=True, kw_only=True)
class GrammarDraftState(CandidateState):
    """``followed``: what followed places of the answer. ``at``: the grammar's state after ``read`` tokens."""

    followed: dict[Key, Counter[int]] = field(default_factory=dict)
    at: GrammarState = None
    read: int = 0
    held: list[GrammarState] = field(default_factory=list)
    """States of the draft under way, which the round asks for the same masks."""


class GrammarDrafter(BestFirst[GrammarDraftState]):
    """Drafts along the grammar; nothing where a request has none."""

    def begin(self, sequence: Sequence) -> GrammarDraftState:
        return GrammarDraftState(sequence, Calibration(prior), at=sequence.sampler.place, read=len(sequence.tokens))

    def propose(self, state: GrammarDraftState, budget: Budget) -> TokenTree:
        if state.sequence.sampler.grammar is None:
            state.grown = None
            return TokenTree()
        most = min(budget.max_nodes, MOST_NODES)
        limited = (
            budget
            if most == budget.max_nodes
            else Budget(
                budget.depth,
                most,
                budget.topk,
                budget.confidence,
                budget.relative_costs,
                budget.base_tokens,
                budget.parts,
            )
        )
        return super().propose(state, limited)

    def root(self, state: GrammarDraftState) -> _Place:
        self._read(state)
        state.held.clear()
        return _Place(state.sequence.sampler.place, state.sequence.tokens[-1], moved=True)

    def successors(self, state: GrammarDraftState, place: _Place) -> Iterable[Successor]:
        given = place.before if place.moved else state.sequence.sampler.moved(place.before, place.last)
        if given is None or isinstance(given, BadInput):
            return
        state.held.append(given)
        seen: set[int] = set()
        for token, kind, rest in self._guesses(state, given, place):
            if token not in seen:
                seen.add(token)
                yield Successor(token, kind, _Place(given, token, rest))

    def _guesses(
        self, state: GrammarDraftState, given: ConstraintState, place: _Place
    ) -> Iterator[tuple[int, Kind, tuple[int, ...]]]:
        """Tokens that the grammar allows, with their kinds, and the forced text behind each."""
        forced = place.forced
        if forced:
            yield forced[0], Kind("forced" if len(forced) > 1 else "last"), forced[1:]
            return
        sampler = state.sequence.sampler
        allowed = sampler.allowed(given)
        if allowed is None or isinstance(allowed, BadInput):
            return
        if (only := single(allowed)) is not None:
            yield only, Kind("only"), ()
            return
        forced = tuple(sampler.forced(given))
        if forced and holds(allowed, forced[0]):
            yield forced[0], Kind("forced" if len(forced) > 1 else "last"), forced[1:]
        digest = _digest(allowed)
        if (digest, None) not in state.followed and isinstance(given, KnowsSpelling):
            few = given.longest(sampler.vocab_size)
            for token in few[:_KEPT]:
                yield token, Kind("first", min(3, (len(few) - 1).bit_length())), ()
            return
        for source, last in (("same", place.last), ("alike", None)):
            found = state.followed.get((digest, last))
            if found:
                total = found.total()
                for token, times in found.most_common(_KEPT):
                    yield token, Kind(source, 0 if total == 1 else max(1, round(_BINS * times / total))), ()

    def observe(self, state: GrammarDraftState, verdict: Verdict) -> None:
        super().observe(state, verdict)
        if state.sequence.sampler.grammar is not None:
            self._read(state)

    @staticmethod
    def _read(state: GrammarDraftState) -> None:
        """Take in the tokens that were committed: what followed where the grammar allowed what."""
        sequence, sampler = state.sequence, state.sequence.sampler
        while state.read < len(sequence.tokens):
            token, at = sequence.tokens[state.read], state.at
            allowed = sampler.allowed(at)
            if allowed is not None and not isinstance(allowed, BadInput):
                digest = _digest(allowed)
                for last in (sequence.tokens[state.read - 1], None):
                    state.followed.setdefault((digest, last), Counter())[token] += 1
            state.at = sampler.moved(at, token)
            state.read += 1


def _digest(allowed: Bits) -> int:
    return hash(allowed.tobytes())
