"""Mean losses over batches that are not trained on, and random draws that a seed and a number decide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from outpace.heads.base import Batch, Head


@contextlib.contextmanager
def seeded(seed: int, number: int, device: torch.device) -> Iterator[None]:
    """Random draws inside depend on ``seed`` and ``number`` alone, so that a resumed run draws the same."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed((seed * 1_000_003 + number) % 2**63)
        yield


ROUNDS, OF_ROUNDS = "rounds", ("accept_1", "round_tokens")
"""Among losses: how many rounds were played over a batch, and what are means over these."""


@torch.no_grad()
def mean_losses(
    head: Head,
    batches: Iterator[Batch],
    losses: Callable[[Batch], dict[str, Tensor]],
    chance: Callable[[int], AbstractContextManager[None]],
) -> dict[str, float]:
    """Means over tokens of ``losses`` by name, of some over rounds; empty where there are no batches. ``chance``: draws
    for a number."""
    head.eval()
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for number, batch in enumerate(batches):
        count = int(batch.answer.sum())
        with chance(-1 - number):
            found = losses(batch)
        rounds = float(found.pop(ROUNDS, 0.0))
        for name, value in found.items():
            weight = rounds if name in OF_ROUNDS else count
            sums[name] = sums.get(name, 0.0) + weight * float(value)
            weights[name] = weights.get(name, 0.0) + weight
    return {name: value / weights[name] for name, value in sums.items() if weights[name]}
