"""Rows of a shared forward go to the draft tokens that raise the batch's tokens per time."""

from __future__ import annotations

from itertools import accumulate, product

import pytest
from hypothesis import given, strategies as st

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.controllers.row_allocation import allot, mean_costs, with_uncertain
from outpace.core.metrics import RequestMetrics
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.targets.costs import Costs, FixedCosts
from outpace.targets.table import TableTarget, random_table
from support import Path, Q, Toy, method, sampled_chain
from test_cost_model import Given

DESCENDING = st.lists(st.floats(0, 1), max_size=4).map(lambda probs: sorted(probs, reverse=True))


@given(DESCENDING, DESCENDING, st.lists(st.floats(0, 0.6), min_size=1, max_size=14), st.floats(0, 1))
def test_a_draft_that_is_certain_to_come_is_as_good_as_there(
    there: list[float], expected: list[float], steps: list[float], spent: float
) -> None:
    costs = list(accumulate(steps, initial=1.0))
    both = sorted([*there, *expected], reverse=True)
    found = with_uncertain(there, [(prob, 1.0) for prob in expected], costs, 1.0, spent)
    assert found.speedup == pytest.approx(allot([both], costs, 1.0, spent=spent)[1].speedup)


@given(
    st.lists(DESCENDING, min_size=1, max_size=3),
    st.lists(st.floats(0, 0.6), min_size=1, max_size=14),
    st.integers(0, 3),
    st.floats(0, 1),
)
def test_no_other_allotment_gives_more_tokens_per_time(
    candidates: list[list[float]], steps: list[float], taken: int, spent: float
) -> None:
    costs = list(accumulate(steps, initial=1.0))
    base = float(len(candidates))
    counts, forecast = allot(candidates, costs, base, taken=taken, spent=spent)
    last = len(costs) - 1
    best = 0.0
    for others in product(*(range(len(probs) + 1) for probs in candidates)):
        rows = taken + sum(others)
        if rows <= max(last, taken):
            tokens = base + sum(sum(probs[:count]) for probs, count in zip(candidates, others, strict=True))
            best = max(best, tokens / (costs[min(rows, last)] + spent))
    assert forecast.speedup == pytest.approx(best)
    tokens = base + sum(sum(probs[:count]) for probs, count in zip(candidates, counts, strict=True))
    assert forecast.tokens == pytest.approx(tokens)
    assert forecast.steps == pytest.approx(costs[min(taken + sum(counts), last)] + spent)


def test_a_draft_that_was_paid_for_gets_more_rows() -> None:
    costs = [1.0, 1.4, 1.9]
    assert allot([[0.45, 0.44]], costs, 1.0)[0] == (1,)
    assert allot([[0.45, 0.44]], costs, 1.0, spent=0.5)[0] == (2,)


def test_costs_of_requests_after_different_contexts_are_averaged_as_far_as_all_are_known() -> None:
    same = (1.0, 2.0)
    assert mean_costs([same, same]) == same
    assert mean_costs([(1.0, 2.0, 4.0), (1.0, 3.0)]) == (1.0, 2.5)


# ------------------------------------------------------------------------------------------------- in the round


def flat_to_eight(rows: int) -> float:
    return 1.0 + 0.01 * rows + max(0, rows - 8)


class Guessing(Toy):
    """Drafts a chain of five tokens that it states ``prob`` for, each."""

    def __init__(self, prob: float) -> None:
        super().__init__(self._guess, Proposal())
        self._prob = prob

    def _guess(self, tree: TokenTree, tokens: Path, depth: int, chance: object) -> None:
        for at in range(5):
            tree.add(len(tree) - 1, 1, path_acceptance_prob=self._prob ** (at + 1))


class Watched(TableTarget):
    """Writes down how many draft tokens every request had."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(6)
        self.__dict__["costs"] = costs
        self.drafted: list[list[int]] = []

    def score(self, batch: object, *rest: object, **named: object) -> object:  # type: ignore[override]
        self.drafted.append([len(tree) for _, tree in batch])  # type: ignore[attr-defined]
        return super().score(batch, *rest, **named)  # type: ignore[arg-type]


def drafted(target: Watched, methods: list[Method]) -> list[int]:
    decoder = Decoder(target)
    for one in methods:
        decoder.submit(Request((0, 1, 2), one, max_new_tokens=30))
    decoder.step()
    return target.drafted[0]


def priced(target: Watched, prob: float) -> Method:
    return Method("guess", Guessing(prob), RecursiveRejection(), CostModel(target.costs))


def test_one_likely_draft_gets_the_rows_and_unlikely_ones_none() -> None:
    target = Watched(Given(flat_to_eight))
    found = drafted(target, [priced(target, one) for one in (0.95, 0.01, 0.01, 0.01)])
    assert found == [4, 0, 0, 0], "eight rows are nearly free, and four are the requests' own"


def test_equal_drafts_share_the_rows() -> None:
    target = Watched(Given(flat_to_eight))
    assert drafted(target, [priced(target, 0.6) for _ in range(4)]) == [1, 1, 1, 1]
    alone = Watched(Given(flat_to_eight))
    assert drafted(alone, [priced(alone, 0.6)]) == [5]


def test_where_rows_cost_in_proportion_a_batch_drafts_nothing() -> None:
    target = Watched(Given(float))
    assert drafted(target, [priced(target, 0.9) for _ in range(4)]) == [0, 0, 0, 0]


def test_fixed_lengths_and_sampled_drafts_stay_whole_and_their_rows_are_taken() -> None:
    target = Watched(Given(flat_to_eight))
    fixed = Method("fixed", Guessing(0.01), RecursiveRejection(), Fixed(5))
    assert drafted(target, [fixed, priced(target, 0.9)]) == [5, 1]
    grown = method(sampled_chain(Q(random_table(6, 2))), Proposal(sampled=True), length=3)
    target = Watched(Given(flat_to_eight))
    assert drafted(target, [grown, grown, priced(target, 0.9)])[:2] == [3, 3]


def test_with_fixed_costs_a_neighbour_takes_nothing_away() -> None:
    target = Watched(FixedCosts())
    assert drafted(target, [priced(target, 0.9) for _ in range(6)]) == [5] * 6


def test_a_request_alone_chooses_for_itself() -> None:
    model = CostModel(Given(flat_to_eight))
    assert model.budget(RequestMetrics(), 1).base_tokens == 1.0
    assert model.budget(RequestMetrics(), 4).base_tokens == 4.0
