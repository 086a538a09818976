"""Lookahead decoding: n-grams from Jacobi iterations beside the draft, in the same forward.

Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) runs two branches in one forward. The *lookahead branch* is a
window of guesses, ``window`` columns by ``ngram`` - 1 levels: the token of column c at level l stands c + l positions
after the last committed token, and sees the first level up to its own column and the levels above it in that column.
The target's choice at the end of a column completes an n-gram, which goes into a pool; then every level takes the
place of the one before it, and the choices are the new last level. The *verification branch* drafts the n-grams of the
pool that begin with the last committed token.

The window is made of side nodes, whose first is the last committed token itself. Pool and window hold the target's
choices and committed text, so draft tokens are certain given the past, and the answer is exact at any temperature.

Beside the paper: n-grams with the same beginning share its nodes; where a guess ends, those that begin with its last
token go on; guesses are taken best first by the acceptance that their recency has had, as far as they pay; and the
window is left out of rounds while its n-grams bring less than its rows cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.lru import Lru
from outpace.core.metrics import CacheUse
from outpace.core.tree import ROOT, AuxiliaryToken, TokenTree
from outpace.drafting.best_first import BestFirst, Grown, Successor
from outpace.drafting.calibration import Calibration
from outpace.drafting.namespaces import Namespaces
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, TreeScores

Tokens = tuple[int, ...]
Found = Lru[Tokens, bool]
"""What followed one token, and whether the window alone has found it."""


class Origin(NamedTuple):
    """The kind of a candidate: its place in the n-gram, its recency rank among siblings, and whether the window alone
    has found it."""

    place: int
    rank: int
    window: bool


def prior(kind: Origin) -> float:
    """Acceptance before anything is known."""
    return (0.15 if kind.place == 0 else 0.4) / (1.0 + kind.rank)


class Pool:
    """N-grams of one namespace, by their first token: at most ``guesses`` of each of ``entries`` first tokens."""

    def __init__(self, guesses: int, entries: int) -> None:
        self.guesses = guesses
        self.table: Lru[int, Found] = Lru(entries)

    def add(self, gram: Seq[int], *, window: bool) -> None:
        """Take in an n-gram that the window found, or the text holds."""
        first, rest = gram[0], tuple(gram[1:])
        found = self.table.get(first)
        if found is None:
            found = Lru(self.guesses)
            self.table.put(first, found)
        if rest in found:
            window = window and bool(found.get(rest))
        found.put(rest, window)

    def after(self, first: int) -> list[tuple[Tokens, bool]]:
        """What followed ``first``, most recent first, each with whether the window alone has found it."""
        found = self.table.get(first)
        if found is None:
            return []
        oldest = [(rest, bool(found.get(rest))) for rest in reversed(found.recent())]  # in this order all stay in order
        return oldest[::-1]


class Grid:
    """The lookahead branch of one request: ``levels[l][c]``. Column 0 of level 0 is the last committed token."""

    def __init__(self, columns: int, levels: int, text: Seq[int]) -> None:
        # First guesses are the last tokens of the prompt: any will do, and these at least belong together.
        tail = list(text[-columns * levels :])
        self.columns = columns
        self.levels = [
            [tail[(level * columns + column) % len(tail)] for column in range(columns)] for level in range(levels)
        ]

    def side(self, owner: object, nodes: int) -> list[AuxiliaryToken]:
        """Its rows beside a tree of ``nodes`` nodes, level by level."""
        rows: list[AuxiliaryToken] = []
        names: list[list[int]] = []
        for level, tokens in enumerate(self.levels):
            names.append([])
            for column, token in enumerate(tokens):
                if level == column == 0:
                    names[0].append(ROOT)
                    continue
                seen = names[0][:column] if level == 0 else names[0][: column + 1]
                seen = [*seen, *(names[above][column] for above in range(1, level))]
                names[level].append(nodes + len(rows))
                rows.append(AuxiliaryToken(token, level + column, tuple(seen), owner=owner))
        return rows

    def grams(self, root: int, choices: Seq[int]) -> list[Tokens]:
        """The n-gram of every column, which the target's ``choices`` complete. ``root`` is where the window stood."""
        first = [root, *self.levels[0][1:]]
        below = [[token[column] for token in self.levels[1:]] for column in range(self.columns)]
        return [(head, *rest, choice) for head, rest, choice in zip(first, below, choices, strict=True)]

    def advance(self, choices: Seq[int]) -> None:
        """Every level takes the place of the one before it."""
        self.levels = [*self.levels[1:], list(choices)]


