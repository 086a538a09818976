"""Token recycling: draft what the target ranked highest when it last scored a token.

Every forward scores more than is committed: after each token, drafted or not, the target ranks all others. Token
recycling (Luo et al. 2024, arXiv 2408.08696) keeps the ``topk`` likeliest successors of every token it has scored, one
row of an adjacency matrix, and drafts a tree along them. Rows are replaced whenever their token is scored again.

Beside the paper: rows of the last tokens, up to three, are looked up before rows of one; a row keeps the probabilities,
in steps of a tenth; the tree is not a fixed template but grows best first by the acceptance that successors of that
probability have had, as many as the measured costs justify; and the text itself fills rows before the target has scored
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.core.lru import Lru
from outpace.core.metrics import CacheUse
from outpace.core.tree import ROOT
from outpace.core.validation import StrictModel
from outpace.drafting.best_first import BestFirst, CandidateState, Likeliest, MaxNodes, Successor, tree_controller
from outpace.drafting.calibration import Calibration
from outpace.drafting.namespaces import Namespaces
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

Key = tuple[int, ...]
Row = list[tuple[int, int]]
"""Successors, likeliest first, each with its certainty: its share of the row's probability, in tenths."""
_BINS = 10
_FROM_TEXT = _BINS + 1
"""The certainty of a successor that was read in the text and not ranked by the target."""
_AFTER_ONE = (0.03, 0.06, 0.08, 0.12, 0.17, 0.21, 0.22, 0.24, 0.27, 0.30, 0.33, 0.14)
_AFTER_MORE = (0.03, 0.05, 0.13, 0.25, 0.45, 0.55, 0.58, 0.61, 0.65, 0.73, 0.82, 0.62)


def prior(kind: tuple[int, int]) -> float:
    """Acceptance by (tokens of the key, certainty) before anything was observed (``benchmarks/priors.py``)."""
    order, certainty = kind
    return (_AFTER_ONE if order == 1 else _AFTER_MORE)[certainty]


class SuccessorTable:
    """What one namespace has learned: rows by key, and how often each certainty was right."""

    def __init__(self, entries: int) -> None:
        self.rows: Lru[Key, Row] = Lru(entries)
        self.calibration = Calibration(prior)


@dataclass(slots=True, kw_only=True)
class RecyclingState(CandidateState):
    """The rows of the request's namespace."""

    rows: Lru[Key, Row]


