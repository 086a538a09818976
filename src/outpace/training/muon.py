"""Muon (Jordan et al. 2024) with products in float32, for processors that are slow in bfloat16.

``torch.optim.Muon`` makes updates orthogonal in bfloat16 whatever the weights are, which takes a processor without
instructions for it up to fifty times as long (LOG.md). The state is that of ``torch.optim.Muon``, so that a run may go
on with either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def orthogonal(update: Tensor, coefficients: tuple[float, float, float], steps: int, least: float) -> Tensor:
    """The matrix (n, m) with its singular values brought near 1 by ``steps`` of a quintic Newton-Schulz iteration.

    X becomes a X + (b A + c A A) X with A = X X^T, beginning with X of Frobenius norm 1; norms below ``least`` count as
    ``least``.
    """
    a, b, c = coefficients
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / x.norm().clamp(min=least)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon32(torch.optim.Muon):
    """``torch.optim.Muon`` for float32 weights, in float32 throughout."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step along the weights' gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, weight.grad, group)

    def _step(self, weight: Tensor, slope: Tensor, group: dict[str, Any]) -> None:
        kept = self.state[weight]
        if "momentum_buffer" not in kept:
            kept["momentum_buffer"] = torch.zeros_like(slope)
        momentum, past = group["momentum"], kept["momentum_buffer"]
        past.lerp_(slope, 1.0 - momentum)
        update = slope.lerp(past, momentum) if group["nesterov"] else past
        made = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        weight.add_(made, alpha=-group["lr"] * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1])))
