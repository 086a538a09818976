"""A mixture of experts that is made of a dense model, and what its forwards take here.

The neurons of each MLP are divided among experts, those with similar gate weights together, and a token uses the
experts whose mean gate weights answer most to its hidden state, compared with how they answer to others: so all experts
are used about as often, as in mixtures that are trained. With all experts the mixture is the dense model (as in
MoEfication: Zhang et al. 2022, arXiv 2110.01786). No weights are trained, so that answers of a sparse one are worse;
what reading experts takes does not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.targets.base import Sequence, Target


class Mixture(nn.Module):
    """The MLP of a layer as experts. ``touched``: how many of them the last forward used."""

    def __init__(self, mlp: Any, experts: int, active: int) -> None:
        super().__init__()
        gate, up, down = (getattr(mlp, name).weight.detach() for name in ("gate_proj", "up_proj", "down_proj"))
        groups = _alike(gate.float(), experts)
        self.gate, self.up = (nn.Parameter(torch.stack([one[rows] for rows in groups])) for one in (gate, up))
        self.down = nn.Parameter(torch.stack([down[:, rows] for rows in groups]))
        self.router = nn.Parameter(torch.stack([gate[rows].mean(0) for rows in groups]))
        self.act, self.active, self.touched = mlp.act_fn, active, 0
        self.level, self.spread, self.balancing = torch.zeros(experts), torch.ones(experts), False

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        answers = rows @ self.router.T
        if self.balancing:
            self.level, self.spread = answers.mean(0), answers.std(0)
        chosen = ((answers - self.level) / self.spread).topk(self.active, dim=1).indices
        used = torch.unique(chosen).tolist()
        self.touched, found = len(used), torch.zeros_like(rows)
        for expert in used:
            mine = (chosen == expert).any(1).nonzero()[:, 0]
            own = rows[mine]
            inner = self.act(own @ self.gate[expert].T) * (own @ self.up[expert].T)
            found.index_add_(0, mine, inner @ self.down[expert].T)
        return found.view_as(hidden)


def _alike(gate: Tensor, count: int) -> list[Tensor]:
    """Rows of ``gate`` in ``count`` groups of one size: halved again and again along the direction in which they differ
    most."""
    groups = [torch.arange(len(gate))]
    while len(groups) < count:
        halves = []
        for rows in groups:
            centred = gate[rows] - gate[rows].mean(0)
            direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
            order = rows[(centred @ direction).argsort()]
            halves += [order[: len(order) // 2], order[len(order) // 2 :]]
        groups = halves
    return groups


def upcycle(model: Any, experts: int, active: int) -> list[Mixture]:
    """Put a mixture in the place of every MLP of a transformers model. Raises BadInput where that is not possible."""
    if experts & (experts - 1):
        raise BadInput(f"the tiny mixture's experts must be a power of two, not {experts}")
    layers = model.get_decoder().layers
    found = []
    for layer in layers:
        if not all(hasattr(layer.mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            raise BadInput("the tiny mixture is made of a model with gated MLPs, which this one has not")
        if len(layer.mlp.gate_proj.weight) % experts:
            raise BadInput(f"MLPs of width {len(layer.mlp.gate_proj.weight)} cannot be divided into {experts} experts")
        layer.mlp = Mixture(layer.mlp, experts, active)
        found.append(layer.mlp)
    return found


@torch.inference_mode()
def balance(model: Any, mixtures: Seq[Mixture], tokens: Seq[int]) -> None:
    """See how experts answer to ``tokens``, layer by layer, so that all are used about as often."""
    for one in mixtures:
        one.balancing = True
    model(torch.tensor([list(tokens)]))
    for one in mixtures:
        one.balancing = False


@dataclass(frozen=True, slots=True)
class Cell:
    """Forwards of ``batch`` different sequences with ``length`` draft tokens each. ``touched``: experts that they used,
    the mean over layers and forwards."""

    batch: int
    length: int
    seconds: float
    touched: float

    @property
    def rows(self) -> int:
        return self.batch * (1 + self.length)


class MixtureForwards:
    """Forwards over texts: prompts with answers, whose next tokens are the drafts. Close it."""

    def __init__(self, target: Target, mixtures: Seq[Mixture], texts: Seq[Seq[int]], longest: int) -> None:
        """``texts``: each with more than ``longest`` tokens."""
        self._target, self._mixtures = target, mixtures
        self._next = [list(one[len(one) - longest :]) for one in texts]
        self._sequences: list[Sequence] = [target.sequence(list(one[: len(one) - longest])) for one in texts]
        target.prefill(self._sequences)

    def close(self) -> None:
        for one in self._sequences:
            self._target.close(one.kv)

    def touched(self, members: Seq[int], length: int) -> float:
        """Experts that a forward of these texts uses, mean over the layers."""
        batch = [(self._sequences[at], TokenTree.chain(self._next[at][:length])) for at in members]
        self._target.score(batch)
        return sum(one.touched for one in self._mixtures) / len(self._mixtures)

    def cells(self, sizes: Seq[tuple[int, int]], repeat: int) -> Iterator[Cell]:
        """Of each (batch, length), ``repeat`` forwards of different members and the median of their seconds. All sizes
        take turns, so that a disturbance meets all of them."""
        seconds: dict[tuple[int, int], list[float]] = {one: [] for one in sizes}
        touched: dict[tuple[int, int], list[float]] = {one: [] for one in sizes}
        for turn in range(-1, repeat):  # the first turn does not count
            for batch, length in sizes:
                members = [(turn * batch + at) % len(self._sequences) for at in range(batch)]
                began = perf_counter()
                used = self.touched(members, length)
                if turn >= 0:
                    seconds[batch, length].append(perf_counter() - began)
                    touched[batch, length].append(used)
        for size in sizes:
            yield Cell(*size, median(seconds[size]), mean(touched[size]))


def fitted_seconds(known: Seq[Cell], experts: int, active: int) -> Callable[[int], float]:
    """What a forward over so many rows takes: a constant, a part for each expert that is expected to be used, a part
    for each row. Least squares of the relative errors, none of the parts negative, over ``known`` cells.

    A simpler form of the paper's model, whose parts grow with a roofline's ramp instead of in proportion.
    """
    from scipy.optimize import nnls

    def parts(rows: Any) -> NDArray[np.float64]:
        count = np.asarray(rows, float)
        return np.stack([np.ones_like(count), experts * (1.0 - (1.0 - active / experts) ** count), count], axis=-1)

    measured = np.array([one.seconds for one in known])
    weights, _ = nnls(parts([one.rows for one in known]) / measured[:, None], np.ones(len(known)))
    return lambda rows: float(parts(rows) @ weights)
