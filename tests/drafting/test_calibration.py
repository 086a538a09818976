"""Rates that are learned by kind, and trees that grow in their order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import given, strategies as st

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget, Controller
from outpace.controllers.fixed import Fixed
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.best_first import FLOOR, BestFirst, CandidateState, Grown, Successor
from outpace.drafting.calibration import MEMORY, WEIGHT, Calibration, Kind, PooledCalibration
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget, random_table

# ------------------------------------------------------------------------------------------------- calibration


def test_before_anything_is_seen_the_prior_holds() -> None:
    calibration = Calibration(lambda kind: {"often": 0.8}.get(kind, 0.1))
    assert calibration.rate("often") == 0.8
    calibration.learn("often", False)
    assert calibration.rate("seldom") == 0.1, "kinds do not learn from each other"


@given(st.floats(0.05, 0.95), st.lists(st.booleans(), max_size=60))
def test_the_rate_is_the_prior_and_the_observations_by_their_weights(prior: float, seen: list[bool]) -> None:
    calibration = Calibration(lambda kind: prior)
    for hit in seen:
        calibration.learn("kind", hit)
    assert calibration.rate("kind") == pytest.approx((WEIGHT * prior + sum(seen)) / (WEIGHT + len(seen)))


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_what_was_learned_fades_when_the_text_changes(share: float) -> None:
    calibration = Calibration(lambda kind: 0.5)
    for count in range(int(10 * MEMORY)):
        calibration.learn("kind", count % 10 < 10 * share)
    assert calibration.rate("kind") == pytest.approx(share, abs=0.05)
    for count in range(int(2 * MEMORY)):
        calibration.learn("kind", count % 10 >= 10 * share)
    assert calibration.rate("kind") == pytest.approx(1 - share, abs=0.2), "old text does not outvote new text"


@pytest.mark.parametrize("right", [True, False])
def test_where_kinds_are_pooled_one_teaches_all(right: bool) -> None:
    pooled = PooledCalibration({"short": 0.2, "long": 0.7, "other": 0.7}.__getitem__, lambda kind: kind == "other")
    before = pooled.rate("long")
    for _ in range(4):
        pooled.learn("short", right)
    assert (pooled.rate("long") > before) == right
    assert pooled.rate("long") > pooled.rate("short")
    assert pooled.rate("other") == 0.7, "of another pool"


@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.integers(0, 2**32 - 1))
def test_pooled_rates_come_to_be_each_kind_s_own(first: float, second: float, seed: int) -> None:
    truth, random = {"a": first, "b": second}, Random(seed)
    pooled = PooledCalibration(lambda kind: 0.5, lambda kind: None)
    for _ in range(1500):
        kind = random.choice("ab")
        pooled.learn(kind, random.random() < truth[kind])
        assert 0.0 < pooled.rate(kind) < 1.0
    assert all(pooled.rate(kind) == pytest.approx(rate, abs=0.15) for kind, rate in truth.items())


def test_a_tree_teaches_along_the_tokens_that_came() -> None:
    """Siblings of the right token were wrong; what hangs on them teaches nothing, for nobody knows."""
    tree = TokenTree()
    right, wrong = tree.add(ROOT, 1), tree.add(ROOT, 2)
    tree.add(wrong, 3)
    under = [tree.add(right, token) for token in (4, 5)]
    tree.add(under[1], 6)
    kinds: list[Kind] = ["first", "second", "under wrong", "a", "b", "leaf"]
    calibration = Calibration(lambda kind: 0.5)
    calibration.learn_tree(tree, kinds, [1, 5])
    more, less = (WEIGHT * 0.5 + 1) / (WEIGHT + 1), WEIGHT * 0.5 / (WEIGHT + 1)
    rates = {kind: calibration.rate(kind) for kind in kinds}
    assert rates == {"first": more, "second": less, "under wrong": 0.5, "a": less, "b": more, "leaf": 0.5}
    calibration.learn_tree(tree, kinds, [7, 1])
    assert calibration.rate("first") == pytest.approx((WEIGHT * 0.5 + 1) / (WEIGHT + 2)), "the tree was left at once"
    assert calibration.rate("a") == less


# ------------------------------------------------------------------------------------------------- best first

Edges = dict[tuple[int, ...], list[tuple[int, int]]]
"""What may follow a path: (token, kind)."""


class Tabled(BestFirst[CandidateState]):
    """Successors by a table over the drafted path; the path is the place."""

    def __init__(self, edges: Edges, rates: list[float]) -> None:
        self.edges = edges
        self.rates = Calibration(rates.__getitem__)

    def begin(self, sequence: Sequence) -> CandidateState:
        return CandidateState(sequence, self.rates)

    def root(self, state: CandidateState) -> Any:
        return ()

    def successors(self, state: CandidateState, place: Any) -> Iterable[Successor]:
        return [Successor(token, kind, (*place, token)) for token, kind in self.edges.get(place, ())]


@st.composite
def candidate_trees(draw: st.DrawFn) -> Tabled:
    """Up to three successors after every path of up to three tokens, of five kinds; tokens may come twice."""
    entry = st.tuples(st.integers(0, 2), st.integers(0, 4))
    paths = [path for depth in range(4) for path in product(range(3), repeat=depth)]
    edges = {path: draw(st.lists(entry, max_size=3)) for path in paths if draw(st.booleans())}
    return Tabled(edges, draw(st.lists(st.floats(0.02, 0.98), min_size=5, max_size=5)))


def all_paths(candidates: Tabled, depth: int) -> dict[tuple[int, ...], float]:
    """Every path that there is with its estimate; of two for one path the larger."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for path, path_acceptance_prob in level.items():
            for token, kind in candidates.edges.get(path, ()):
                value = path_acceptance_prob * candidates.rates.rate(kind)
                if value >= FLOOR:
                    longer[*path, token] = max(value, longer.get((*path, token), 0.0))
        found |= longer
        level = longer
    return found


