"""Cacheback: tables of which tokens followed which, with least-recently-used eviction.

Cacheback (Ma et al. 2025, arXiv 2511.21699) keeps a table from *leaders*, the n tokens before, to *followers*, the
next few tokens as they came lately. Both levels are LRU: most recently seen followers first, and the leaders that were
not met for longest are evicted. All followers of the current leader are drafted as branches of one tree, and where a
branch ends its own last tokens are the next leader.

Beside the paper: leaders of several lengths, the longest looked up first, and branches taken best first by the
acceptance that their leader's length and their recency have had, as many as the measured costs justify.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from outpace.core.lru import Lru
from outpace.core.metrics import CacheUse
from outpace.core.validation import StrictModel
from outpace.drafting.best_first import BestFirst, CandidateState, MaxNodes, Successor, tree_controller
from outpace.drafting.calibration import Calibration
from outpace.drafting.namespaces import Namespaces
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

Tokens = tuple[int, ...]


def prior(kind: tuple[int, int, int]) -> float:
    """Acceptance by (leader's length, recency rank, place in the follower) before anything was
    observed (``benchmarks/priors.py``)."""
    leader, rank, place = kind
    return (1.0 - 0.77 / math.pow(leader + place, 0.8)) / (1.0 + rank)


class FollowerTable:
    """The tables of one namespace: followers by leader, most recent first."""

    def __init__(self, leader: int, follower: int, branches: int, entries: int) -> None:
        self.leader, self.follower, self.branches = leader, follower, branches
        self.table: Lru[Tokens, Lru[Tokens, bool]] = Lru(entries)
        self.calibration = Calibration(prior)

    def learn(self, tokens: list[int], start: int) -> None:
        """Take in ``tokens[start:]``: every place from which a whole follower can now be read."""
        for at in range(max(1, start - self.follower + 1), len(tokens) - self.follower + 1):
            follower = tuple(tokens[at : at + self.follower])
            for length in range(1, min(self.leader, at) + 1):
                self._enter(tuple(tokens[at - length : at]), follower)

    def _enter(self, leader: Tokens, follower: Tokens) -> None:
        followers = self.table.get(leader)
        if followers is None:
            followers = Lru(self.branches)
            self.table.put(leader, followers)
        followers.put(follower, True)

    def followers(self, tail: Tokens) -> tuple[int, list[Tokens]]:
        """Followers of the longest leader that ends ``tail``, most recent first, and the leader's length."""
        for length in range(min(self.leader, len(tail)), 0, -1):
            followers = self.table.get(tail[len(tail) - length :])
            if followers is not None:
                return length, followers.recent()
        return 0, []


class Place(NamedTuple):
    """Where a branch stands: the last tokens, and followers that go on from here as (follower, rank)."""

    tail: Tokens
    leader: int = 0
    place: int = 0
    ahead: tuple[tuple[Tokens, int], ...] = ()


@dataclass(slots=True, kw_only=True)
class CachebackState(CandidateState):
    """The namespace's tables, and how many tokens of the sequence they have taken in."""

    tables: FollowerTable
    fed: int = 0


class Cacheback(BestFirst[CachebackState]):
    """Drafts the followers of the last tokens, and theirs."""

    def __init__(
        self, leader: int = 3, follower: int = 3, branches: int = 4, entries: int = 50_000, namespaces: int = 64
    ) -> None:
        self.leader = leader
        self._tables = Namespaces(lambda: FollowerTable(leader, follower, branches, entries), namespaces)

    def begin(self, sequence: Sequence) -> CachebackState:
        tables = self._tables.open(sequence)
        return CachebackState(sequence, tables.calibration, tables=tables)

    def root(self, state: CachebackState) -> Place:
        tokens = state.sequence.tokens
        if state.fed < len(tokens):
            state.tables.learn(tokens, state.fed)
            state.fed = len(tokens)
        return Place(tuple(tokens[-self.leader :]))

    def successors(self, state: CachebackState, place: Place) -> Iterable[Successor]:
        leader, at, ahead = place.leader, place.place, place.ahead
        if not ahead:  # the followers are at their end: the drafted tokens are the next leader
            leader, found = state.tables.followers(place.tail)
            at, ahead = 0, tuple((follower, rank) for rank, follower in enumerate(found))
        branches: dict[int, list[tuple[Tokens, int]]] = {}
        for follower, rank in ahead:
            branches.setdefault(follower[at], []).append((follower, rank))
        for token, members in branches.items():
            rest = tuple(members) if at + 1 < len(members[0][0]) else ()
            tail = (*place.tail, token)[-self.leader :]
            yield Successor(token, (leader, members[0][1], at), Place(tail, leader, at + 1, rest))

    def caches(self, state: CachebackState) -> tuple[CacheUse, ...]:
        table = state.tables.table
        return (CacheUse("leaders", len(table), table.bound, table.evicted),)


class CachebackSettings(StrictModel):
    """Settings of ``cacheback``."""

    max_nodes: MaxNodes = None
    depth: int = Field(16, ge=1, le=64, description="draft tokens on a path, where max_nodes is given")
    leader: int = Field(3, ge=1, le=16, description="most tokens of a leader")
    follower: int = Field(3, ge=1, le=16, description="tokens of a follower")
    branches: int = Field(4, ge=1, le=64, description="followers that are kept of each leader")
    entries: int = Field(50_000, ge=1, description="most leaders of a namespace; the least recently used leave first")
    namespaces: int = Field(64, ge=1, description="most namespaces whose tables are kept")


@register(
    "cacheback",
    family="model-free",
    paper="Ma et al. 2025, arXiv 2511.21699",
    summary="Drafts what recently followed the last tokens, several branches, from LRU tables.",
    when_to_use="Where phrases come again, in one text or, in a namespace, across texts. No gain on first mentions.",
    tiny={"max_nodes": 3, "depth": 2, "follower": 1, "leader": 2, "branches": 2},
)
def build(context: Context, settings: CachebackSettings) -> Parts:
    """Branches from LRU tables."""
    drafter = Cacheback(settings.leader, settings.follower, settings.branches, settings.entries, settings.namespaces)
    return Parts(drafter, tree_controller(context.target, settings.depth, settings.max_nodes))
