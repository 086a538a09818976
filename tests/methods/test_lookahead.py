"""Lookahead decoding against a sequential reading of its window, and the bounds and owners of its pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.exact import Setting, certify_exact
from outpace.controllers.base import Budget, Controller
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.jacobi.lookahead import GAIN, Grid, Lookahead, Origin, Pool
from outpace.methods.registry import Context
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget, random_table
from target_suite import near, opened, reference, tiny_model

PROMPT = [5, 4, 5, 3, 4, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module", params=["dense", "generic"])
def target(request: pytest.FixtureRequest, model: Any) -> Target:
    return DenseTarget(read_decoder_spec(model)) if request.param == "dense" else HFTarget(model)


def lookahead(drafter: Lookahead, nodes: int = 6, depth: int = 4) -> Method:
    return Method("lookahead", drafter, RecursiveRejection(), Fixed(depth, 4, nodes))


def run(target: Target, one: Method, length: int, prompt: list[int] = PROMPT, namespace: str = "") -> Generation:
    decoder = Decoder(target)
    request = Request(tuple(prompt), one, SamplingParams(), max_new_tokens=length, trace=True, namespace=namespace)
    generation = decoder.submit(request)
    decoder.run()
    return generation


# ------------------------------------------------------------------------------------------------------ the window


@pytest.mark.parametrize(("window", "ngram"), [(1, 3), (2, 3), (3, 4), (4, 2), (5, 5)])
def test_every_row_of_the_window_sees_its_own_column(model: Any, target: Target, window: int, ngram: int) -> None:
    """The row at (level, column) scores as the sequence of the first level up to its column, then its column."""
    sequence = opened(target, PROMPT)
    drafter = Lookahead(window, ngram)
    state = drafter.begin(sequence)
    tree = drafter.propose(state, Budget(4, 6, 4))
    levels = state.grid.levels
    scored = target.score([(sequence, tree)])[0]
    rows = iter(scored.auxiliary_rows(drafter))
    assert len(tree) > 0 and len(tree.auxiliary_tokens) == window * (ngram - 1) - 1
    for level in range(ngram - 1):
        for column in range(window):
            if level == column == 0:
                continue
            first = [PROMPT[-1], *levels[0][1 : column + 1]]
            below = [levels[each][column] for each in range(1, level + 1)]
            near(scored.logits[next(rows)], reference(model, [*PROMPT[:-1], *first, *below]))
    assert next(rows, None) is None


@pytest.mark.parametrize(("window", "ngram"), [(2, 3), (3, 4), (3, 2)])
def test_the_algorithm_against_a_sequential_one(model: Any, target: Target, window: int, ngram: int) -> None:
    """Pool and answer of whole runs, with nothing but plain forwards over sequences."""

    def choice(tokens: list[int]) -> int:
        return int(reference(model, tokens).argmax())

    drafter = Lookahead(window, ngram, guesses=100, text=False)
    kept: list[Pool] = []
    make = drafter._pools._make
    drafter._pools._make = lambda: kept.append(make()) or kept[-1]  # type: ignore[func-returns-value]
    got = run(target, lookahead(drafter), 12)

    sequence = target.sequence(PROMPT)
    tokens = list(PROMPT)
    pool: set[tuple[int, ...]] = set()
    levels = Grid(window, ngram - 1, sequence.tokens).levels
    for one in got.rounds[:-1]:  # in the last, nothing may be drafted
        for node in range(len(one.tree)):
            assert one.tree.depths[node] >= ngram or any(
                [tokens[-1], *one.tree.path_tokens(node)] == list(gram[: one.tree.depths[node] + 1]) for gram in pool
            ), "drafted what the pool does not hold"
        levels[0][0] = tokens[-1]
        new = []
        for column in range(window):
            diagonal = [level[column] for level in levels]
            new.append(choice([*tokens[:-1], *levels[0][:column], *diagonal]))
            pool.add((*diagonal, new[-1]))
        levels = [*levels[1:], new]
        for token in one.committed:
            assert token == choice(tokens)
            tokens.append(token)
    held = {(first, *rest) for first in kept[0].table.recent() for rest, _ in kept[0].after(first)}
    assert held == pool
    assert tokens[len(PROMPT) :] == got.tokens[: len(tokens) - len(PROMPT)]


def test_the_window_stays_inside_the_context() -> None:
    target = TableTarget(9, random_table(9, 1), context_length=30)
    got = run(target, lookahead(Lookahead(3, 4, context_length=30), nodes=1, depth=1), 100)
    for one, start in zip(got.rounds, _starts(got), strict=True):
        assert all(start + side.position < 30 for side in one.tree.auxiliary_tokens)
    assert got.rounds[0].tree.auxiliary_tokens
    assert not got.rounds[-2].tree.auxiliary_tokens


def _starts(got: Generation) -> list[int]:
    """Position of every round's root."""
    out, at = [], len(got.request.prompt) - 1
    for one in got.rounds:
        out.append(at)
        at += len(one.committed)
    return out


