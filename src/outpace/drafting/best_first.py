"""Deterministic draft trees grown best first: the paths most likely to be accepted, as many as pay.

Subclass :class:`BestFirst` and say what may follow a state of the drafter's tables. Candidates are taken in the order
of their path's estimate, a product of calibrated rates, so that every beginning of the order is a tree; how many of
them are drafted follows from what they promise and what they cost (``Budget.worth``).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.calibration import Calibration, Kind
from outpace.targets.base import Sequence, TreeScores

FLOOR = 0.02
"""Paths less likely than this are not looked at."""


class Successor(NamedTuple):
    """A candidate: ``token`` of a ``kind``, and the ``state`` that it leads to."""

    token: int
    kind: Kind
    state: Any


class Grown(NamedTuple):
    """Candidates of one round: all that were looked at, by node in the order of their estimates."""

    tree: TokenTree
    kinds: list[Kind]
    length: int
    """Tokens of the sequence when they were grown."""


class BestFirst(Drafter, ABC):
    """Grows trees from successors, drafts what pays, and learns how often each kind of candidate is right."""

    proposal = Proposal(tree=True)

    def __init__(self) -> None:
        self._grown: dict[Sequence, Grown] = {}

    @abstractmethod
    def root(self, sequence: Sequence) -> Any:
        """The state at the last committed token, after taking in what was committed; None: nothing to draft from."""

    @abstractmethod
    def successors(self, sequence: Sequence, state: Any) -> Iterable[Successor]:
        """What may follow, likeliest first."""

    @abstractmethod
    def calibration(self, sequence: Sequence) -> Calibration:
        """The rates that hold for this request."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        return [self._propose(one, budget) for one, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: Budget) -> TokenTree:
        state = self.root(sequence)
        if state is None or budget.depth <= 0 or budget.nodes <= 0:
            self._grown.pop(sequence, None)
            return TokenTree()
        grown = self._grown[sequence] = self._grow(sequence, state, budget)
        count = budget.best_draft_size(grown.tree.path_acceptance_probs)
        return grown.tree if count == len(grown.tree) else grown.tree.first(count)

    def _grow(self, sequence: Sequence, state: Any, budget: Budget) -> Grown:
        rate = self.calibration(sequence).rate
        tree, kinds = TokenTree(), list[Kind]()
        order = 0
        heap: list[tuple[float, int, int, Successor]] = []

        def push(parent: int, path_acceptance_prob: float, state: Any) -> None:
            nonlocal order
            for one in self.successors(sequence, state):
                promise = path_acceptance_prob * rate(one.kind)
                if promise >= FLOOR:
                    order += 1  # of equals the earlier
                    heapq.heappush(heap, (-promise, order, parent, one))

        push(ROOT, 1.0, state)
        while heap and len(tree) < budget.nodes:
            negative, _, parent, one = heapq.heappop(heap)
            node = tree.add(parent, one.token, path_acceptance_prob=-negative)
            if node < len(kinds):
                continue  # two entries lead to one token: the likelier came first
            kinds.append(one.kind)
            if tree.depths[node] < budget.depth:
                push(node, -negative, one.state)
        return Grown(tree, kinds, len(sequence.tokens))

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence in sequences:
            grown = self._grown.pop(sequence, None)
            if grown is not None:
                self.calibration(sequence).learn_tree(grown.tree, grown.kinds, sequence.tokens[grown.length :])

    def rewind(self, sequence: Sequence, kept: int) -> None:
        self._grown.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        self._grown.pop(sequence, None)
