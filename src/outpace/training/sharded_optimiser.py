"""An optimiser that several processes share out among them, for heads whose optimiser does not fit on one device.

Each process keeps the float32 copies, gradients and moments of some of the weights alone, and steps these for all
(ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054, stage 2; FSDP calls it SHARD_GRAD_OP). Ours: weights are dealt whole
and not cut, because Muon makes whole matrices orthogonal. The weights themselves, 2 bytes of 16 (4 of
20 where heads are multiplied in float32), are in every process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.training.optimiser import Optimiser
from outpace.training.processes import Processes


def dealt(sizes: Sequence[int], count: int) -> list[int]:
    """Which of ``count`` processes each weight is given to: the largest first, each to whoever has least."""
    loads, found = [0] * count, [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        found[at] = loads.index(min(loads))
        loads[found[at]] += sizes[at]
    return found


class ShardedOptimiser(Optimiser):
    """As :class:`Optimiser`, shared out among ``processes``, which call all of its methods together.

    :meth:`values` and :meth:`state` are those of the whole, so runs go on with any number of processes, shared out or
    not.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        matrix_rate: float,
        vector_rate: float,
        processes: Processes,
    ) -> None:
        self._weights = list(weights)
        self._owners = dealt([one.numel() for one in weights], processes.count)
        own = [one for one, owner in zip(weights, self._owners, strict=True) if owner == processes.rank]
        super().__init__(own, matrices, others, matrix_rate, vector_rate, processes)
        places = {id(one): at for at, one in enumerate(weights)}
        self._kinds = [[places[id(one)] for one in some] for some in (matrices, others) if some]
        """Which weights each optimiser of the whole has, in its order."""
        if not hasattr(torch.optim, "Muon"):
            self._kinds = [[at for some in self._kinds for at in some]]
        self._own_parts: list[torch.optim.Optimizer | None] = []
        parts = iter(self.parts)
        for some in self._kinds:
            self._own_parts.append(next(parts) if any(self._mine(at) for at in some) else None)

    def _mine(self, at: int) -> bool:
        return self._owners[at] == self.processes.rank

    def gather(self, share: float = 1.0) -> None:
        """Bring the mean of each weight's gradients to its owner, one weight after the other, to save memory."""
        have = torch.tensor([float(one.grad is not None) for one in self._weights])
        anywhere = (self.processes.mean(have) > 0).tolist()
        copies = iter(self.copies)
        for at, weight in enumerate(self._weights):
            copy = next(copies)[1] if self._mine(at) else None
            if not anywhere[at]:
                continue
            given = torch.zeros_like(weight, dtype=torch.float32) if weight.grad is None else weight.grad.float()
            weight.grad = None
            found = self.processes.mean(given * share)
            if copy is not None:
                copy.grad = found if copy.grad is None else copy.grad.add_(found)

    def _clipped(self, copies: Sequence[Tensor], finite: bool) -> bool:
        slopes = [copy.grad for copy in copies if copy.grad is not None]
        squares = sum(float(one.double().square().sum()) for one in slopes)
        sums = torch.tensor([squares, float(not finite)], dtype=torch.float64)
        squared, failed = (self.processes.mean(sums) * self.processes.count).tolist()
        norm = math.sqrt(squared) if squared >= 0.0 else math.nan
        for one in slopes:
            one.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        return not failed and math.isfinite(norm)

    @torch.no_grad()
    def round(self) -> None:
        super().round()
        for weight, owner in zip(self._weights, self._owners, strict=True):
            self.processes.give(weight.data, owner)

    @torch.no_grad()
    def values(self) -> list[Tensor]:
        copies, found = iter(self.copies), []
        for at, weight in enumerate(self._weights):
            one = next(copies)[1].detach().clone() if self._mine(at) else torch.empty_like(weight, dtype=torch.float32)
            self.processes.give(one, self._owners[at])
            found.append(one)
        return found

    def state(self) -> list[dict[str, Any]]:
        found = []
        for places, part in zip(self._kinds, self._own_parts, strict=True):
            own: dict[str, Any] = {"state": {}, "param_groups": [{}]} if part is None else part.state_dict()
            numbers = {at: number for number, at in enumerate(at for at in places if self._mine(at))}
            every = []
            for at in places:
                mine = own["state"].get(numbers[at]) if at in numbers else None
                every.append(self.processes.object_of(mine, self._owners[at]))
            group = self.processes.object_of(own["param_groups"][0], self._owners[places[0]])
            state = {number: one for number, one in enumerate(every) if one is not None}
            found.append({"state": state, "param_groups": [group | {"params": list(range(len(places)))}]})
        return found

    @torch.no_grad()
    def restore(self, values: Sequence[Tensor], state: Sequence[dict[str, Any]]) -> None:
        own_values = [value for at, value in enumerate(values) if self._mine(at)]
        own_state = []
        for places, part, kept in zip(self._kinds, self._own_parts, state, strict=True):
            if part is None:
                continue
            numbers = [number for number, at in enumerate(places) if self._mine(at)]
            moments = {new: kept["state"][old] for new, old in enumerate(numbers) if old in kept["state"]}
            group = kept["param_groups"][0] | {"params": list(range(len(numbers)))}
            own_state.append({"state": moments, "param_groups": [group]})
        super().restore(own_values, own_state)
