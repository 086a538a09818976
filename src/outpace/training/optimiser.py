"""The optimiser of a head: float32 copies of bfloat16 weights, Muon for matrices, AdamW for the rest.

Muon (Jordan et al. 2024) orthogonalises the updates of matrices and needs about half the steps of AdamW at these sizes
(LOG.md). Where torch is older than Muon, AdamW trains matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

WARM = 0.03
"""Share of the run in which the learning rate rises."""


def rate_factor(share: float) -> float:
    """The learning rate as a share of its largest, when ``share`` in [0, 1] of the run is done.

    A linear rise over ``WARM`` of the run, times a cosine that falls to 0.02.
    """
    return min(1.0, share / WARM + 0.02) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))


class Optimiser:
    """Steps of ``matrices`` and ``others``, on float32 copies: bfloat16 would lose small steps to rounding.

    ``weights`` are both, in the order of :attr:`copies`. To be made before the weights become bfloat16, so that the
    copies keep their precision. Rates are learning rates at their largest.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        matrix_rate: float,
        vector_rate: float,
    ) -> None:
        self.copies = [(one, one.detach().float().clone().requires_grad_()) for one in weights]
        by_weight = {id(one): copy for one, copy in self.copies}
        large, small = [by_weight[id(one)] for one in matrices], [by_weight[id(one)] for one in others]
        if not hasattr(torch.optim, "Muon"):
            large, small = [], [*large, *small]
        self.parts: list[torch.optim.Optimizer] = []
        if large:
            self.parts.append(torch.optim.Muon(large, lr=matrix_rate, weight_decay=0.01, momentum=0.95))
        if small:
            self.parts.append(torch.optim.AdamW(small, lr=vector_rate, betas=(0.9, 0.98), weight_decay=0.0))
        self._rates = [group["lr"] for one in self.parts for group in one.param_groups]

    def step(self, loss: Tensor, share: float) -> bool:
        """One step along the weights' gradients, which are cleared, when ``share`` of the run is done.

        Gradients are clipped to a norm of 1. False where ``loss``, a scalar, or the gradients are not finite: then no
        weight has changed.
        """
        groups = [group for one in self.parts for group in one.param_groups]
        for group, largest in zip(groups, self._rates, strict=True):
            group["lr"] = largest * rate_factor(share)
        for weight, copy in self.copies:
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = nn.utils.clip_grad_norm_([copy for _, copy in self.copies], 1.0)
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            for _, copy in self.copies:
                copy.grad = None
            return False
        for one in self.parts:
            one.step()
        self.round()
        return True

    @torch.no_grad()
    def round(self) -> None:
        """Write the copies back into the weights, rounded to their precision."""
        for weight, copy in self.copies:
            weight.copy_(copy)

    def state(self) -> list[dict[str, Any]]:
        """The moments of all parts, as ``torch.save`` takes them."""
        return [one.state_dict() for one in self.parts]

    @torch.no_grad()
    def restore(self, copies: Sequence[Tensor], state: Sequence[dict[str, Any]]) -> None:
        """Take over the copies, in the order of :attr:`copies`, and :meth:`state` of an earlier run."""
        for (_, copy), value in zip(self.copies, copies, strict=True):
            copy.copy_(value)
        for one, kept in zip(self.parts, state, strict=True):
            one.load_state_dict(kept)
