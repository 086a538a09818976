"""A gate's classifier, fitted to labelled draft tokens, and what it does on prompts that were held out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.gates.gate import Gate
from outpace.training.answers import seed_of

HELD_OUT = 0.3
"""Share of the prompts whose labels are not learned from; they end the training and set the threshold."""
LEAST = 20
"""Labels below which nothing is fitted."""
_BATCH, _PASSES, _PATIENCE = 256, 300, 25
_RATE, _DECAY = 3e-3, 0.02
_SAME = 1e-3
"""A standard deviation below this counts as this."""


@dataclass
class Labels:
    """Draft tokens: their features, (F,) each, what they are, and the prompts that they belong to."""

    features: list[Tensor] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def add(self, features: Tensor, label: bool, prompt: str) -> None:
        self.features.append(features)
        self.labels.append(label)
        self.prompts.append(prompt)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Fitted:
    """``probs`` and ``labels`` (n,): of the held-out tokens. ``figures``: of the gate, as its provenance has them."""

    gate: Gate
    probs: Tensor
    labels: Tensor
    figures: dict[str, Any]


def held_out(prompt: str) -> bool:
    """Whether a prompt's labels are kept from training, which its key alone decides."""
    return seed_of(f"{prompt} gate") / 2**31 < HELD_OUT


def fit(data: Labels, hidden: int, seed: int, over: Callable[[], bool], what: str) -> Fitted:
    """A gate that gives the probability of a true label. ``what``: a true label is called so, in words.

    Minimises the log-loss, in at most _PASSES passes, and keeps the weights that are best on held-out prompts. Raises
    BadInput where there are too few labels, or all are alike.
    """
    out = torch.tensor([held_out(prompt) for prompt in data.prompts], dtype=torch.bool)
    truth = torch.tensor(data.labels, dtype=torch.float32)
    for name, part in (("training", truth[~out]), ("held-out", truth[out])):
        if len(part) < LEAST or not 0.0 < float(part.mean()) < 1.0:
            raise BadInput(
                f"{int(part.sum())} of the {len(part)} {name} draft tokens are {what}: a gate needs at least {LEAST}, "
                "of both kinds; give more or other --prompts, --tokens or --max-minutes"
            )
    rows = torch.stack(data.features)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gate = Gate(rows.shape[1], hidden)
        gate.mean.copy_(rows[~out].mean(0))
        gate.scale.copy_(rows[~out].std(0).clamp_min(_SAME))
        passes = _minimise(gate, rows[~out], truth[~out], rows[out], truth[out], over)
    gate.eval().requires_grad_(False)
    with torch.inference_mode():
        probs = gate(rows[out]).sigmoid()
    figures = {
        "labels": len(data),
        "held_out_labels": int(out.sum()),
        "share": round(float(truth.mean()), 4),
        "passes": passes,
        "log_loss": round(_log_loss(probs, truth[out]), 4),
        "log_loss_of_the_share": round(_log_loss(truth[~out].mean().expand(len(probs)), truth[out]), 4),
        "auc": round(auc(probs, truth[out]), 4),
    }
    return Fitted(gate, probs, truth[out], figures)


def _minimise(gate: Gate, rows: Tensor, truth: Tensor, others: Tensor, kept: Tensor, over: Callable[[], bool]) -> int:
    """Returns the passes after which the gate was best on held-out rows."""
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    optimiser = torch.optim.AdamW(gate.parameters(), lr=_RATE, weight_decay=_DECAY)
    best, best_weights, best_pass = float("inf"), copy.deepcopy(gate.state_dict()), 0
    for number in range(1, _PASSES + 1):
        for batch in torch.split(torch.randperm(len(rows)), _BATCH):
            optimiser.zero_grad()
            torch.autograd.backward(loss_of(gate(rows[batch]), truth[batch]))
            optimiser.step()
        with torch.no_grad():
            now = float(loss_of(gate(others), kept))
        if now < best:
            best, best_weights, best_pass = now, copy.deepcopy(gate.state_dict()), number
        if number - best_pass >= _PATIENCE or (over() and best_pass):
            break
    gate.load_state_dict(best_weights)
    return best_pass


def _log_loss(probs: Tensor, truth: Tensor) -> float:
    return float(torch.nn.functional.binary_cross_entropy(probs.clamp(1e-6, 1.0 - 1e-6), truth))


def auc(probs: Tensor, truth: Tensor) -> float:
    """Area under the ROC curve: how often a true label's probability exceeds a false one's, ties counting half."""
    true, false = probs[truth > 0.5], probs[truth <= 0.5].sort().values.contiguous()
    below = torch.searchsorted(false, true.contiguous())
    not_above = torch.searchsorted(false, true.contiguous(), right=True)
    return float((below + not_above).double().mean()) / (2 * len(false))


def passing_threshold(fitted: Fitted, error: float) -> float:
    """The least threshold above which at most ``error`` of the held-out tokens are false; 1 where there is none."""
    order = fitted.probs.argsort(descending=True)
    probs, truth = fitted.probs[order].tolist(), fitted.labels[order]
    wrong = ((1.0 - truth).cumsum(0) / torch.arange(1, len(truth) + 1)).tolist()
    found = 1.0
    for at, share in enumerate(wrong):
        after = probs[at + 1] if at + 1 < len(probs) else 0.0
        if share <= error and after < probs[at]:
            found = after
    return float(found)


def stopping_threshold(fitted: Fitted, missed: float) -> float:
    """The largest threshold below which at most ``missed`` of the held-out true labels lie; below 1, which would let
    everything stand, unless all may be missed."""
    true = fitted.probs[fitted.labels > 0.5].sort().values
    return min(float(true[int(missed * len(true))]), math.nextafter(1.0, 0.0)) if missed < 1.0 else 1.0
