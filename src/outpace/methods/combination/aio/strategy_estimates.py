"""What is known of each strategy: how often it drafts, how much, and how much of that is accepted.

Three figures of a request are expected from its prompt (:mod:`.prompt_features`): the share of rounds in which the
strategy drafts at all, and of such a round the draft tokens and those of them that are accepted. Each is a linear
function of the prompt's numbers, fitted by ridge regression (Hoerl, Kennard 1970) to the requests so far around a prior
that was measured (``priors.json``, written by ``benchmarks/router.py``). What such rounds take is not learned from them
but follows from measured costs (:mod:`outpace.controllers.predictor`), so figures of one batch size serve others too.

Only sums of figures are kept: nothing of what prompts and answers were about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outpace.core.metrics import RequestMetrics

Vector = npt.NDArray[np.float64]
OWN, SHARED = 2.0, 8.0
"""How many requests the prior counts as: for the constant, in which heads and draft models differ much, and for what
the prompt's numbers change, in which they differ little."""
SHARE_NOISE, TOKEN_NOISE = 0.2, 1.0
"""Standard deviations of a request's figures around their expectations: of shares, and of numbers of tokens."""
FADE = 0.995
"""What a request still weighs after the next one."""
WHOLE = 16
"""Rounds from which on a request counts whole."""


class Expected(NamedTuple):
    """Of one request: ``drafting``: share of rounds with a draft. Of such a round: ``nodes``: draft tokens, of which
    ``accepted`` are accepted."""

    drafting: float
    nodes: float
    accepted: float


class Ridge:
    """One figure as a linear function of a prompt's numbers; ``prior``: its weights before any request. ``noise``:
    standard deviation of a request's figure around its expectation."""

    def __init__(self, prior: Seq[float], noise: float) -> None:
        self._noise = noise
        self._prior = np.asarray(prior, dtype=np.float64)
        self._strength = np.diag([OWN] + [SHARED] * (len(prior) - 1)).astype(np.float64)
        self._squares = np.zeros_like(self._strength)
        self._sums = np.zeros_like(self._prior)

    def learn(self, numbers: Seq[float], figure: float, weight: float) -> None:
        """A request with these numbers has shown ``figure``; it counts as ``weight`` requests."""
        x = np.asarray(numbers, dtype=np.float64)
        self._squares = FADE * self._squares + weight * np.outer(x, x)
        self._sums = FADE * self._sums + weight * (figure - float(x @ self._prior)) * x

    def expected(self, numbers: Seq[float]) -> tuple[float, float]:
        """The expected figure of a request with these numbers, and its standard deviation for want of requests."""
        x = np.asarray(numbers, dtype=np.float64)
        known = np.linalg.solve(self._strength + self._squares, np.stack([self._sums, x], axis=1))
        return float(x @ (self._prior + known[:, 0])), self._noise * float(x @ known[:, 1]) ** 0.5


@dataclass(frozen=True, slots=True)
class Prior:
    """Of one kind of strategy: weights of the figures of :class:`Expected`, and nodes on each level of a draft."""

    drafting: tuple[float, ...]
    nodes: tuple[float, ...]
    accepted: tuple[float, ...]
    width: float


@cache
def priors() -> Mapping[str, Prior]:
    """The measured ones, by the kind of strategy: lookup, head, draft and, for all others, other."""
    from outpace.methods.combination.aio.prompt_features import FEATURES

    written: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath("priors.json").read_text("utf-8"))
    if tuple(written["features"]) != FEATURES:
        raise ValueError(f"priors.json is of the features {written['features']}; run benchmarks/router.py fit")
    return {
        kind: Prior(tuple(one["drafting"]), tuple(one["nodes"]), tuple(one["accepted"]), one["width"])
        for kind, one in written["kinds"].items()
    }


class Estimate:
    """What is known of one strategy."""

    def __init__(self, prior: Prior) -> None:
        self._drafting = Ridge(prior.drafting, SHARE_NOISE)
        self._nodes, self._accepted = Ridge(prior.nodes, TOKEN_NOISE), Ridge(prior.accepted, TOKEN_NOISE)
        self._scored, self._levels = WHOLE * prior.width, float(WHOLE)

    @property
    def width(self) -> float:
        """Nodes on each level of its drafts, on average."""
        return self._scored / self._levels

    def expected(self, numbers: Seq[float]) -> tuple[Expected, Expected]:
        """Of a request with these numbers: as expected, and with a standard deviation more drafts and accepted
        tokens."""
        share, more = self._drafting.expected(numbers)
        accepted, better = self._accepted.expected(numbers)
        nodes, _ = self._nodes.expected(numbers)
        return _possible(share, nodes, accepted), _possible(share + more, nodes, accepted + better)

    def learn(self, numbers: Seq[float], shown: RequestMetrics, levels: int) -> None:
        """A request has ended that this strategy drafted for; its drafts had ``levels`` levels in all."""
        if not shown.rounds:
            return
        self._drafting.learn(numbers, shown.drafting / shown.rounds, min(1.0, shown.rounds / WHOLE))
        if shown.drafting:
            weight = min(1.0, shown.drafting / WHOLE)
            self._nodes.learn(numbers, shown.drafted / shown.drafting, weight)
            self._accepted.learn(numbers, shown.accepted / shown.drafting, weight)
        self._scored = FADE * self._scored + shown.drafted
        self._levels = FADE * self._levels + levels


def _possible(share: float, nodes: float, accepted: float) -> Expected:
    nodes = max(1.0, nodes)
    return Expected(min(1.0, max(0.0, share)), nodes, min(nodes, max(0.0, accepted)))
