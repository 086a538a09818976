"""Muon in float32 beside the one of torch, which rounds to bfloat16 in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace.models import placement
from outpace.training.muon import Muon32, orthogonal
from outpace.training.optimiser import Optimiser

SHAPES = [(24, 40), (40, 24), (16, 16)]
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95}


def _weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _steps(optimiser: torch.optim.Optimizer, weights: list[torch.nn.Parameter], seed: int, count: int = 3) -> None:
    slopes = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=slopes)
        optimiser.step()


def test_it_steps_as_the_one_of_torch_does_but_for_rounding() -> None:
    ours, theirs = _weights(), _weights()
    _steps(Muon32(ours, **SETTINGS), ours, 5)
    _steps(torch.optim.Muon(theirs, **SETTINGS), theirs, 5)
    for start, one, other in zip(_weights(), ours, theirs, strict=True):
        moved = (other - start).norm()
        assert moved > 0.1
        assert (one - other).norm() < 0.03 * moved


def test_a_run_goes_on_with_the_other_one_s_state() -> None:
    weights = _weights()
    first = torch.optim.Muon(weights, **SETTINGS)
    _steps(first, weights, 5)
    again = Muon32(weights, **SETTINGS)
    again.load_state_dict(first.state_dict())
    for weight in weights:
        assert torch.equal(again.state[weight]["momentum_buffer"], first.state[weight]["momentum_buffer"])
    _steps(again, weights, 6)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    made = orthogonal(torch.randn(shape), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert made.shape == shape and made.dtype == torch.float32
    singular = torch.linalg.svdvals(made)
    assert float(singular.min()) > 0.3 and float(singular.max()) < 1.4


@pytest.mark.parametrize(("fast", "kind"), [(True, torch.optim.Muon), (False, Muon32)])
def test_the_processor_decides_which_is_used(fast: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "fast_bfloat16", lambda: fast)
    weights = _weights()
    assert type(Optimiser(weights, weights, [], 0.02, 0.001).parts[0]) is kind