class Ahead(NamedTuple):
    """A place in the pool's n-grams: what remains of those that came along, and whether the window alone knows them."""

    token: int
    place: int
    rest: list[tuple[Tokens, bool]]


GAIN = 0.15
"""Accepted tokens a round that a window is expected to bring, before anything is known."""
RECENT = 0.05
"""How much one round counts in what happened lately."""
FADING = 0.01
"""How much of what was learned a round without a window forgets, so that it is tried again."""


@dataclass(slots=True)
class _Request:
    """One request's window, and what it is worth."""

    grid: Grid
    calibration: Calibration
    known: int = 0
    """Tokens of the sequence that the pool has taken in."""
    gain: float = GAIN
    """Accepted tokens a round that came from the window alone, lately."""
    pace: float = 1.0
    """All other tokens a round, lately."""
    side: bool = False
    """Whether the window is part of this round."""
    root: int = 0
    """The last committed token when the round began."""

    def weigh(self, tokens: int, gained: int) -> None:
        """A round committed ``tokens``, ``gained`` of them by the window."""
        self.pace += RECENT * (tokens - gained - self.pace)
        if self.side:
            self.gain += RECENT * (gained - self.gain)
        else:
            self.gain += FADING * (GAIN - self.gain)

    def when_to_use(self, relative_costs: Seq[float], drafted: int, rows: int) -> bool:
        """Whether a window of ``rows`` beside the draft brings more than it costs. Always where no prices are known."""
        if not relative_costs:
            return True
        if drafted + rows >= len(relative_costs):
            return False
        return (self.pace + self.gain) * relative_costs[drafted] >= self.pace * relative_costs[drafted + rows]


class Lookahead(BestFirst):
    """Drafts n-grams of the pool as a tree, and carries the window along as side nodes."""

    needs_whole = True

    def __init__(
        self,
        window: int = 2,
        ngram: int = 3,
        guesses: int = 4,
        entries: int = 10_000,
        *,
        text: bool = True,
        context_length: int = 2**31,
        namespaces: int = 64,
    ) -> None:
        super().__init__()
        self.window, self.ngram, self.text = window, ngram, text
        self._context = context_length
        self._pools = Namespaces(lambda: Pool(guesses, entries), namespaces)
        self._requests: dict[Sequence, _Request] = {}

    def begin(self, sequence: Sequence) -> None:
        self._pools.open(sequence)
        grid = Grid(self.window, self.ngram - 1, sequence.tokens)
        self._requests[sequence] = _Request(grid, Calibration(prior))

    def calibration(self, sequence: Sequence) -> Calibration:
        return self._requests[sequence].calibration

    def root(self, sequence: Sequence) -> Ahead:
        request, tokens = self._requests[sequence], sequence.tokens
        if self.text:
            pool = self._pools[sequence]
            for end in range(max(request.known + 1, self.ngram), len(tokens) + 1):
                pool.add(tokens[end - self.ngram : end], window=False)
            request.known = len(tokens)
        return Ahead(tokens[-1], 0, [])

    def successors(self, sequence: Sequence, state: Ahead) -> Iterable[Successor]:
        token, place, rest = state
        if not rest:  # a guess is at its end: those that begin with its last token go on
            place, rest = 0, self._pools[sequence].after(token)
        branches: dict[int, list[tuple[Tokens, bool]]] = {}
        for gram, window in rest:
            branches.setdefault(gram[0], []).append((gram[1:], window))
        for rank, (following, grams) in enumerate(branches.items()):
            kind = Origin(place, rank, all(window for _, window in grams))
            yield Successor(following, kind, Ahead(following, place + 1, [one for one in grams if one[0]]))

    def _propose(self, sequence: Sequence, budget: Budget) -> TokenTree:
        request, tree = self._requests[sequence], super()._propose(sequence, budget)
        rows = self.window * (self.ngram - 1) - 1
        room = len(sequence.tokens) + self.window + self.ngram - 3 < self._context
        request.root = sequence.tokens[-1]
        request.side = budget.depth > 0 and room and request.when_to_use(budget.relative_costs, len(tree), rows)
        if request.side:
            tree.auxiliary_tokens = request.grid.side(self, len(tree))
        return tree

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, scored in zip(sequences, scores, strict=True):
            request, grown = self._requests[sequence], self._grown.get(sequence)
            rows = scored.auxiliary_rows(self)
            request.side = request.side and bool(rows)  # another drafter's tree may have been scored
            if grown is not None:
                came = sequence.tokens[grown.length :]
                request.weigh(len(came), _gained(grown, came))
            if request.side:
                self._look(sequence, request, scored, rows)
            request.side = False
        super().observe(sequences, scores, verdicts)

    def _look(self, sequence: Sequence, request: _Request, scored: TreeScores, rows: list[int]) -> None:
        """Take in the n-grams that the window has completed."""
        ends = [0, *rows][-self.window :]  # row 0 is the last committed token: column 0 of level 0
        choices = [int(row.argmax()) for row in scored.logits[ends].float().cpu().numpy()]
        pool = self._pools[sequence]
        for gram in request.grid.grams(request.root, choices):
            pool.add(gram, window=True)
        request.grid.advance(choices)

    def caches(self, sequence: Sequence) -> tuple[CacheUse, ...]:
        table = self._pools[sequence].table
        return (CacheUse("n-grams by first token", len(table), table.bound, table.evicted),)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._pools.close(sequence)
        self._requests.pop(sequence, None)


