"""Lookahead decoding: n-grams from Jacobi iterations beside the draft, in the same forward.

Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) runs two branches in one forward. The *lookahead branch* is a
window of guesses, ``window`` columns by ``ngram`` - 1 levels: the token of column c at level l stands c + l positions
after the last committed token, and sees the first level up to its own column and the levels above it in that column.
The target's choice at the end of a column completes an n-gram, which goes into a pool; then every level takes the
place of the one before it, and the choices are the new last level. The *verification branch* drafts the n-grams of the
pool that begin with the last committed token.

The window is made of auxiliary tokens, and its first is the last committed token itself. Pool and window hold the
target's choices and committed text, so draft tokens are deterministic given the past, and the method is lossless at any
temperature.

Beside the paper: n-grams with the same beginning share its nodes; where an n-gram ends, those that begin with its last
token go on; candidates are taken best first by the acceptance that their recency has had, as many as the measured costs
justify; and the window is left out of rounds while its n-grams bring less than its rows cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.lru import Lru
from outpace.core.metrics import CacheUse
from outpace.core.tree import ROOT, TokenTree
from outpace.core.validation import StrictModel
from outpace.drafting.best_first import BestFirst, CandidateState, Grown, MaxNodes, Successor, tree_controller
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
    """Acceptance before anything was observed."""
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
        # First guesses are the last tokens of the prompt: any would do.
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
    """A place in the pool's n-grams: what remains of those that led here, each with whether the window alone
    has found it."""

    token: int
    place: int
    rest: list[tuple[Tokens, bool]]


GAIN = 0.15
"""Accepted tokens a round that a window is expected to bring, before anything was observed."""
RECENT = 0.05
"""The weight of one round in the moving averages."""
FADING = 0.01
"""The weight of the expected gain in a round without a window, so that the window is tried again."""


@dataclass(slots=True, kw_only=True)
class LookaheadState(CandidateState):
    """One request's window, the namespace's pool, and how much the window brings."""

    grid: Grid
    pool: Pool
    known: int = 0
    """Tokens of the sequence that the pool has taken in."""
    gain: float = GAIN
    """Accepted tokens a round that came from the window alone, a moving average."""
    pace: float = 1.0
    """All other tokens a round, a moving average."""
    side: bool = False
    """Whether the window is part of this round."""

    def weigh(self, tokens: int, gained: int) -> None:
        """A round committed ``tokens``, ``gained`` of them by the window."""
        self.pace += RECENT * (tokens - gained - self.pace)
        if self.side:
            self.gain += RECENT * (gained - self.gain)
        else:
            self.gain += FADING * (GAIN - self.gain)

    def is_window_cheap(self, budget: Budget, drafted: int, rows: int) -> bool:
        """Whether a window of ``rows`` beside the draft brings more than it costs. Always where no costs are known."""
        costs, pace = budget.relative_costs, self.pace + budget.base_tokens - 1.0
        if not costs:
            return True
        if drafted + rows >= len(costs):
            return False
        return (pace + self.gain) * costs[drafted] >= pace * costs[drafted + rows]


class Lookahead(BestFirst[LookaheadState]):
    """Drafts n-grams of the pool as a tree, with the window as auxiliary tokens beside it."""

    needs_target_internals = True

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
        self.window, self.ngram, self.text = window, ngram, text
        self._context = context_length
        self._pools = Namespaces(lambda: Pool(guesses, entries), namespaces)

    def begin(self, sequence: Sequence) -> LookaheadState:
        grid = Grid(self.window, self.ngram - 1, sequence.tokens)
        return LookaheadState(sequence, Calibration(prior), grid=grid, pool=self._pools.open(sequence))

    def root(self, state: LookaheadState) -> Ahead:
        tokens = state.sequence.tokens
        if self.text:
            for end in range(max(state.known + 1, self.ngram), len(tokens) + 1):
                state.pool.add(tokens[end - self.ngram : end], window=False)
            state.known = len(tokens)
        return Ahead(tokens[-1], 0, [])

    def successors(self, state: LookaheadState, place: Ahead) -> Iterable[Successor]:
        token, at, rest = place
        if not rest:  # an n-gram is at its end: those that begin with its last token go on
            at, rest = 0, state.pool.after(token)
        branches: dict[int, list[tuple[Tokens, bool]]] = {}
        for gram, window in rest:
            branches.setdefault(gram[0], []).append((gram[1:], window))
        for rank, (following, grams) in enumerate(branches.items()):
            kind = Origin(at, rank, all(window for _, window in grams))
            yield Successor(following, kind, Ahead(following, at + 1, [one for one in grams if one[0]]))

    def propose(self, state: LookaheadState, budget: Budget) -> TokenTree:
        tree = super().propose(state, budget)
        rows = self.window * (self.ngram - 1) - 1
        room = len(state.sequence.tokens) + self.window + self.ngram - 3 < self._context
        state.side = budget.depth > 0 and room and state.is_window_cheap(budget, len(tree), rows)
        if state.side:
            tree.auxiliary_tokens = state.grid.side(self, len(tree))
        return tree

    def observe(self, state: LookaheadState, verdict: Verdict) -> None:
        scores, grown = verdict.scores, state.grown
        rows = scores.auxiliary_rows(self)
        state.side = state.side and bool(rows)  # another drafter's tree may have been scored
        if grown is not None:
            state.weigh(len(verdict.committed), _gained(grown, verdict.committed))
        if state.side:
            self._collect(state, scores, rows)
        state.side = False
        super().observe(state, verdict)

    def _collect(self, state: LookaheadState, scores: TreeScores, rows: list[int]) -> None:
        """Take in the n-grams that the window has completed."""
        ends = [0, *rows][-self.window :]  # row 0 is the last committed token: column 0 of level 0
        choices = [int(row.argmax()) for row in scores.logits[ends].float().cpu().numpy()]
        root = state.sequence.tokens[scores.length - 1]
        for gram in state.grid.grams(root, choices):
            state.pool.add(gram, window=True)
        state.grid.advance(choices)

    def caches(self, state: LookaheadState) -> tuple[CacheUse, ...]:
        table = state.pool.table
        return (CacheUse("n-grams by first token", len(table), table.bound, table.evicted),)


def _gained(grown: Grown, committed: Seq[int]) -> int:
    """How many of the committed tokens are on a path that the window alone had found."""
    gained = 0
    for node in grown.tree.follow(committed):
        kind = grown.kinds[node]
        assert isinstance(kind, Origin)
        gained += gained > 0 or kind.window
    return gained


class LookaheadSettings(StrictModel):
    """Settings of ``lookahead``."""

    window: int = Field(2, ge=1, le=64, description="columns of the window (W)")
    ngram: int = Field(3, ge=2, le=16, description="tokens of an n-gram (N); the window has N - 1 levels")
    guesses: int = Field(4, ge=1, le=256, description="n-grams kept per first token (G)")
    max_nodes: MaxNodes = None
    depth: int = Field(8, ge=1, le=64, description="draft tokens on a path, if max_nodes is given")
    text: bool = Field(True, description="whether n-grams of prompt and answer are added to the pool")
    entries: int = Field(
        10_000,
        ge=1,
        description="maximum number of first tokens per namespace; the least recently used are removed first",
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose tables are kept")


@register(
    "lookahead",
    family="jacobi",
    paper="Fu et al. 2024, arXiv 2402.02057",
    summary="Collects n-grams from a Jacobi window in the scoring forward pass and drafts them.",
    when_to_use="When additional rows hardly slow a forward pass, as on a GPU at batch size one. On a CPU only "
    "with a small window.",
    tiny={"window": 2, "ngram": 3, "guesses": 2, "max_nodes": 3, "depth": 2},
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
    return Parts(drafter, tree_controller(context.target, settings.depth, settings.max_nodes))
