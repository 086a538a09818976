"""Cacheback: tables of which tokens followed which, with least-recently-used eviction.

Cacheback (Ma et al. 2025, arXiv 2511.21699) keeps a table from *leaders*, the n tokens before, to *followers*, the
next few tokens as they came lately. Both levels are LRU: most recently seen followers first, and the leaders that were
not met for longest are evicted. All followers of the current leader are drafted as branches of one tree, and where a
branch ends its own last tokens are the next leader. This table is empty when a text begins, so a second one, filled
beforehand from a corpus and never changed, drafts beside it: from the datastore where one is named, else from answers
that ship with the package.

Beside the paper: leaders of several lengths, the longest looked up first; the second table has the followers that are
most frequent in its corpus; and branches of both tables are taken best first by the acceptance that their leader's
length and their rank have had, as many as the measured costs justify.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

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
Kind = tuple[int, int, int, bool]
"""The leader's length, the follower's rank, the place in it, and whether it stands in the table that was filled
beforehand."""


def prior(kind: Kind) -> float:
    """Acceptance of a kind before anything was observed (``benchmarks/priors.py``)."""
    leader, rank, place, beforehand = kind
    if beforehand:
        first = 0.08 * min(leader, 4) if place == 0 else 0.35
    else:
        first = 1.0 - 0.77 / math.pow(leader + place, 0.8)
    return first / (1.0 + rank)


class Table(Protocol):
    """Followers by leader."""

    def followers(self, tail: Tokens) -> tuple[int, Seq[Tokens]]:
        """Followers of the longest leader that ends ``tail``, the first to be preferred, and the leader's length; (0,
        ()) where there is none."""
        ...


class FollowerTable:
    """The table of one namespace: followers by leader, most recent first."""

    def __init__(self, leader: int, follower: int, branches: int, entries: int) -> None:
        self.leader, self.follower, self.branches = leader, follower, branches
        self.table: Lru[Tokens, Lru[Tokens, bool]] = Lru(entries)

    def learn(self, tokens: list[int], start: int) -> None:
        """Take in ``tokens[start:]``: every place from which a whole follower can now be read."""
        for leader, follower in pairs(tokens, self.leader, self.follower, start - self.follower + 1):
            followers = self.table.get(leader)
            if followers is None:
                followers = Lru(self.branches)
                self.table.put(leader, followers)
            followers.put(follower, True)

    def followers(self, tail: Tokens) -> tuple[int, Seq[Tokens]]:
        for length in range(min(self.leader, len(tail)), 0, -1):
            followers = self.table.get(tail[len(tail) - length :])
            if followers is not None:
                return length, followers.recent()
        return 0, ()


class CorpusTable:
    """The table that was filled beforehand: the ``branches`` most frequent followers of every leader in a corpus."""

    def __init__(self, texts: Iterable[list[int]], leader: int, follower: int, branches: int) -> None:
        self.leader = leader
        counts: dict[Tokens, Counter[Tokens]] = {}
        for text in texts:
            for before, after in pairs(text, leader, follower):
                counts.setdefault(before, Counter())[after] += 1
        self.table = {one: tuple(token for token, _ in found.most_common(branches)) for one, found in counts.items()}

    def followers(self, tail: Tokens) -> tuple[int, Seq[Tokens]]:
        for length in range(min(self.leader, len(tail)), 0, -1):
            followers = self.table.get(tail[len(tail) - length :])
            if followers is not None:
                return length, followers
        return 0, ()


def pairs(tokens: Seq[int], leader: int, follower: int, start: int = 1) -> Iterator[tuple[Tokens, Tokens]]:
    """(leader, follower) at every place from ``start`` on, leaders of 1 to ``leader`` tokens, shorter ones first."""
    for at in range(max(1, start), len(tokens) - follower + 1):
        after = tuple(tokens[at : at + follower])
        for length in range(1, min(leader, at) + 1):
            yield tuple(tokens[at - length : at]), after


class Place(NamedTuple):
    """Where a branch stands: the last tokens, and followers that go on from here as (follower, rank)."""

    tail: Tokens
    leader: int = 0
    place: int = 0
    ahead: tuple[tuple[Tokens, int], ...] = ()
    beforehand: bool = False
    """Whether the followers are those of the table that was filled beforehand."""


@dataclass(slots=True, kw_only=True)
class CachebackState(CandidateState):
    """The namespace's table, and how many tokens of the sequence it has taken in."""

    table: FollowerTable
    fed: int = 0