def _gained(grown: Grown, came: Seq[int]) -> int:
    """How many of the tokens that came stood on a path that the window alone had found."""
    node, gained = ROOT, 0
    for token in came:
        child = grown.tree.child(node, token)
        if child is None:
            break
        kind = grown.kinds[child]
        assert isinstance(kind, Origin)
        gained += gained > 0 or kind.window
        node = child
    return gained


class LookaheadSettings(BaseModel):
    """Settings of ``lookahead``."""

    model_config = ConfigDict(extra="forbid")

    window: int = Field(2, ge=1, le=64, description="columns of the window (W)")
    ngram: int = Field(3, ge=2, le=16, description="tokens of an n-gram (N); the window has N - 1 levels")
    guesses: int = Field(4, ge=1, le=256, description="n-grams that are kept of each first token (G)")
    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    depth: int = Field(8, ge=1, le=64, description="draft tokens on a path, where nodes are given")
    text: bool = Field(True, description="whether n-grams of prompt and answer enter the pool as well")
    entries: int = Field(10_000, ge=1, description="most first tokens of a namespace; least recently used leave first")
    namespaces: int = Field(64, ge=1, description="most namespaces whose tables are kept")


@register(
    "lookahead",
    family="jacobi",
    paper="Fu et al. 2024, arXiv 2402.02057",
    summary="Collects n-grams from a Jacobi window beside the draft, in the same forward, and drafts them.",
    when_to_use="Where a forward has rows to spare, as on a GPU at batch one: the window's rows must cost next to "
    "nothing. "
    "On a CPU a small window at most.",
    tiny={"window": 2, "ngram": 3, "guesses": 2, "nodes": 3, "depth": 2},
)
def build(context: Context, settings: LookaheadSettings) -> Parts:
    """A window and a pool of n-grams."""
    drafter = Lookahead(
        settings.window,
        settings.ngram,
        settings.guesses,
        settings.entries,
        text=settings.text,
        context_length=context.target.context_length,
        namespaces=settings.namespaces,
    )
    if settings.nodes is None:
        return Parts(drafter, CostModel(context.target.costs))
    return Parts(drafter, Fixed(settings.depth, settings.guesses, settings.nodes))