# ---------------------------------------------------------------------------------------------------------- drafts


def test_guesses_share_their_beginnings_and_go_on_where_they_end() -> None:
    drafter = Lookahead(1, 3)
    state = drafter.begin(TableTarget(100).sequence([1, 2, 3, 1, 2, 4, 9, 1]))
    for place in (0, 1):
        for _ in range(50):  # guesses have come right: long ones are worth a look
            state.calibration.learn(Origin(place, 0, False), True)
    tree = drafter.propose(state, Budget(5, 50, 4))
    # After 1 came (2, 4) and (2, 3), which share a node; where they end, 4 goes on with (9, 1), 3 with (1, 2).
    two = tree.child(ROOT, 2)
    assert two is not None and tree.children(ROOT) == [two]
    assert sorted(tree.tokens[node] for node in tree.children(two)) == [3, 4]
    assert [2, 4, 9, 1] in [tree.path_tokens(node) for node in range(len(tree))]
    assert max(tree.depths) == 5


def test_the_latest_guess_is_the_likeliest() -> None:
    drafter = Lookahead(1, 3)
    tree = drafter.propose(drafter.begin(TableTarget(100).sequence([1, 2, 3, 1, 4, 5, 1])), Budget(2, 50, 4))
    children = tree.children(ROOT)
    assert [tree.tokens[node] for node in children] == [4, 2]
    assert tree.path_acceptance_probs[children[0]] > tree.path_acceptance_probs[children[1]]


def test_how_often_guesses_come_right_is_learned() -> None:
    drafter, target = Lookahead(1, 3), TableTarget(100)
    sequence = target.sequence([1, 2, 3, 1])
    state = drafter.begin(sequence)
    said = []
    for _ in range(30):
        tree = drafter.propose(state, Budget(1))
        said.append(tree.path_acceptance_probs[0])
        scored = target.score([(sequence, tree)])[0]
        sequence.tokens += [2, 3, 1]
        drafter.observe(state, Verdict((), 1, scored, (2, 3, 1)))
    assert said[-1] > 0.7 > 0.3 > said[0]


# -------------------------------------------------------------------------------------------- when the window pays


class Priced(Controller):
    """What a draft token costs, in autoregressive steps."""

    def __init__(self, each: float) -> None:
        self._prices = tuple(1.0 + each * count for count in range(17))

    def budget(self, metrics: RequestMetrics, batch: int, sampled: bool = False) -> Budget:
        return Budget(16, 16, 4, relative_costs=self._prices)


def windows(each: float, target: TableTarget) -> tuple[int, int]:
    """Rounds with a window in the first 50 and in all others."""
    one = lookahead(Lookahead(2, 3, text=False))
    got = run(target, Method("lookahead", one.drafter, one.rule, Priced(each)), 240)
    with_ = [bool(round.tree.auxiliary_tokens) for round in got.rounds]
    return sum(with_[:50]), sum(with_[50:])


def test_a_window_that_does_not_pay_is_left_out_and_tried_again() -> None:
    target = TableTarget(5000, lambda path: torch.zeros(5000).index_fill_(0, torch.tensor(_anything(path)), 5.0))
    free, _ = windows(0.0, target)
    assert free == 50, "rows that cost nothing are always worth it"
    first, later = windows(0.03, target)
    assert 5 < first < 45, "it begins with one, and finds that it brings nothing"
    assert 0 < later < 120, "and tries again, seldom"
    assert windows(0.5, target) == (0, 0)


def _anything(path: tuple[int, ...]) -> int:
    """A token of a text that never repeats."""
    return hash(path) % 5000


