"""A draft model's length: by its acceptance and by the time of both models' forwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from outpace.certify.exact import certify_exact
from outpace.controllers.draft_length import LONGEST, PATIENCE, PRIOR, WEIGHT, DraftLength, draft_length
from outpace.core.metrics import RequestMetrics
from outpace.engine.method import Method
from outpace.methods.registry import Context, build
from outpace.targets.costs import FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget, random_table
from test_combined import FEW
from weights_support import with_drafts


class Given(ForwardCosts):
    """Forwards whose time is a formula of their rows and the tokens before them."""

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        super().__init__(TableTarget(7))
        self._cost = cost

    def seconds(self, rows: int, context: int = 0) -> float:
        return self._cost(rows, context)

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return self._cost(rows, context)


def flat(seconds: float) -> Given:
    return Given(lambda rows, context: seconds)


def after(accepted: int, judged: int, rounds: int = 3, prompt: int = 0) -> RequestMetrics:
    return RequestMetrics(prompt_tokens=prompt, rounds=rounds, accepted=accepted, judged=judged)


def depth(target: ForwardCosts, draft: ForwardCosts, metrics: RequestMetrics, batch: int = 1) -> int:
    return DraftLength(target, [draft]).budget(metrics, batch).depth


@given(st.integers(0, 400), st.integers(0, 400), st.floats(0.01, 0.9), st.floats(0.0, 0.3))
def test_the_length_is_the_theory_s(accepted: int, rejected: int, draft: float, row: float) -> None:
    """Leviathan et al. 2023, equation 1 over (gamma c + cost of the forward), the best of all lengths."""
    target = Given(lambda rows, context: 1.0 + row * (rows - 1))
    found = depth(target, flat(draft), after(accepted, accepted + rejected))
    rate = (WEIGHT * PRIOR + accepted) / (WEIGHT + accepted + rejected)
    pace = [1.0] + [
        sum(rate**at for at in range(length + 1)) / (1.05 * target.relative(length) + length * draft)
        for length in range(1, LONGEST + 1)
    ]
    assert pace[found] >= 0.999 * max(pace)


def test_a_quicker_draft_model_drafts_more_and_a_slow_one_nothing() -> None:
    lengths = [depth(flat(1.0), flat(seconds), after(40, 50)) for seconds in (0.01, 0.1, 0.3, 0.9)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 8 > lengths[2] > lengths[3] == 0


def test_a_model_that_is_often_right_drafts_more() -> None:
    lengths = [depth(flat(1.0), flat(0.1), after(accepted, 100)) for accepted in (2, 50, 80, 98)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 and lengths[-1] > 8


def test_both_times_are_those_of_the_batch_and_of_the_context() -> None:
    target = Given(lambda rows, context: 1.0 + 0.01 * max(0, rows - 16) * rows)
    assert depth(target, flat(0.1), after(40, 50), batch=1) > depth(target, flat(0.1), after(40, 50), batch=8)
    slower = Given(lambda rows, context: 0.05 if context < 1000 else 0.6)
    assert depth(flat(1.0), slower, after(40, 50)) > depth(flat(1.0), slower, after(40, 50, prompt=4000))


def test_where_drafting_does_not_gain_it_is_tried_after_growing_intervals() -> None:
    drafting = [n for n in range(200) if depth(flat(1.0), flat(0.3), after(1, 8, rounds=n)) > 0]
    assert drafting == [PATIENCE * factor for factor in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize(("seconds", "judged", "batch"), [(0.3, 40, 4), (1.5, 0, 4), (1.5, 0, 1)])
def test_where_no_acceptance_that_is_likely_would_gain_nothing_is_tried(
    seconds: float, judged: int, batch: int
) -> None:
    """Because many draft tokens were rejected, or because a draft takes longer than the best one saves."""
    assert not any(depth(flat(1.0), flat(seconds), after(0, judged, rounds=n), batch=batch) for n in range(200))


def test_a_text_that_is_alone_may_change_its_kind() -> None:
    assert depth(flat(1.0), flat(0.3), after(0, 40, rounds=16 * PATIENCE)) > 0


def test_trees_pay_for_all_their_nodes_and_end_at_the_bound() -> None:
    dear = Given(lambda rows, context: 1.0 + 0.1 * rows)
    wide = DraftLength(dear, [flat(0.1)], branching=(3, 2)).budget(after(40, 50), 1)
    chain = DraftLength(dear, [flat(0.1)]).budget(after(40, 50), 1)
    assert 0 < wide.depth < chain.depth
    free = DraftLength(flat(1.0), [flat(0.001)], branching=(3, 2), max_nodes=16)
    assert free.budget(after(99, 100), 1).depth == 3, "3 + 6 + 6 draws are in the bound, 6 more are not"


def test_several_models_draft_one_after_the_other() -> None:
    one = DraftLength(flat(1.0), [flat(0.1)]).budget(after(40, 50), 1).depth
    assert DraftLength(flat(1.0), [flat(0.1)] * 3).budget(after(40, 50), 1).depth < one


def test_with_fixed_costs_no_time_is_asked_for() -> None:
    never = Given(lambda rows, context: pytest.fail("measured"))
    assert 1 < DraftLength(FixedCosts(), [never]).budget(RequestMetrics(), 1).depth < 8


@pytest.mark.parametrize("sampled", [False, True])
def test_a_length_that_is_given_stays(sampled: bool) -> None:
    controller = draft_length(flat(1.0), [flat(5.0)], 6, confidence=0.25)
    assert [controller.budget(after(accepted, 50), 1, sampled).depth for accepted in (0, 50)] == [6, 6]
    assert draft_length(flat(1.0), [flat(5.0)], None).budget(after(0, 50), 1, sampled).depth == 0


# --------------------------------------------------------------------------------------------------- the methods

DRAFTING: Mapping[str, dict[str, Any]] = {
    "draft-model": {},
    "hetvocab": {},
    "rsd": {},
    "sampled-tree": {},
    "specinfer": {},
}
GIVEN: Mapping[str, dict[str, Any]] = {
    "draft-model": {"num_draft_tokens": 4},
    "hetvocab": {"num_draft_tokens": 4},
    "rsd": {"branching": (1, 1, 1, 1)},
    "sampled-tree": {"branching": (1, 1, 1, 1)},
    "specinfer": {"branching": (1, 1, 1, 1)},
}


def context(draft: float) -> Context:
    from outpace.certify.exact import tiny_context

    found = tiny_context(4, 0)
    for model in (found.target, *(one for _, one in found.drafts()), found.draft_choice().target):
        model.costs = flat(1.0 if model is found.target else draft)
    return found


@pytest.mark.parametrize("name", DRAFTING)
def test_methods_with_a_draft_model_draft_as_its_time_allows(name: str) -> None:
    by_costs, fixed = (
        [build(name, context(draft), settings[name]).controller for draft in (0.01, 5.0)]
        for settings in (DRAFTING, GIVEN)
    )
    assert [one.budget(RequestMetrics(), 1).depth > 0 for one in by_costs] == [True, False]
    assert [one.budget(RequestMetrics(), 1).depth for one in fixed] == [4, 4]


@pytest.mark.parametrize("name", ["draft-model", "rsd"])
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_times_are_measured_the_distribution_is_the_target_s(name: str, seed: int) -> None:
    noise = random.Random(seed)
    table = {rows: noise.uniform(0.5, 1.5) for rows in range(64)}

    def make(context: Context) -> Method:
        context.target.costs = Given(lambda rows, _: table[rows])
        drafts = Given(lambda rows, _: 0.2 * table[rows])
        for _, draft in context.drafts():
            draft.costs = drafts
        settings = {} if name == "draft-model" else {"max_nodes": 3}
        return build(name, context, settings)

    certificate = certify_exact(name, make, FEW[:1])
    assert certificate.lossless, certificate.verdict


def test_judged_positions_are_counted() -> None:
    metrics = RequestMetrics()
    metrics.count_round(4, 2, 3, depth=4)  # the third was rejected, nobody judged the fourth
    metrics.count_round(4, 4, 5, depth=4)
    metrics.count_round(0, 0, 1)
    metrics.count_round(6, 0, 1, depth=2)  # a tree: all children of the root were rejected
    assert (metrics.accepted, metrics.judged) == (6, 8)


def test_a_draft_model_of_a_toy_drafts_and_answers_alike() -> None:
    """The same seed, twice in one process, with lengths that follow acceptance."""
    from outpace.core.sampling import SamplingParams
    from outpace.engine.decoder import Decoder
    from outpace.engine.request import Request

    target = TableTarget(9, random_table(9, 3, order=2, sharpness=3.0))
    method = build("draft-model", with_drafts(target, target))
    answers = []
    for _ in range(2):
        decoder = Decoder(target)
        found = decoder.submit(Request((1, 2), method, SamplingParams(temperature=1.0, seed=5), max_new_tokens=60))
        decoder.run()
        answers.append((found.tokens, found.metrics.rounds))
    assert answers[0] == answers[1]
    assert answers[0][1] < 12, "the draft model is the target: drafts grow longer than the three of the beginning"
