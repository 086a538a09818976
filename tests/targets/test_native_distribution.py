"""Distributions by the kernels against plain PyTorch's, and against themselves: what is tested is what is drawn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.token_distribution import DenseDistribution, TokenDistribution, dense_distributions, warp
from outpace.targets.dense.native_distribution import NativeDistribution, available, native_distributions

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")

SIZES = st.sampled_from([1, 2, 3, 15, 16, 17, 33, 511, 512, 513, 1200])
TEMPERATURES = st.sampled_from([1e-40, 1e-3, 0.3, 0.8, 1.0, 1.7, 50.0, 1e6])
NUMBERS = st.floats(0, 1, exclude_max=True)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Logits (V,): spread, flat, tied, partly banned."""
    size = draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    row = draw(st.sampled_from([0.0, 0.3, 3.0, 12.0])) * torch.randn(size, generator=generator)
    if draw(st.booleans()):
        row = (2 * row).round() / 2  # ties
    if draw(st.booleans()):
        row[torch.rand(size, generator=generator) < 0.5] = -math.inf
        row[int(torch.randint(size, (), generator=generator))] = 1.0
    return row


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(TEMPERATURES),
        top_k=draw(st.sampled_from([0, 1, 2, 3, 50, 600, 1200, 5000])),
        top_p=draw(st.sampled_from([1.0, 1e-12, 0.1, 0.5, 0.9, 0.95, 0.9999, 1.0 - 1e-9])),
        min_p=draw(st.sampled_from([0.0, 1e-8, 0.02, 0.5, 1.0])),
    )


def opened(row: Tensor, params: SamplingParams) -> NativeDistribution:
    [found] = native_distributions(row[None], [0], params)
    assert isinstance(found, NativeDistribution)
    return found


def exact(distribution: TokenDistribution) -> DenseDistribution:
    """The same probabilities as they are read one by one, in float64."""
    return DenseDistribution(torch.tensor(weights(distribution), dtype=torch.float64))


def weights(distribution: TokenDistribution) -> list[float]:
    return [distribution[token] for token in range(distribution.size)]


def test_the_kernels_are_what_tables_are_certified_with() -> None:
    from outpace.targets.table import TableTarget

    assert TableTarget(3).open_rows is native_distributions


@settings(max_examples=300)
@given(rows(), params())
def test_probabilities_are_those_of_plain_pytorch_within_rounding(row: Tensor, params: SamplingParams) -> None:
    probs = opened(row, params).dense().double()
    warm = max(params.temperature, 1e-30)
    expected = warp(row.double()[None], replace(params, temperature=warm))[0]
    differently = ((probs > 0) != (expected > 0)) & (torch.maximum(probs, expected) > 1e-30)
    if not bool(differently.any()):
        torch.testing.assert_close(probs, expected, atol=1e-9, rtol=1e-5)
        return
    # At the edge of top-p or min-p, rounding may decide.
    before = warp(row.double()[None], SamplingParams(warm, params.top_k))[0]
    kept, smallest = float(before[probs > 0].sum()), float(before[probs > 0].min())
    at_top_p = params.top_p < 1.0 and (
        params.min_p > 0.0 or params.top_p - 1e-5 < kept < params.top_p + smallest + 1e-5
    )
    at_min_p = torch.isclose(before[differently], params.min_p * before.max(), rtol=1e-5, atol=0.0)
    assert at_top_p or bool(at_min_p.all())


@given(rows(), st.integers(1, 1300))
def test_top_k_keeps_what_plain_pytorch_keeps(row: Tensor, k: int) -> None:
    """No rounding decides: logits are compared, not probabilities."""
    params = SamplingParams(temperature=0.9, top_k=k)
    near = row > row.max() - 60  # what is less probable than e^-60 may be 0 in either
    assert torch.equal((opened(row, params).dense() > 0)[near], (warp(row[None], params)[0] > 0)[near])


