"""Branches: rows that grow from the committed rows of many sequences, a level at a time, as drafts do.

A row begins with the state that left the row before it. A level is one forward over the rows of all sequences, of whose
logits a draft reads little: the largest ones of each row, and what normalises them. Implementations keep states and K/V
of the rows until the next beginning; callers know rows by number.

Drafts say which rows they want next (:class:`Draft`). Those that follow a :class:`TreePlan` need not be asked: whoever
runs the rows may choose as well, which the compiled kernels do in one call for all levels of all requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Best = tuple[list[float], list[int], float]
"""The largest logits of a row, their columns, and the log of the sum of the exponentials of all its logits times the
inverse temperature."""


class Begins(IntEnum):
    """What a row enters the layers with: the state of the row before it; that behind the norm of the spec's entry; or
    what the entry makes of the embedding of the row's token and that state side by side."""

    STATE = 0
    NORMED_STATE = 1
    EMBEDDING_AND_STATE = 2


class Root(NamedTuple):
    """The next rows of a sequence, which are committed to ``kv`` when branches begin.

    ``entering``, (n, inputs): what goes through the spec's entry. ``tokens``, (n,). ``position``: of the first.
    """

    kv: Any
    position: int
    entering: Tensor
    tokens: Seq[int]


class Reading(NamedTuple):
    """What is read of the rows: the ``topk`` largest logits of each (0: none, at most V), and all of them or not.

    ``inverse_temperatures``: one for each row.
    """

    topk: int
    inverse_temperatures: Seq[float]
    logits: bool = False


@dataclass(slots=True)
class Found:
    """What was read, by row. ``best`` is empty for ``topk`` 0; ``logits``, (rows, V), only where they were wanted."""

    best: list[Best]
    logits: Tensor | None = None


class Ranking(NamedTuple):
    """What a draft reads of a row of logits: the ``topk`` largest, and what normalises them at a temperature.
    ``logits``: whether it reads the row itself as well."""

    topk: int
    inverse_temperature: float
    logits: bool = False


class KindRates(NamedTuple):
    """How a tree's candidates are sorted into kinds, and the acceptance rate of each.

    ``rates``, (depths * width) float64: of the candidates at a depth (from ``depths`` on alike), by the bucket that
    their probability is in, or by their rank among siblings where there are no buckets. ``edges``, (width - 1), and
    ``centres``, (width): the buckets'. Candidates less likely than ``floor`` are left out but for each node's first;
    by buckets none is likelier than ``ceiling``.
    """

    rates: array[float]
    depths: int
    width: int
    edges: array[float] | None
    centres: array[float] | None
    floor: float
    ceiling: float


class TreePlan(NamedTuple):
    """All that a tree of :class:`outpace.drafting.dynamic_tree.DynamicTree` depends on, beside the rows' logits.

    ``ids``, int32: the token of each column of the logits. ``kinds``: None takes probabilities as they are. The others
    are what they are there.
    """

    depth: int
    max_nodes: int
    topk: int
    expand: int
    confidence: float
    base_tokens: float
    level: float
    inverse_temperature: float
    children_share: float
    relative_costs: Seq[float]
    ids: array[int]
    kinds: KindRates | None


class GrownTree(NamedTuple):
    """A tree that was grown by its plan.

    ``tokens``, ``parents``, ``depths``, ``probs``: of its nodes, likeliest first, as in a TokenTree. Of all candidates,
    drafted or not: ``candidates``, their tokens, and ``kinds`` (places in the plan's rates; -1 without). ``rows``: the
    candidate (-1: the root) that each row belongs to; its children are those from ``firsts[row]`` to
    ``firsts[row + 1]``.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    probs: list[float]
    candidates: Seq[int]
    kinds: Seq[int]
    rows: Seq[int]
    firsts: Seq[int]


class Draft(Protocol):
    """A draft of one sequence: it asks for rows until it is complete (drafting/candidate_tree.py has its kinds)."""

    @property
    def ranking(self) -> Ranking | None:
        """What it reads of each row; None: all logits."""

    def plan(self) -> TreePlan | None:
        """What it depends on, where it needs not be asked."""

    def grown(self, tree: GrownTree) -> None:
        """It was grown by its plan."""

    def read(self, found: Found, rows: slice) -> list[tuple[int, int]]:
        """The rows that it wants after those that ran last, which are ``rows`` of ``found``: the row that each
        follows, 0 the root and those it asked for from 1 on, and its token. Empty where it is complete."""


class Branches(ABC):
    """Rows that grow. They are numbered from 0: the roots in their order, then each level's. ``columns``: V."""

    columns: int

    @abstractmethod
    def begin(self, roots: Seq[Root], reading: Reading) -> Found:
        """Commit the next rows of some sequences and read the last of each. What grew before is forgotten."""

    @abstractmethod
    def grow(self, after: Seq[int], tokens: Seq[int], reading: Reading) -> Found:
        """Run a level: row ``i`` holds ``tokens[i]`` and follows row ``after[i]``. Those of one sequence stand beside
        one another. Each sees its sequence's committed rows, the path to it and itself."""

    def draft(self, roots: Seq[Root], drafts: Seq[Draft]) -> list[float]:
        """Begin, and run the rows that the draft of each root wants, a level of all at a time, until all are complete.

        Returns the seconds of each level but the roots', with the choice of its rows.
        """
        running = [_Running(draft, [row]) for row, draft in enumerate(drafts)]
        found, count = self.begin(roots, self._reading(running)), len(running)
        seconds = list[float]()
        while True:
            began = perf_counter()
            after: list[int] = []
            tokens: list[int] = []
            asking, at = [], 0
            for one in running:
                wanted = one.draft.read(found, slice(at, at + one.last))
                at += one.last
                if wanted:
                    rows = one.rows
                    for row, token in wanted:
                        after.append(rows[row])
                        tokens.append(token)
                    one.last = len(wanted)
                    rows += range(count, count + one.last)
                    count += one.last
                    asking.append(one)
            if not asking:
                return seconds
            running = asking
            found = self.grow(after, tokens, self._reading(running))
            seconds.append(perf_counter() - began)

    def _reading(self, running: Seq[_Running]) -> Reading:
        """What drafts read of the rows that run next."""
        topk, temperatures, logits = 0, list[float](), False
        for one in running:
            ranking = one.draft.ranking
            if ranking is None:
                logits = True
                temperatures += [1.0] * one.last
            else:
                topk, logits = max(topk, ranking.topk), logits or ranking.logits
                temperatures += [ranking.inverse_temperature] * one.last
        return Reading(min(topk, self.columns), temperatures, logits)


@dataclass(slots=True)
class _Running:
    """A draft that is being run. ``rows``: which of all rows its own are, the root first. ``last``: how many of them
    ran last."""

    draft: Draft
    rows: list[int]
    last: int = 1
