"""Bandits: which of several arms to pull, from the rewards of earlier pulls.

``ucb`` (UCB1, Auer et al. 2002; discounted, Garivier and Moulines 2011, arXiv 0805.3415), ``thompson`` (Beta posteriors
with fractional rewards) and ``exp3`` (Auer et al. 2002, for rewards without a fixed distribution). Rewards are in [0,
1]. With ``discount`` below 1 older pulls weigh less, for rewards that drift with the text.

A policy gives the probability of every arm; whoever pulls draws from it once. So a choice takes one random number, and
can be enumerated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Policy = Literal["ucb", "thompson", "exp3"]


@dataclass(slots=True)
class Bandit:
    """Statistics of ``arms`` arms under one policy.

    ``exploration``: weight of UCB's confidence width, and the share of EXP3's pulls that go to arms at random.
    """

    arms: int
    policy: Policy = "ucb"
    discount: float = 1.0
    exploration: float = 0.3
    pulls: list[float] = field(init=False)
    rewards: list[float] = field(init=False)
    _log_weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.pulls = [0.0] * self.arms
        self.rewards = [0.0] * self.arms
        self._log_weights = [0.0] * self.arms

    def mean(self, arm: int) -> float:
        """Average reward; 0 before the first pull."""
        return self.rewards[arm] / self.pulls[arm] if self.pulls[arm] else 0.0

    def probabilities(self) -> Tensor:
        """With what probability each arm is to be pulled, (arms,) float64."""
        import torch

        if self.policy == "exp3":
            return self._exp3()
        if self.policy == "thompson":
            return self._thompson()
        out = torch.zeros(self.arms, dtype=torch.float64)
        out[self._ucb()] = 1.0
        return out

    def _ucb(self) -> int:
        total = sum(self.pulls)
        never = next((arm for arm in range(self.arms) if self.pulls[arm] < 1e-3), None)
        if never is not None:
            return never
        width = [self.exploration * math.sqrt(2.0 * math.log(max(total, 1.0)) / pulls) for pulls in self.pulls]
        return max(range(self.arms), key=lambda arm: self.mean(arm) + width[arm])

    def _thompson(self) -> Tensor:
        """P(arm has the largest rate) under independent Beta(1 + hits, 1 + misses) posteriors, on a grid."""
        import numpy as np
        import torch

        grid = (np.arange(400) + 0.5) / 400
        densities = []
        for hits, pulls in zip(self.rewards, self.pulls, strict=True):
            log = hits * np.log(grid) + max(0.0, pulls - hits) * np.log1p(-grid)
            density = np.exp(log - log.max())
            densities.append(density / density.sum())
        below = [np.cumsum(density) - 0.5 * density for density in densities]
        best = [
            float((density * np.prod([other for j, other in enumerate(below) if j != arm], axis=0)).sum())
            for arm, density in enumerate(densities)
        ]
        out = torch.tensor(best, dtype=torch.float64)
        return out / out.sum()

    def _exp3(self) -> Tensor:
        import torch

        weights = torch.tensor(self._log_weights, dtype=torch.float64).softmax(0)
        return (1.0 - self.exploration) * weights + self.exploration / self.arms

    def learn(self, arm: int, reward: float, probability: float = 1.0) -> None:
        """``arm`` was pulled, as it was to be with ``probability``, and gave ``reward``."""
        reward = min(1.0, max(0.0, reward))
        for other in range(self.arms):
            self.pulls[other] *= self.discount
            self.rewards[other] *= self.discount
            self._log_weights[other] *= self.discount
        self.pulls[arm] += 1.0
        self.rewards[arm] += reward
        self._log_weights[arm] += self.exploration * reward / (probability * self.arms)
        top = max(self._log_weights)
        self._log_weights = [weight - top for weight in self._log_weights]