def test_of_equal_logits_at_the_edge_of_top_p_the_first_stay() -> None:
    for size in (4, 100, 3000):
        found = opened(torch.zeros(size), SamplingParams(temperature=1.0, top_p=0.499))
        assert (found.dense() > 0).tolist() == [token < math.ceil(0.499 * size) for token in range(size)]
    row = torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0])
    assert (opened(row, SamplingParams(temperature=1.0, top_p=1e-9)).dense() > 0).tolist() == [False, True] + [
        False
    ] * 3
    assert (opened(row, SamplingParams(temperature=1.0, top_k=1)).dense() > 0).tolist() == [False, True] * 2 + [False]


@given(rows(), params(), st.lists(NUMBERS, min_size=1, max_size=5))
def test_what_is_tested_is_what_is_drawn(row: Tensor, params: SamplingParams, numbers: list[float]) -> None:
    """A number falls on the token in whose interval it lies, of exactly the probabilities that are read one by one."""
    found = opened(row, params)
    probs = weights(found)
    assert math.fsum(probs) == pytest.approx(1.0, abs=1e-12)
    assert found.highest() == max(probs)
    assert found.dense().tolist() == pytest.approx(probs, rel=1e-7, abs=1e-44)
    for number in (*numbers, 0.0, math.nextafter(1.0, 0.0)):
        token = found.draw(number)
        before = math.fsum(probs[:token])
        assert probs[token] > 0.0
        assert before - 1e-12 <= number <= before + probs[token] + 1e-12


@given(rows(), params(), st.data())
def test_residuals_are_those_of_plain_pytorch_within_rounding(
    row: Tensor, params: SamplingParams, data: st.DataObject
) -> None:
    """Several in a row, of rows in every form."""
    left: TokenDistribution = opened(row, params)
    plain: TokenDistribution = exact(left)
    size = len(row)
    for _ in range(data.draw(st.integers(1, 4))):
        prefix = data.draw(st.sampled_from([1.0, 0.7, 0.01]))
        tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=3))
        form = data.draw(st.sampled_from(["none", "logits", "weights", "cut", "narrow", "residual"]))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        other = row + data.draw(st.sampled_from([0.0, 0.5, 3.0])) * torch.randn(size, generator=generator)
        q: TokenDistribution | None = None
        if form == "logits":
            q = opened(other, SamplingParams(temperature=1.3))
        elif form == "weights":
            q = left.of_weights(7.0 * other.softmax(-1))
        elif form == "cut":
            q = opened(other, SamplingParams(temperature=1.0, top_p=0.8))
        elif form == "narrow":
            ids = torch.randperm(size, generator=generator)[: max(1, size // 2)]
            cut = SamplingParams(temperature=1.0, top_k=data.draw(st.sampled_from([0, 2])))
            q = opened(torch.randn(len(ids), generator=generator), cut).widened(ids, size)
        elif form == "residual":
            q, _ = opened(other, SamplingParams(temperature=1.0)).residual(opened(row, SamplingParams(temperature=2.0)))
        assert isinstance(left, NativeDistribution)
        rest, total = left.residual(q, tokens, prefix)
        expected, sum_ = plain.residual(None if q is None else exact(q), tokens, prefix)
        assert total == pytest.approx(sum_, abs=3e-6)
        if total < 1e-3:  # little more than rounding is left
            return
        probs = weights(rest)
        assert math.fsum(probs) == pytest.approx(1.0, abs=1e-12)
        assert probs == pytest.approx(expected.dense().tolist(), abs=3e-6 / total)
        assert all(probs[token] == 0.0 for token in tokens)
        number = data.draw(NUMBERS)
        token = rest.draw(number)
        assert probs[token] > 0.0
        assert math.fsum(probs[:token]) - 1e-12 <= number <= math.fsum(probs[: token + 1]) + 1e-12
        left, plain = rest, exact(rest)


@given(rows(), params())
def test_nothing_is_left_of_equal_distributions_and_of_all_tokens(row: Tensor, params: SamplingParams) -> None:
    one, other = opened(row, params), opened(row.clone(), params)
    assert one.residual(other) == (one, 0.0)
    assert one.residual(None, range(len(row))) == (one, 0.0)
    assert one.residual(None) == (one, 1.0)
    assert one.sequential_draws([0.3] * (len(row) + 1)) == list(dict.fromkeys(one.sequential_draws([0.3] * len(row))))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 16, 40, 700])
