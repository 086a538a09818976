"""The optimiser of a head: float32 copies of its weights, Muon for matrices, AdamW for the rest.

Muon (Jordan et al. 2024) orthogonalises the updates of matrices and needs about half the steps of AdamW at these sizes
(LOG.md). Where torch is older than Muon, AdamW trains matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.models.placement import training_dtype
from outpace.training.processes import Processes

ALONE = Processes()
"""A process by itself."""
WARM = 0.03
"""Share of the run in which the learning rate rises."""


def rate_factor(share: float) -> float:
    """The learning rate as a share of its largest, when ``share`` in [0, 1] of the run is done.

    A linear rise over ``WARM`` of the run, times a cosine that falls to 0.02.
    """
    return min(1.0, share / WARM + 0.02) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))


class Optimiser:
    """Steps of ``matrices`` and ``others``, on float32 copies: bfloat16 would lose small steps to rounding.

    ``weights`` are both, in the order of :attr:`copies`. To be made before the weights are rounded, so that the
    copies keep their precision. Rates are learning rates at their largest. ``processes``: those that make the same
    steps, along the mean of their gradients.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        matrix_rate: float,
        vector_rate: float,
        processes: Processes = ALONE,
    ) -> None:
        self.processes = processes
        self.copies = [(one, one.detach().float().clone().requires_grad_()) for one in weights]
        by_weight = {id(one): copy for one, copy in self.copies}
        # Where this process has none of a kind, there is no optimiser for it.
        large = [by_weight[id(one)] for one in matrices if id(one) in by_weight]
        small = [by_weight[id(one)] for one in others if id(one) in by_weight]
        if not hasattr(torch.optim, "Muon"):
            large, small = [], [*large, *small]
        self.parts: list[torch.optim.Optimizer] = []
        if large:
            muon = _muon(training_dtype(large[0].device))
            self.parts.append(muon(large, lr=matrix_rate, weight_decay=0.01, momentum=0.95))
        if small:
            self.parts.append(torch.optim.AdamW(small, lr=vector_rate, betas=(0.9, 0.98), weight_decay=0.0))
        self._rates = [group["lr"] for one in self.parts for group in one.param_groups]

    def gather(self, share: float = 1.0) -> None:
        """Add ``share`` of the weights' gradients, which are cleared, to those of the next step, in float32."""
        for weight, copy in self.copies:
            if weight.grad is not None:
                found = weight.grad.float() * share
                copy.grad = found if copy.grad is None else copy.grad.add_(found)
                weight.grad = None

    def step(self, share: float, *, finite: bool = True) -> bool:
        """One step along the gathered gradients, a mean over the processes, when ``share`` of the run is done.

        Gradients are clipped to a norm of 1. False where losses (``finite``) or gradients are not finite in any of the
        processes: then no weight has changed.
        """
        groups = [group for one in self.parts for group in one.param_groups]
        for group, largest in zip(groups, self._rates, strict=True):
            group["lr"] = largest * rate_factor(share)
        copies = [copy for _, copy in self.copies]
        good = self._clipped(copies, finite)
        for one in self.parts if good else ():
            one.step()
        for copy in copies:
            copy.grad = None
        if good:
            self.round()
        return good

    def _clipped(self, copies: Sequence[Tensor], finite: bool) -> bool:
        """Make the gathered gradients what all processes step along. Returns whether they do."""
        if self.processes.count > 1:
            finite = _average(copies, finite, self.processes)
        return bool(torch.isfinite(nn.utils.clip_grad_norm_(copies, 1.0))) and finite

    @torch.no_grad()
    def round(self) -> None:
        """Write the copies back into the weights, rounded to their precision."""
        for weight, copy in self.copies:
            weight.copy_(copy)

    def values(self) -> list[Tensor]:
        """The float32 copies of all weights, in their order."""
        return [copy.detach() for _, copy in self.copies]

    def state(self) -> list[dict[str, Any]]:
        """The moments of all parts, as ``torch.save`` takes them."""
        return [one.state_dict() for one in self.parts]

    @torch.no_grad()
    def restore(self, values: Sequence[Tensor], state: Sequence[dict[str, Any]]) -> None:
        """Take over :meth:`values` and :meth:`state` of an earlier run."""
        for (_, copy), value in zip(self.copies, values, strict=True):
            copy.copy_(value)
        for one, kept in zip(self.parts, state, strict=True):
            one.load_state_dict(kept)


def _muon(dtype: torch.dtype) -> Callable[..., torch.optim.Optimizer]:
    """Muon with products in ``dtype``."""
    if dtype == torch.bfloat16:
        return torch.optim.Muon
    from outpace.training.muon import Muon32  # cannot be imported where torch has no Muon

    return Muon32


def _average(copies: Sequence[Tensor], finite: bool, processes: Processes) -> bool:
    """Give all processes the mean of their gradients, in one message. Returns whether ``finite`` held in all."""
    lacking = [copy.grad is None for copy in copies]
    flat = [torch.zeros(copy.numel()) if copy.grad is None else copy.grad.flatten().cpu() for copy in copies]
    found = processes.mean(torch.cat([*flat, torch.tensor([0.0 if finite else 1.0])]))
    parts = torch.split(found[:-1], [copy.numel() for copy in copies])
    for copy, part, none in zip(copies, parts, lacking, strict=True):
        if not none or bool(part.any()):
            copy.grad = part.view_as(copy).to(copy.device, copy=True)
    return not bool(found[-1])