class Recycling(BestFirst[RecyclingState]):
    """Drafts along the adjacency matrix. ``context``: tokens of the longest key."""

    learns_from_rejected = True

    def __init__(self, topk: int = 8, context: int = 3, entries: int = 50_000, namespaces: int = 64) -> None:
        self.topk, self.context = topk, context
        self._tables = Namespaces(lambda: SuccessorTable(entries), namespaces)

    def begin(self, sequence: Sequence) -> RecyclingState:
        table = self._tables.open(sequence)
        self._read(sequence.tokens, 1, table.rows)
        return RecyclingState(sequence, table.calibration, rows=table.rows)

    def _read(self, tokens: Seq[int], start: int, rows: Lru[Key, Row]) -> None:
        """Fill rows from the text itself: tokens from ``start`` on, and what came before each."""
        for at in range(start, len(tokens)):
            token = tokens[at]
            read = (token, _FROM_TEXT)
            for key in self._keys(tokens[max(0, at - self.context) : at]):
                row = rows.get(key)
                if row is None:
                    rows.put(key, [read])
                elif row[0] != read:
                    rows.put(key, [read, *[one for one in row if one[0] != token][: self.topk - 1]])

    def _keys(self, tail: Seq[int]) -> list[Key]:
        """Keys that end a text, the longest first."""
        whole = tuple(tail[-self.context :])
        return [whole[start:] for start in range(len(whole))]

    def root(self, state: RecyclingState) -> Key:
        return tuple(state.sequence.tokens[-self.context :])

    def successors(self, state: RecyclingState, place: Key) -> Iterable[Successor]:
        seen: set[int] = set()
        found: list[Successor] = []
        for key in self._keys(place):
            for token, certainty in state.rows.get(key) or ():
                if token not in seen:
                    seen.add(token)
                    found.append(Successor(token, (len(key), certainty), (*place, token)[-self.context :]))
        return found

    def likeliest(self, state: RecyclingState, place: Key) -> Likeliest | None:
        """Tokens of one certainty in a row have one rate, so that only the first of them can be it."""
        rate = state.calibration.rate
        best = 0.0
        found: tuple[int, tuple[int, int]] | None = None
        longer: list[Row] = []
        for start in range(len(place)):
            row = state.rows.get(place[start:])
            if row is None:
                continue
            order, tried = len(place) - start, -1
            for token, certainty in row:
                if certainty == tried:
                    continue
                one = rate((order, certainty))
                if one > best:
                    if any(token == known for before in longer for known, _ in before):
                        continue  # it follows a longer key, at that one's rate
                    best, found = one, (token, (order, certainty))
                tried = certainty
                if row[-1][1] == certainty:
                    break  # certainties descend: all that follow have this one
            longer.append(row)
        if found is None:
            return None
        token, kind = found
        return best, Successor(token, kind, (*place, token)[-self.context :])

    def observe(self, state: RecyclingState, verdict: Verdict) -> None:
        """Replace the rows of every token that was scored, the rejected draft tokens included."""
        from outpace.targets.top import top

        super().observe(state, verdict)
        scores, tree = verdict.scores, verdict.scores.tree
        if not len(scores.logits):  # of an engine that shows tokens alone
            self._read(state.sequence.tokens, scores.length, state.rows)
            return
        before = state.sequence.tokens[max(0, scores.length - self.context) : scores.length]
        found = [self._row(values, ids) for values, ids in top(scores.logits[: 1 + len(tree)], self.topk)]
        for node in range(len(tree) - 1, ROOT - 1, -1):  # a key that several paths end with is the likeliest path's
            tail = [*before, *tree.path_tokens(node)][-self.context :]
            for key in self._keys(tail):
                state.rows.put(key, found[1 + node])

    @staticmethod
    def _row(values: list[float], ids: list[int]) -> Row:
        # Of the topk alone: the sum over the whole vocabulary would cost more time than it saves.
        shares = [math.exp(value - values[0]) for value in values]
        scale = _BINS / sum(shares)
        return [(token, round(scale * share)) for token, share in zip(ids, shares, strict=True)]

    def caches(self, state: RecyclingState) -> tuple[CacheUse, ...]:
        rows = state.rows
        return (CacheUse("successors", len(rows), rows.bound, rows.evicted),)


class RecyclingSettings(StrictModel):
    """Settings of ``recycling``."""

    max_nodes: MaxNodes = None
    depth: int = Field(16, ge=1, le=64, description="draft tokens on a path, if max_nodes is given")
    topk: int = Field(8, ge=1, le=64, description="successors kept per key")
    context: int = Field(3, ge=1, le=4, description="maximum number of tokens in a key; the paper has 1")
    entries: int = Field(
        50_000, ge=1, description="maximum number of keys per namespace; the least recently used are removed first"
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose tables are kept")


@register(
    "recycling",
    family="model-free",
    paper="Luo et al. 2024, arXiv 2408.08696",
    summary="Drafts along the successors that the target ranked highest when it last scored the same token.",
    when_to_use="Any text after a few hundred tokens, especially in a namespace with earlier answers. Little gain "
    "in the first rounds of a new subject.",
    aliases=("token-recycling",),
    tiny={"max_nodes": 3, "depth": 2, "topk": 2},
)
def build(context: Context, settings: RecyclingSettings) -> Parts:
    """A tree along the adjacency matrix."""
    drafter = Recycling(settings.topk, settings.context, settings.entries, settings.namespaces)
    return Parts(drafter, tree_controller(context.target, settings.depth, settings.max_nodes))
