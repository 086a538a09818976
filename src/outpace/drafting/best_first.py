"""Deterministic draft trees, grown best first: the paths that are most likely to be accepted.

Candidates are taken in the order of their path's estimated acceptance probability, a product of calibrated rates, so
that the first n candidates are a tree for every n. How many of them are drafted is decided afterwards, from these
probabilities and from the measured costs (``Budget.best_draft_size``).

To write a drafter on this basis, subclass :class:`BestFirst` and say which tokens may follow a place in its tables.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.calibration import Calibration, Kind
from outpace.targets.base import Target

FLOOR = 0.02
"""Paths that are less likely to be accepted than this are left out."""


class Successor(NamedTuple):
    """A candidate: ``token`` of a ``kind``, and the ``place`` in the drafter's tables that it leads to."""

    token: int
    kind: Kind
    place: Any


class Grown(NamedTuple):
    """All candidates of one round, best first, and their kinds by node."""

    tree: TokenTree
    kinds: list[Kind]


Rated = Iterable[tuple[float, Successor]]
"""Siblings with their acceptance rates; of equal rates the first is preferred."""


def grow(root: Any, rated: Callable[[Any], Rated], depth: int, nodes: int, floor: float) -> Grown:
    """The tree of at most ``nodes`` likeliest paths of at most ``depth`` tokens, best first; of equals the earlier.

    ``rated(place)``: what may follow a place. The probability of a path is the product of its tokens' rates; paths
    below ``floor`` are left out.
    """
    tree, kinds = TokenTree(), list[Kind]()
    heap: list[tuple[float, int, int, Successor]] = []
    order = 0

    def push(parent: int, path_acceptance_prob: float, place: Any) -> None:
        nonlocal order
        for rate, one in rated(place):
            product = path_acceptance_prob * rate
            if product >= floor:
                order += 1
                heapq.heappush(heap, (-product, order, parent, one))

    if depth > 0:
        push(ROOT, 1.0, root)
    while heap and len(tree) < nodes:
        negative, _, parent, one = heapq.heappop(heap)
        if tree.child(parent, one.token) is not None:
            continue  # two successors hold one token: the likelier came first
        node = tree.add(parent, one.token, path_acceptance_prob=-negative)
        kinds.append(one.kind)
        if tree.depths[node] < depth:
            push(node, -negative, one.place)
    return Grown(tree, kinds)


Likeliest = tuple[float, Successor]
"""A successor with its acceptance rate."""


class GrownPath(NamedTuple):
    """The likeliest path of one round: its tokens, how likely the path to each is accepted, and their kinds."""

    tokens: list[int]
    path_acceptance_probs: list[float]
    kinds: list[Kind]


def grow_path(root: Any, likeliest: Callable[[Any], Likeliest | None], nodes: int, floor: float) -> GrownPath:
    """The path of at most ``nodes`` tokens that takes the likeliest successor of every place, as long as its
    probability is not below ``floor``: what :func:`grow` makes of these successors alone."""
    path = tokens, probs, kinds = GrownPath([], [], [])
    place, prob = root, 1.0
    while len(tokens) < nodes and (found := likeliest(place)) is not None:
        rate, (token, kind, place) = found
        prob *= rate
        if prob < floor:
            break
        tokens.append(token)
        probs.append(prob)
        kinds.append(kind)
    return path


@dataclass(slots=True)
class CandidateState(DraftState):
    """What a drafter with calibrated candidates keeps of one request."""

    calibration: Calibration
    grown: Grown | None = None
    """The candidates of this round; None where nothing was proposed."""
    path: GrownPath | None = None
    """The same where only the likeliest path is drafted."""

    def draft(self, grown: Grown, budget: Budget) -> TokenTree:
        """Keep the candidates for :meth:`learn`; the tree of as many of them as are best to draft."""
        self.grown = grown
        count = budget.best_draft_size(grown.tree.path_acceptance_probs)
        return grown.tree if count == len(grown.tree) else grown.tree.first(count)

    def draft_path(self, path: GrownPath, budget: Budget) -> TokenTree:
        """:meth:`draft` for a path."""
        self.path = path
        tokens, probs, _ = path
        count = budget.best_draft_size(probs) if tokens else 0
        return TokenTree.chain(tokens[:count], path_acceptance_probs=probs[:count]) if count else TokenTree()

    def learn(self, verdict: Verdict) -> None:
        """The round is over: all candidates teach, drafted or not."""
        grown, path = self.grown, self.path
        self.grown = self.path = None
        if grown is not None:
            self.calibration.learn_tree(grown.tree, grown.kinds, verdict.committed)
        if path is not None:
            self.calibration.learn_path(path.tokens, path.kinds, verdict.committed)


MaxNodes = Annotated[
    int | None,
    Field(
        ge=0, le=512, description="maximum number of draft tokens per round; by default chosen by the measured costs"
    ),
]


def tree_controller(target: Target, depth: int, max_nodes: int | None) -> Controller:
    """A fixed number of draft tokens on paths of ``depth``, or, for None, as many as the measured costs justify."""
    return CostModel(target.costs) if max_nodes is None else Fixed(depth, max_nodes=max_nodes)


S = TypeVar("S", bound=CandidateState)


class BestFirst(Drafter[S], ABC):
    """Grows trees from successors and learns how often each kind of candidate is right."""

    proposal = Proposal(tree=True)
    weighs_costs = True
    states_draft_steps = True
    single_path: bool = False
    """Whether to draft the likeliest path alone, for engines that verify no more."""

    @abstractmethod
    def root(self, state: S) -> Any:
        """The place of the last committed token, once the newest tokens are taken in; None: nothing to draft from."""

    @abstractmethod
    def successors(self, state: S, place: Any) -> Iterable[Successor]:
        """What may follow a place; of candidates with equal rates the first is preferred."""

    def likeliest(self, state: S, place: Any) -> Likeliest | None:
        """The successor with the highest rate, of equal rates the first; None where nothing may follow.

        Paths ask for this one alone. A drafter that has many successors overrides it, so that no others are built.
        """
        rate = state.calibration.rate
        found = [(rate(one.kind), one) for one in self.successors(state, place)]
        return max(found, key=itemgetter(0), default=None)

    def propose(self, state: S, budget: Budget) -> TokenTree:
        place, rate = self.root(state), state.calibration.rate
        state.grown = state.path = None
        if place is None or budget.depth <= 0 or budget.max_nodes <= 0:
            return TokenTree()

        if self.single_path:
            most = min(budget.depth, budget.max_nodes)
            return state.draft_path(grow_path(place, partial(self.likeliest, state), most, FLOOR), budget)

        def rated(place: Any) -> Rated:
            return [(rate(one.kind), one) for one in self.successors(state, place)]

        return state.draft(grow(place, rated, budget.depth, budget.max_nodes, FLOOR), budget)

    def observe(self, state: S, verdict: Verdict) -> None:
        state.learn(verdict)
