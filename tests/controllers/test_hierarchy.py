"""The latency-optimal hierarchy against brute force, and its formula against rounds that were really run."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.fixed import Fixed
from outpace.controllers.hierarchy import best_hierarchy, latency, measured_rates
from outpace.controllers.predictor import tokens_per_round
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.methods.combination.nested_decoder import Nested
from outpace.methods.none import NoDraft
from outpace.targets.table import TableTarget
from support import round_law

RATE = st.floats(0.0, 1.0)


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(0.01, 10.0), min_size=n, max_size=n, unique=True),
            st.lists(st.floats(0.0, 0.3), min_size=n, max_size=n),
            st.lists(st.lists(RATE, min_size=n, max_size=n), min_size=n, max_size=n),
        )
    )
)
@settings(max_examples=60, deadline=None)
def test_no_hierarchy_is_quicker(drawn: tuple[list[float], list[float], list[list[float]]]) -> None:
    plain, slopes, rates = drawn
    plain = sorted(plain, reverse=True)  # the target is the dearest
    costs = [lambda rows, c=c, s=s: c * (1.0 + s * (rows - 1)) for c, s in zip(plain, slopes, strict=True)]
    most, count = 3, len(plain)
    found = best_hierarchy(costs, rates, most)
    brute = min(
        latency(costs, rates, (0, *below), lengths)
        for size in range(count)
        for below in permutations(range(1, count), size)
        if list(below) == sorted(below)  # a model drafts for dearer ones
        for lengths in product(range(1, most + 1), repeat=size)
    )
    assert found.seconds == pytest.approx(brute)
    assert latency(costs, rates, found.models, found.lengths) == pytest.approx(found.seconds)


def test_models_in_between_are_used_where_they_pay() -> None:
    costs = [lambda rows: 100.0, lambda rows: 10.0, lambda rows: 1.0]
    chained = best_hierarchy(costs, [[1, 0.9, 0.2], [0, 1, 0.9], [0, 0, 1]])
    assert chained.models == (0, 1, 2)
    assert best_hierarchy(costs, [[1, 0.5, 0.9], [0, 1, 0.9], [0, 0, 1]]).models == (0, 2)
    assert best_hierarchy(costs, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]).models == (0,)
    dear = [lambda rows: 10.0 * rows, lambda rows: 10.0 * rows + 1]
    assert best_hierarchy(dear, [[1, 1], [1, 1]]).models == (0,), "a dearer model never drafts"


def test_rates_are_checked() -> None:
    costs = [lambda rows: 2.0, lambda rows: 1.0]
    with pytest.raises(BadInput, match="2 rows of 2"):
        best_hierarchy(costs, [[1.0]])
    with pytest.raises(BadInput, match=r"\[0, 1\]"):
        best_hierarchy(costs, [[1.0, 1.5], [0.0, 1.0]])


def fixed_law(*logits: float) -> TableTarget:
    """A target whose tokens are independent of everything: acceptances are, too."""
    row = torch.tensor(logits)
    return TableTarget(len(logits), lambda path: row)


def test_measured_rates_are_the_overlap() -> None:
    one, two = fixed_law(0.0, 1.0, 2.0), fixed_law(1.0, 0.0, 0.0)
    [[same, rate], [back, _]] = measured_rates([one, two], [[0, 1, 2, 0, 1, 2]])
    overlap = float(torch.minimum(one.table(()).softmax(0), two.table(()).softmax(0)).sum())
    assert same == pytest.approx(1.0) and rate == back == pytest.approx(overlap)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_formula_counts_the_tokens_of_a_real_round(length: int) -> None:
    target, draft = fixed_law(0.0, 1.0, 2.0), fixed_law(1.0, 0.0, 0.5)
    [[_, rate], _] = measured_rates([target, draft], [[0, 1, 2]])
    inner = Method("none", NoDraft(), RecursiveRejection(), Fixed(0))
    method = Method("hsd", Nested(draft, inner), RecursiveRejection(), Fixed(length))
    proposal_distribution = round_law(target, method, SamplingParams(temperature=1.0), (0, 1), 8)
    mean = sum(len(tokens) * weight for tokens, weight in proposal_distribution.items())
    assert mean == pytest.approx(tokens_per_round(rate, length), abs=1e-5)