def test_rows_that_no_token_can_follow_are_none(bad: float, size: int) -> None:
    params = SamplingParams(temperature=1.0)
    rows = torch.zeros(2, size)
    rows[1, size // 2] = bad
    if bad == -math.inf:
        rows[1] = bad
    alone, dead = native_distributions(rows, [0, 1], params)
    assert dead is None and dense_distributions(rows, [0, 1], params)[1] is None
    assert alone is not None and alone.dense().tolist() == pytest.approx([1 / size] * size)


@settings(max_examples=30)
@given(params())
def test_a_row_has_the_same_bits_in_any_company_and_place(params: SamplingParams) -> None:
    """Memory that is read in other pieces, other rows beside it, other threads: the row alone decides."""
    generator = torch.Generator().manual_seed(3)
    size = 1203
    row = 3.0 * torch.randn(size, generator=generator)
    alone = opened(row, params).dense()
    for shift in (1, 5, 16):
        room = torch.zeros(3, size + 40)
        room[1, shift : shift + size] = row
        room[2, shift : shift + size] = torch.randn(size, generator=generator)
        found = native_distributions(room[:, shift : shift + size], [2, 1, 0, 1], params)
        for one in (found[1], found[3]):
            assert one is not None and torch.equal(one.dense(), alone)


@settings(max_examples=200)
@given(rows(), params(), st.data())
def test_bias_and_penalties_change_a_row_as_plain_pytorch_does_to_the_bit(
    row: Tensor, params: SamplingParams, data: st.DataObject
) -> None:
    """The row itself stays; where no memory is kept for its weights nothing else comes out."""
    size = len(row)
    tokens = st.lists(st.integers(0, size - 1), max_size=8)
    biases = st.floats(-30, 30, width=32) | st.just(-math.inf)
    changed = replace(
        params,
        logit_bias=data.draw(st.dictionaries(st.integers(0, size - 1), biases, max_size=4)),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.7, 1e6])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.1, -1.7])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.3, 12.5])),
    )
    sampler = Sampler(changed, data.draw(tokens), size)
    sampler.extend(data.draw(tokens))
    changes = sampler.changes(data.draw(tokens))
    expected = row.clone() if changes is None else changes.apply(row.clone())
    before = row.clone()
    found = [
        native_distributions(row[None], [0], changed, [changes])[0] for _ in range(data.draw(st.sampled_from([1, 40])))
    ]
    [known] = native_distributions(expected[None], [0], params)
    assert torch.equal(row, before)
    for one in found:
        assert (one is None) == (known is None)
        if one is not None and known is not None:
            assert torch.equal(one.dense(), known.dense()) and one.highest() == known.highest()
    [dense] = dense_distributions(row[None], [0], changed, [changes])
    [plain] = dense_distributions(expected[None], [0], params)
    assert torch.equal(row, before)
    assert (dense is None) == (plain is None) == (known is None)
    assert dense is None or plain is None or torch.equal(dense.dense(), plain.dense())


def test_kept_weights_and_weights_that_are_computed_again_have_the_same_bits() -> None:
    """Few rows keep their weights: of forty, the last do not."""
    generator = torch.Generator().manual_seed(4)
    p, q = (3.0 * torch.randn(1, 1203, generator=generator) for _ in range(2))
    params = SamplingParams(temperature=0.8)
    ps, qs = ([native_distributions(row, [0], params)[0] for _ in range(40)] for row in (p, q))
    found = []
    for one, other in zip(ps, qs, strict=True):
        assert one is not None and other is not None
        rest, total = one.residual(other, (5,), 0.9)
        found.append((weights(one), one.highest(), rest.draw(0.4), total, weights(rest)))
    assert found[0][0] != found[0][4]
    assert all(one == found[0] for one in found)