class Cacheback(BestFirst[CachebackState]):
    """Drafts the followers of the last tokens, and theirs; of ``corpus`` too where it is given."""

    def __init__(
        self,
        leader: int = 3,
        follower: int = 3,
        branches: int = 4,
        entries: int = 50_000,
        namespaces: int = 64,
        corpus: CorpusTable | None = None,
    ) -> None:
        self.leader, self.corpus = leader, corpus
        self._memory = Namespaces(
            lambda: (FollowerTable(leader, follower, branches, entries), Calibration(prior)), namespaces
        )

    def begin(self, sequence: Sequence) -> CachebackState:
        table, calibration = self._memory.open(sequence)
        return CachebackState(sequence, calibration, table=table)

    def root(self, state: CachebackState) -> Place:
        tokens = state.sequence.tokens
        if state.fed < len(tokens):
            state.table.learn(tokens, state.fed)
            state.fed = len(tokens)
        return Place(tuple(tokens[-self.leader :]))

    def successors(self, state: CachebackState, place: Place) -> Iterable[Successor]:
        if place.ahead:
            yield from self._branches(place)
            return
        # The followers are at their end: the drafted tokens are the next leader.
        tables: list[Table] = [state.table] if self.corpus is None else [state.table, self.corpus]
        for table in tables:
            leader, found = table.followers(place.tail)
            ahead = tuple((follower, rank) for rank, follower in enumerate(found))
            yield from self._branches(Place(place.tail, leader, 0, ahead, table is self.corpus))

    def _branches(self, place: Place) -> Iterator[Successor]:
        """The next tokens of the followers ahead, each token once."""
        branches: dict[int, list[tuple[Tokens, int]]] = {}
        for follower, rank in place.ahead:
            branches.setdefault(follower[place.place], []).append((follower, rank))
        for token, members in branches.items():
            rest = tuple(members) if place.place + 1 < len(members[0][0]) else ()
            tail = (*place.tail, token)[-self.leader :]
            kind: Kind = place.leader, members[0][1], place.place, place.beforehand
            yield Successor(token, kind, Place(tail, place.leader, place.place + 1, rest, place.beforehand))

    def caches(self, state: CachebackState) -> tuple[CacheUse, ...]:
        table = state.table.table
        return (CacheUse("leaders", len(table), table.bound, table.evicted),)


class CachebackSettings(StrictModel):
    """Settings of ``cacheback``."""

    max_nodes: MaxNodes = None
    depth: int = Field(16, ge=1, le=64, description="draft tokens on a path, if max_nodes is given")
    leader: int = Field(
        3, ge=1, le=16, description="maximum number of tokens in a leader (the tokens that are looked up)"
    )
    follower: int = Field(3, ge=1, le=16, description="number of tokens in a follower (the tokens that are drafted)")
    branches: int = Field(4, ge=1, le=64, description="followers kept per leader")
    entries: int = Field(
        50_000, ge=1, description="maximum number of leaders per namespace; the least recently used are removed first"
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose tables are kept")
    corpus: int = Field(
        100_000,
        ge=0,
        description="maximum number of tokens from the datastore, or otherwise from the answers that come with "
        "outpace, for the second table; 0: no second table",
    )


_SHARED: WeakKeyDictionary[object, dict[tuple[int, ...], CorpusTable]] = WeakKeyDictionary()
"""Tables by their source, a datastore or a tokenizer, and their settings: methods that are built alike share one."""


def corpus_table(context: Context, settings: CachebackSettings) -> CorpusTable | None:
    """The second table; None where it is not wanted or there is no text for it. Raises BadInput for a bad datastore."""
    from outpace.datastore.shipped_answers import shipped_answers
    from outpace.datastore.store import Datastore

    most, shape = settings.corpus, (settings.leader, settings.follower, settings.branches)
    if not most:
        return None
    source = context.datastore() if context.has_datastore else context.tokenizer
    if source is None:
        return None
    shared = _SHARED.setdefault(source, {})
    if (most, *shape) not in shared:
        texts = source.sample(most) if isinstance(source, Datastore) else shipped_answers(source, most)
        shared[most, *shape] = CorpusTable(texts, *shape)
    return shared[most, *shape]


@register(
    "cacheback",
    family="model-free",
    paper="Ma et al. 2025, arXiv 2511.21699",
    summary="Drafts tokens that recently followed the last tokens, in several branches, from LRU tables.",
    when_to_use="Phrases that recur within a text or, in a namespace, across texts; a datastore of similar text "
    "also covers first occurrences. Little gain otherwise.",
    tiny={"max_nodes": 3, "depth": 2, "follower": 1, "leader": 2, "branches": 2},
)
def build(context: Context, settings: CachebackSettings) -> Parts:
    """Branches from LRU tables."""
    drafter = Cacheback(
        settings.leader,
        settings.follower,
        settings.branches,
        settings.entries,
        settings.namespaces,
        corpus_table(context, settings),
    )
    return Parts(drafter, tree_controller(context.target, settings.depth, settings.max_nodes))
