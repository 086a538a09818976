"""Token recycling: draft from what the target thought of last time it stood at a token.

Every forward scores more than it is asked for: after each token, drafted or not, the target ranks all others. Token
recycling (Luo et al. 2024, arXiv 2408.08696) keeps the ``k`` likeliest successors of every token it has scored, one row
of an adjacency matrix, and drafts a tree along them. Rows are replaced whenever their token is scored again.

Beside the paper: rows of the last tokens, up to three, are asked before rows of one; a row keeps how sure the target
was; the tree is not a fixed template but grows best first by the acceptance that successors of that certainty have had,
as far as it pays; and the text itself fills rows before the target has been there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from pydantic import BaseModel, ConfigDict, Field

from outpace.acceptance.base import Verdict
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.lru import Lru
from outpace.core.metrics import CacheUse
from outpace.core.tree import ROOT
from outpace.drafting.best_first import BestFirst, Successor
from outpace.drafting.calibration import Calibration
from outpace.drafting.namespaces import Namespaces
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, TreeScores
from outpace.targets.top import top

Key = tuple[int, ...]
Row = list[tuple[int, int]]
"""Successors, likeliest first, each with how sure the target was of it."""
_BINS = 10
_FROM_TEXT = _BINS + 1
"""The certainty of a successor that was read and not ranked."""
_AFTER_ONE = (0.03, 0.06, 0.08, 0.12, 0.17, 0.21, 0.22, 0.24, 0.27, 0.30, 0.33, 0.14)
_AFTER_MORE = (0.03, 0.05, 0.13, 0.25, 0.45, 0.55, 0.58, 0.61, 0.65, 0.73, 0.82, 0.62)


def prior(kind: tuple[int, int]) -> float:
    """Acceptance by (tokens of the key, certainty) before anything is known (``benchmarks/priors.py``)."""
    order, certainty = kind
    return (_AFTER_ONE if order == 1 else _AFTER_MORE)[certainty]


class Memory:
    """What one namespace has learned: rows by key, and how often each certainty was right."""

    def __init__(self, entries: int) -> None:
        self.rows: Lru[Key, Row] = Lru(entries)
        self.calibration = Calibration(prior)


class Recycling(BestFirst):
    """Drafts along the adjacency matrix. ``context``: tokens of the longest key."""

    learns_from_rejected = True

    def __init__(self, k: int = 8, context: int = 3, entries: int = 50_000, namespaces: int = 64) -> None:
        super().__init__()
        self.k, self.context = k, context
        self._memories = Namespaces(lambda: Memory(entries), namespaces)

    def begin(self, sequence: Sequence) -> None:
        rows = self._memories.open(sequence).rows
        tokens = sequence.tokens
        for at in range(1, len(tokens)):
            for key in self._keys(tokens[max(0, at - self.context) : at]):
                row = rows.get(key) or []
                read = (tokens[at], _FROM_TEXT)
                rows.put(key, [read, *(one for one in row if one[0] != tokens[at])][: self.k])

    def _keys(self, tail: Seq[int]) -> Iterator[Key]:
        """Keys that end a text, the longest first."""
        for order in range(min(self.context, len(tail)), 0, -1):
            yield tuple(tail[len(tail) - order :])

    def calibration(self, sequence: Sequence) -> Calibration:
        return self._memories[sequence].calibration

    def root(self, sequence: Sequence) -> Key:
        return tuple(sequence.tokens[-self.context :])

    def successors(self, sequence: Sequence, state: Key) -> Iterable[Successor]:
        rows = self._memories[sequence].rows
        seen: set[int] = set()
        for key in self._keys(state):
            for token, certainty in rows.get(key) or ():
                if token not in seen:
                    seen.add(token)
                    yield Successor(token, (len(key), certainty), (*state, token)[-self.context :])

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        for sequence, scored in zip(sequences, scores, strict=True):
            self._recycle(sequence, scored)

    def _recycle(self, sequence: Sequence, scored: TreeScores) -> None:
        """Replace the rows of every token that was scored, the drafted ones that were rejected included."""
        rows, tree = self._memories[sequence].rows, scored.tree
        before = sequence.tokens[max(0, scored.length - self.context) : scored.length]
        found = [self._row(values, ids) for values, ids in top(scored.logits[: 1 + len(tree)], self.k)]
        for node in range(len(tree) - 1, ROOT - 1, -1):  # a key that several paths end with is the likeliest path's
            tail = [*before, *tree.path_tokens(node)][-self.context :]
            for key in self._keys(tail):
                rows.put(key, found[1 + node])

    @staticmethod
    def _row(values: list[float], ids: list[int]) -> Row:
        # Of the best k alone: the sum over the whole vocabulary would cost more than it tells.
        shares = [math.exp(value - values[0]) for value in values]
        scale = _BINS / sum(shares)
        return [(token, round(scale * share)) for token, share in zip(ids, shares, strict=True)]

    def caches(self, sequence: Sequence) -> tuple[CacheUse, ...]:
        rows = self._memories[sequence].rows
        return (CacheUse("successors", len(rows), rows.bound, rows.evicted),)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._memories.close(sequence)


class RecyclingSettings(BaseModel):
    """Settings of ``recycling``."""

    model_config = ConfigDict(extra="forbid")

    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    depth: int = Field(16, ge=1, le=64, description="draft tokens on a path, where nodes are given")
    k: int = Field(8, ge=1, le=64, description="successors that are kept of each key")
    context: int = Field(3, ge=1, le=4, description="most tokens of a key; the paper has 1")
    entries: int = Field(50_000, ge=1, description="most keys of a namespace; the least recently used leave first")
    namespaces: int = Field(64, ge=1, description="most namespaces whose tables are kept")


@register(
    "recycling",
    family="model-free",
    paper="Luo et al. 2024, arXiv 2408.08696",
    summary="Drafts along the successors that the target ranked highest when it last stood at a token.",
    when_to_use="On any text once some hundred tokens are written, most of all in a namespace with earlier answers. "
    "Not in the first rounds of a new subject.",
    aliases=("token-recycling",),
    tiny={"nodes": 3, "depth": 2, "k": 2},
)
def build(context: Context, settings: RecyclingSettings) -> Parts:
    """A tree along the adjacency matrix."""
    drafter = Recycling(settings.k, settings.context, settings.entries, settings.namespaces)
    if settings.nodes is None:
        return Parts(drafter, CostModel(context.target.costs))
    return Parts(drafter, Fixed(settings.depth, nodes=settings.nodes, width=settings.k))