@given(candidate_trees(), st.integers(0, 4), st.integers(0, 12))
def test_the_likeliest_paths_are_drafted_in_their_order(candidates: Tabled, depth: int, nodes: int) -> None:
    """Against every path there is, sorted."""
    tree = candidates.propose(candidates.begin(TARGET.sequence([1, 2])), Budget(depth, nodes))
    paths = all_paths(candidates, depth)
    assert len(tree) == min(nodes, len(paths)) if depth else len(tree) == 0
    assert tree.path_acceptance_probs == pytest.approx(sorted(paths.values(), reverse=True)[: len(tree)])
    for node in range(len(tree)):
        assert tree.path_acceptance_probs[node] == pytest.approx(paths[tuple(tree.path_tokens(node))])
    assert tree.is_deterministic
    assert max(tree.depths, default=0) <= depth


@given(candidate_trees(), st.lists(st.floats(0.05, 0.6), min_size=8, max_size=8))
def test_as_many_are_drafted_as_pay(candidates: Tabled, steps: list[float]) -> None:
    relative_costs = tuple(1.0 + sum(steps[:count]) for count in range(9))
    state = candidates.begin(TARGET.sequence([1, 2]))
    whole = candidates.propose(state, Budget(4, 8))
    tree = candidates.propose(state, Budget(4, 8, relative_costs=relative_costs))
    paces = [(1 + sum(whole.path_acceptance_probs[:count])) / relative_costs[count] for count in range(len(whole) + 1)]
    assert paces[len(tree)] == pytest.approx(max(paces))
    assert tree.tokens == whole.tokens[: len(tree)]


# ------------------------------------------------------------------------------------------------ both at work

VOCAB = 5
TARGET = TableTarget(VOCAB, random_table(VOCAB, 3, order=1))


class Priced(Controller):
    """A draft token costs half an autoregressive step."""

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return Budget(4, 4, relative_costs=tuple(1 + 0.5 * count for count in range(5)))


class Guesses(BestFirst[CandidateState]):
    """After every token two candidates: one that the target never chooses, and its very next token.

    It takes the wrong one (kind 0) for far likelier than the right one (kind 1).
    """

    priors: ClassVar = {0: 0.7, 1: 0.2}

    def begin(self, sequence: Sequence) -> CandidateState:
        return CandidateState(sequence, Calibration(self.priors.__getitem__))

    def root(self, state: CandidateState) -> Any:
        return state.sequence.tokens[-1]

    def successors(self, state: CandidateState, place: Any) -> Iterable[Successor]:
        right = int(TARGET.table((0, place)).argmax())
        wrong = (right + 1) % VOCAB
        return [Successor(wrong, 0, wrong), Successor(right, 1, right)]


def decode(drafter: BestFirst[CandidateState], controller: Controller, length: int = 150) -> Generation:
    decoder = Decoder(TARGET)
    method = Method("guesses", drafter, RecursiveRejection(), controller)
    generation = decoder.submit(Request((1, 2), method, max_new_tokens=length, trace=True))
    decoder.run()
    return generation


def late_acceptance(generation: Generation) -> float:
    """Tokens a round in the second half."""
    rounds = generation.rounds[len(generation.rounds) // 2 :]
    return sum(len(one.committed) for one in rounds) / len(rounds)


@pytest.mark.parametrize("controller", [Priced(), Fixed(3, max_nodes=3)], ids=["priced", "fixed"])
def test_a_wrong_prior_is_unlearned(controller: Controller) -> None:
    assert late_acceptance(decode(Guesses(), controller)) > 2.5


@pytest.mark.parametrize("controller", [Priced(), Fixed(3, max_nodes=3)], ids=["priced", "fixed"])
def test_without_calibration_it_is_not(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "learn", lambda *_: None)
    assert late_acceptance(decode(Guesses(), controller)) < 2.1


def test_candidates_that_were_not_drafted_teach_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """At these prices nothing pays at first: what was not drafted must say that it would have been right."""

    class Hidden(Guesses):
        priors: ClassVar = {0: 0.01, 1: 0.3}

    learned = decode(Hidden(), Priced())
    assert not len(learned.rounds[0].tree)
    assert late_acceptance(learned) > 2.5

    def forgetful(self: CandidateState, grown: Grown, budget: Budget) -> TokenTree:
        tree = honest(self, grown, budget)
        self.grown = Grown(tree, grown.kinds[: len(tree)])
        return tree

    honest = CandidateState.draft
    monkeypatch.setattr(CandidateState, "draft", forgetful)
    assert late_acceptance(decode(Hidden(), Priced())) == 1.0