def test_the_window_is_kept_where_it_brings_tokens() -> None:
    drafter = Lookahead(2, 3, text=False)
    state = drafter.begin(TableTarget(6).sequence([1, 2]))
    assert state.gain == GAIN
    for _ in range(20):
        state.side = True
        state.weigh(tokens=3, gained=2)
    assert state.gain > 1.0
    budget = Budget(16, 16, relative_costs=tuple(1.0 + 0.1 * count for count in range(17)))
    assert state.is_window_cheap(budget, 0, 3)
    state.gain = 0.0
    assert not state.is_window_cheap(budget, 0, 3)


# ------------------------------------------------------------------------------------------------------- the pool


def test_the_pool_is_bounded_and_the_least_recently_used_leave() -> None:
    pool = Pool(guesses=2, entries=3)
    for rest in (10, 11, 12):
        pool.add((1, rest), window=False)
    assert pool.after(1) == [((12,), False), ((11,), False)]
    pool.add((1, 11), window=False)
    assert [rest for rest, _ in pool.after(1)] == [(11,), (12,)]
    for first in (2, 3):
        pool.add((first, 0), window=False)
    pool.after(1)  # read, so used
    pool.add((4, 0), window=False)
    assert pool.after(2) == []
    assert pool.after(1) and pool.after(3) and pool.after(4)
    assert len(pool.table) == 3 and pool.table.evicted == 1


def test_reading_guesses_does_not_change_their_order() -> None:
    pool = Pool(guesses=4, entries=3)
    for rest in (10, 11, 12):
        pool.add((1, rest), window=True)
    assert pool.after(1) == pool.after(1) == [((rest,), True) for rest in (12, 11, 10)]


def test_what_the_text_holds_is_not_the_windows_alone() -> None:
    pool = Pool(guesses=4, entries=3)
    for window, expected in ((True, True), (False, False), (True, False)):
        pool.add((1, 2), window=window)
        assert pool.after(1) == [((2,), expected)]


def test_metrics_show_the_pool() -> None:
    target = TableTarget(9, random_table(9, 1))
    [use] = run(target, lookahead(Lookahead(2, 3, entries=4)), 60).metrics.caches
    assert (use.entries, use.bound) == (4, 4) and use.evicted > 0


def test_namespaces_do_not_leak() -> None:
    """What one namespace's request wrote is drafted in that namespace, and in no other, nor in none."""
    target = TableTarget(60, random_table(60, 5))
    first = run(target, lookahead(Lookahead()), 30).tokens
    drafter = Lookahead(1, 3)
    one = lookahead(drafter)
    run(target, one, 30, namespace="a")

    def drafted(namespace: str) -> list[int]:
        got = run(target, one, 2, [59, first[10]], namespace)
        return got.rounds[0].tree.tokens

    assert drafted("b") == drafted("") == []
    assert first[11] in drafted("a")
    run(target, one, 30)  # of no namespace: its own, and forgotten
    assert drafted("c") == drafted("") == []


# ------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("settings", [{}, {"window": 1, "text": False}, {"ngram": 2, "max_nodes": 2}])
def test_sampling_is_exact(settings: dict[str, Any]) -> None:
    cells = [
        Setting(sampling, 3, 4, (0, 1, 2, 0, 1), neighbour, 11)
        for sampling, neighbour in (
            ("temperature 1", "alone"),
            ("top-p 0.8", "beside autoregressive decoding"),
            ("penalties", "alone"),
            ("user's processor", "alone"),
        )
    ]

    def make(context: Context) -> Method:
        return registry.build("lookahead", context, {**registry.find("lookahead").tiny, **settings})

    certificate = certify_exact("lookahead", make, cells)
    assert certificate.lossless, certificate.verdict
    assert all(check.passed for check in certificate.checks), "exact, not sampled"


@pytest.mark.parametrize("seed", range(4))
def test_greedy_answers_and_no_traces(seed: int) -> None:
    target = TableTarget(7, random_table(7, seed))
    plain = registry.build("none", Context(target))
    one = lookahead(Lookahead())
    got = run(target, one, 40)
    assert got.tokens == run(target, plain, 40).tokens
    assert got.metrics.accepted > 0


def test_settings_are_checked() -> None:
    target = TableTarget(6)
    for settings in ({"ngram": 1}, {"window": 0}, {"entries": 0}):
        with pytest.raises(BadInput, match=next(iter(settings))):
            registry.build("lookahead", Context(target), settings)
