"""A distribution of one token is the one-hot tensor, in everything that rules ask."""

from __future__ import annotations

import pytest
import torch

from outpace.core.token_distribution import Certain, DenseDistribution

Q = torch.tensor([0.1, 0.6, 0.3])
BOTH = Certain(1, 3), DenseDistribution(torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("prefix", [1.0, 0.7, 0.5])
@pytest.mark.parametrize("tokens", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("q", [None, DenseDistribution(Q)])
def test_residuals(q: DenseDistribution | None, tokens: tuple[int, ...], prefix: float) -> None:
    (one, one_sum), (other, other_sum) = (each.residual(q, tokens, prefix) for each in BOTH)
    assert one_sum == pytest.approx(other_sum, abs=1e-6)
    assert torch.equal(one.dense(), other.dense())


def test_probabilities_and_draws() -> None:
    certain, dense = BOTH
    assert [certain[token] for token in range(3)] == [dense[token] for token in range(3)]
    assert certain.highest() == dense.highest() == 1.0
    assert {certain.draw(number) for number in (0.0, 0.5, 0.999)} == {1}
    assert certain.sequential_draws([0.2, 0.9]) == [1]
    for token in range(3):
        for q in (None, DenseDistribution(Q)):
            assert certain.acceptance(q, token) == pytest.approx(dense.acceptance(q, token))
    ids = torch.tensor([4, 2, 0])
    assert torch.equal(certain.widened(ids, 5).dense(), dense.widened(ids, 5).dense())
    assert torch.allclose(certain.of_weights(Q).dense(), dense.of_weights(Q).dense())