def test_rows_stay_as_long_as_what_reads_them() -> None:
    def rest() -> TokenDistribution:
        logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
        p, q = native_distributions(logits, [0, 1], SamplingParams(temperature=1.0))
        assert p is not None and q is not None
        return p.residual(q)[0]

    found, again = rest(), rest()
    torch.randn(200, 3000)  # would take the memory, if it were free
    assert torch.equal(found.dense(), again.dense())


def test_frequencies_of_draws_pass_chi_square() -> None:
    from collections import Counter

    from scipy import stats

    from outpace.core.chance import SeededChance

    row = 1.5 * torch.randn(600, generator=torch.Generator().manual_seed(1))
    for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_p=0.9)):
        found, stream = opened(row, params), SeededChance(4).at(0, "x")
        counts = Counter(stream.categorical(found) for _ in range(20_000))
        likely = [token for token in range(600) if found[token] > 5e-4]
        observed = [counts[token] for token in likely]
        expected = [20_000 * found[token] for token in likely]
        rest = 20_000 - sum(expected)
        if rest > 5:
            observed, expected = [*observed, 20_000 - sum(observed)], [*expected, rest]
        assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-4


def test_draws_without_replacement_have_the_law_of_sequential_draws() -> None:
    from outpace.core.chance import SeededChance

    row = torch.tensor([0.5, 0.0, 1.0, -1.0])
    found, stream = opened(row, SamplingParams(temperature=1.0)), SeededChance(9).at(0, "x")
    samples = 20_000
    counts = torch.zeros(4, 4, dtype=torch.float64)
    for _ in range(samples):
        first, second = stream.ordered_sample(found, 2)
        counts[first, second] += 1
    p = found.dense().double()
    expected = p[:, None] * p[None] / (1 - p[:, None])
    expected.fill_diagonal_(0.0)
    assert float((counts / samples - expected).abs().max()) < 5 * math.sqrt(0.25 / samples)


@pytest.mark.parametrize(("temperature", "gap"), [(1.0, 95.0), (0.1, 9.4), (1.0, 80.0)])
@pytest.mark.parametrize("cut", [0, 3])
def test_a_residual_of_draws_that_leave_next_to_nothing(temperature: float, gap: float, cut: int) -> None:
    """A draft without replacement, after its likeliest token: what is left may be as little as a float holds."""
    params = SamplingParams(temperature=temperature, top_k=cut)
    draft, target = torch.tensor([0.0, -gap, -gap - 0.01 * temperature, -200.0]), torch.zeros(4)
    q, p = opened(draft, params), opened(target, SamplingParams(temperature=1.0))
    left, total = q.residual(None, [0])
    if total == 0.0:  # where weights that small count as none
        assert left is q
        return
    shares = weights(left)
    assert sum(shares) == pytest.approx(1.0, abs=1e-4) and shares[0] == 0.0
    rest, found = p.residual(left)
    expected = torch.tensor([max(0.0, 0.25 - one) for one in shares], dtype=torch.float64)
    assert found == pytest.approx(float(expected.sum()), abs=1e-5)
    assert weights(rest) == pytest.approx((expected / expected.sum()).tolist(), abs=1e-4)
    again, once_more = left.residual(p)
    expected = torch.tensor([max(0.0, one - 0.25) for one in shares], dtype=torch.float64)
    assert once_more == pytest.approx(float(expected.sum()), abs=1e-4)
    assert weights(again) == pytest.approx((expected / expected.sum()).tolist(), abs=1e-3)


def test_whole_numbers_of_every_kind_are_taken_for_top_k() -> None:
    row = torch.tensor([0.0, 1.0, 2.0])
    for k in (2, 2.0, np.int64(2), np.float32(2)):
        found = opened(row, SamplingParams(temperature=1.0, top_k=k))  # type: ignore[arg-type]
        assert weights(found)[0] == 0.0
