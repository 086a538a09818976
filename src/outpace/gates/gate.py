"""Gate: a small classifier, and what its ``config.json`` says.

A gate has one hidden layer over standardised features, and gives one probability: of ``sprinter``, that the target
would accept a draft token; of ``pad``, that a rejected draft token is a pivot. A gate of ``bild`` has no classifier,
but two thresholds.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.core.validation import StrictModel
from outpace.heads.head_config import TargetFacts

FORMAT = 1
_FARTHEST = 8.0
"""Standard deviations at which a feature is cut: one that training has not seen must not decide alone."""
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class DraftFacts(StrictModel):
    """The draft model whose drafts a gate judges, and its fingerprint (:mod:`outpace.gates.draft_probe`)."""

    name: str
    fingerprint: list[_Finite]


class GateConfig(StrictModel):
    """``config.json`` of a gate of the kind ``gate``. ``draft`` None: it judges drafts of any drafter. ``features``
    0: it has no classifier.

    ``thresholds``: what its training chose, by the names of the method's settings.
    """

    format: int = FORMAT
    gate: str
    target: TargetFacts
    draft: DraftFacts | None = None
    features: int = Field(default=0, ge=0, le=2**20)
    hidden: int = Field(default=0, ge=0, le=2**16)
    thresholds: dict[str, _Finite]


class Gate(nn.Module):
    """Weights: ``inner`` (hidden, features), ``outer`` (1, hidden), and ``mean`` and ``scale`` of the features."""

    mean: Tensor
    scale: Tensor

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.inner = nn.Linear(features, hidden)
        self.outer = nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Log-odds (n,) of features (n, F)."""
        even = ((features - self.mean) / self.scale).clamp(-_FARTHEST, _FARTHEST)
        log_odds: Tensor = self.outer(nn.functional.gelu(self.inner(even)))[:, 0]
        return log_odds

    @torch.inference_mode()
    def probability(self, features: Tensor) -> float:
        """Of one row of features, (F,)."""
        return float(self(features[None]).sigmoid()[0])


def random_gate(features: int, hidden: int = 8, seed: int = 0) -> Gate:
    """An untrained gate with large random weights, whose decisions depend on every feature: for certification."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gate = Gate(features, hidden)
        for layer in (gate.inner, gate.outer):
            layer.weight.data.normal_(std=2.0 * layer.weight.shape[-1] ** -0.5)
    return gate.eval().requires_grad_(False)
