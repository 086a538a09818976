"""REST: draft what followed in a corpus wherever the end of the text occurs in it.

Retrieval-based speculative decoding (He et al. 2024, arXiv 2311.08252): the longest suffix of the text that occurs in a
datastore is looked up, its continuations form a trie, and the most frequent branches are drafted as one tree.

Beside the paper: the occurrences that are read are spread evenly over all there are, not the first that are found;
where the longest match is rare, a match of half its length adds its branches behind it; and branches are taken best
first, as many as the measured costs justify, by the acceptance that branches have had: by the length of their match,
their share of the occurrences, and how many those are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from outpace.core.validation import StrictModel
from outpace.drafting.best_first import BestFirst, CandidateState, MaxNodes, Successor, tree_controller
from outpace.drafting.calibration import Calibration
from outpace.drafting.namespaces import Namespaces
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from outpace.datastore.store import Datastore

LEVELS = 2
"""Matches that are looked up at most: the longest, and one of half its length."""
SHARES = 8
"""Shares of the occurrences are rounded down to one part in so many."""
Kind = tuple[int, int, int, int]
"""Level (0: the longest match); length of the match, and occurrences, by their number of binary digits; share of the
occurrences in parts of SHARES."""
_AFTER_ONE = (0.1, 0.25, 0.45, 0.65, 0.8)
"""Acceptance of what followed a match of 1, 2 to 3, 4 to 7, 8 to 15, 16 or more tokens in the one place it occurs."""


def prior(kind: Kind) -> float:
    """Acceptance before anything was observed (``benchmarks/priors.py``); it ascends with the number of occurrences."""
    level, match, occurrences, share = kind
    trust = math.pow(_AFTER_ONE[match - 1], 1.0 / occurrences)
    return trust * (share + 0.3) / (SHARES + 0.3) * math.pow(0.5, level)


class Level(NamedTuple):
    """Occurrences of one match: its length, and what followed."""

    match: int
    rows: list[list[int]]


class Place(NamedTuple):
    """Where a branch stands: ``depth`` tokens into the continuations that led here."""

    levels: tuple[Level, ...]
    depth: int = 0


class Rest(BestFirst[CandidateState]):
    """Drafts the trie of ``occurrences`` continuations, ``depth`` tokens each, of matches of at least ``min_match``."""

    def __init__(
        self, datastore: Datastore, depth: int = 16, min_match: int = 1, occurrences: int = 16, namespaces: int = 64
    ) -> None:
        self.datastore, self.depth, self.min_match, self.occurrences = datastore, depth, min_match, occurrences
        self._calibrations = Namespaces(lambda: Calibration(prior), namespaces)

    def begin(self, sequence: Sequence) -> CandidateState:
        return CandidateState(sequence, self._calibrations.open(sequence))

    def root(self, state: CandidateState) -> Place | None:
        levels: list[Level] = []
        tail = state.sequence.tokens[-self.datastore.header.depth :]
        wanted = self.occurrences
        while len(levels) < LEVELS and wanted > 0:
            found = self.datastore.find(tail)
            if found is None or found.length < self.min_match:
                break
            levels.append(Level(found.length, self.datastore.continuations(found, wanted, self.depth)))
            wanted -= found.count
            if found.length < 2:
                break
            tail = tail[len(tail) - found.length // 2 :]
        return Place(tuple(levels)) if levels else None

    def successors(self, state: CandidateState, place: Place) -> Iterable[Successor]:
        depth = place.depth
        branches: dict[int, list[Level]] = {}
        kinds: dict[int, Kind] = {}
        for number, (match, rows) in enumerate(place.levels):
            followers: dict[int, list[list[int]]] = {}
            for row in rows:
                if depth < len(row):
                    followers.setdefault(row[depth], []).append(row)
            total = sum(map(len, followers.values()))
            digits = (match + depth).bit_length(), min(total.bit_length(), 4)
            for token, held in sorted(followers.items(), key=lambda pair: -len(pair[1])):
                kinds.setdefault(token, (number, min(digits[0], 5), digits[1], len(held) * SHARES // total))
                branches.setdefault(token, []).append(Level(match, held))
        for token, levels in branches.items():
            yield Successor(token, kinds[token], Place(tuple(levels), depth + 1))


class RestSettings(StrictModel):
    """Settings of ``rest``."""

    max_nodes: MaxNodes = None
    depth: int = Field(16, ge=1, le=64, description="draft tokens on a path")
    min_match: int = Field(1, ge=1, le=64, description="draft nothing after a shorter match")
    occurrences: int = Field(
        16, ge=1, le=4096, description="maximum number of occurrences whose continuations are read"
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose acceptance rates are kept")


@register(
    "rest",
    family="model-free",
    paper="He et al. 2024, arXiv 2311.08252",
    needs=("datastore",),
    summary="Drafts the most frequent continuations in a datastore, as a tree.",
    when_to_use="Answers that resemble the corpus: code, standard phrases, earlier answers. No gain with a corpus "
    "about another subject.",
    tiny={"max_nodes": 3, "depth": 2, "occurrences": 4},
)
def build(context: Context, settings: RestSettings) -> Parts:
    """A trie of continuations in the datastore."""
    drafter = Rest(context.datastore(), settings.depth, settings.min_match, settings.occurrences, settings.namespaces)
    return Parts(drafter, tree_controller(context.target, settings.depth, settings.max_nodes))
