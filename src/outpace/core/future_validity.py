"""Future validity: tokens weighted by the probability that an answer which goes on with them ends valid.

A mask alone samples from the projected distribution: at every position the model's probabilities of the allowed tokens,
renormalised, whatever becomes of the answer behind them. The model's distribution over whole answers, conditioned on
being valid, is that of tokens weighted by their future validity, Doob's h-transform of the model::

    P(x | path, valid) = p(x | path) h(path x) / h(path),      h(path) = P(the model goes on to a valid answer | path)

("Future Validity is the Missing Statistic", FVO-Spec.) The model is the distribution after logit bias, penalties and
users' processors, at the request's temperature (1 at temperature 0), before the grammar and before top-k, top-p and
min-p, which cut the weighted distribution as they cut the masked one. At temperature 0 the most likely token of the
weighted distribution is taken.

Here are the weights and their places; :mod:`outpace.engine.future_validity` finds h by forwards of the target, and
:mod:`outpace.constraints.automaton` by dynamic programming, where the model is small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outpace.core.constraint import Bits, Constraint, ConstraintState, KnowsSpelling
from outpace.core.errors import BadInput, shown
from outpace.core.names import did_you_mean, normalised

if TYPE_CHECKING:
    from torch import Tensor

MASKED, FVO, EXACT, ONE_STEP = "masked", "fvo", "fvo-exact", "fvo-one-step"
NO_GRAMMAR = "constraint_weighting weights what a grammar allows, and there is none; give one, or leave it out"
MAX_VALIDITY_NODES = 1024
"""Beginnings of answers that are scored for one request where nothing else is asked for."""
KINDS = (MASKED, FVO, EXACT, ONE_STEP)


@dataclass(frozen=True, slots=True)
class ConstraintWeighting:
    """How the tokens that a grammar allows are weighted.

    kind: "masked": not at all. "fvo-exact": by their future validity, from all valid answers of any probability; where
        these are too many the request is refused. "fvo-one-step": by an estimate, the probability that the token after
        the next is allowed. "fvo": exact where that can be had, estimated elsewhere.
    max_nodes: beginnings of answers that are scored for exact weights, at most.
    tolerance: exact weights are within this total variation distance of the conditional distribution.
    topk, coverage: the estimate looks behind the most likely allowed tokens, as many as have this share of the allowed
        probability, and at most topk; others get the mean weight of these.

    Raises BadInput for values out of range.
    """

    kind: str = MASKED
    max_nodes: int = MAX_VALIDITY_NODES
    tolerance: float = 1e-6
    topk: int = 8
    coverage: float = 0.99

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = did_you_mean(str(self.kind), list(KINDS)) or f"known: {', '.join(KINDS)}"
            raise BadInput(f"there is no constraint_weighting '{self.kind}'; {near}")
        for name, low, high in (("max_nodes", 1, 1_000_000), ("topk", 1, 1024)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise BadInput(f"constraint_weighting, {name}: must be a whole number from {low} to {high:,}")
        for name in ("tolerance", "coverage"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise BadInput(f"constraint_weighting, {name}: must be a number from 0 to 1")

    @classmethod
    def read(cls, given: Any) -> ConstraintWeighting:
        """A weighting as it is, or from its text: a kind, or a kind with settings such as ``fvo(max_nodes=4096)``."""
        if isinstance(given, ConstraintWeighting):
            return given
        form = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", given, re.DOTALL) if isinstance(given, str) else None
        if form is None:
            raise BadInput(f"constraint_weighting must be one of {', '.join(KINDS)}, not {shown(given)}")
        kind = next((one for one in KINDS if normalised(one) == normalised(form[1])), form[1])
        return cls(kind, **_settings(form[2] or ""))

    @property
    def weighs(self) -> bool:
        """Whether tokens are weighted at all."""
        return self.kind != MASKED

    def __str__(self) -> str:
        default = ConstraintWeighting(self.kind)
        changed = [one.name for one in fields(self) if getattr(self, one.name) != getattr(default, one.name)]
        said = ",".join(f"{name}={getattr(self, name):g}" for name in changed)
        return f"{self.kind}({said})" if said else self.kind


def _settings(text: str) -> Mapping[str, Any]:
    known: dict[str, Callable[[str], float]] = {"max_nodes": int, "tolerance": float, "topk": int, "coverage": float}
    found: dict[str, Any] = {}
    for pair in filter(None, (one.strip() for one in text.split(","))):
        name, sign, value = (one.strip() for one in pair.partition("="))
        if not sign or name not in known:
            raise BadInput(f"constraint_weighting: write KEY=VALUE for a KEY of {', '.join(known)}, not '{pair}'")
        try:
            found[name] = known[name](value)
        except ValueError:
            raise BadInput(f"constraint_weighting, {name}: '{value}' is not a number") from None
    return found


class TokenWeights(NamedTuple):
    """Logarithms of weights (n,) float32 of the different tokens ``ids`` (n,) int64, and of all ``others``."""

    ids: Tensor
    logs: Tensor
    others: float = 0.0

    @staticmethod
    def of(logs: Mapping[int, float], others: float = 0.0) -> TokenWeights:
        """Weights by token."""
        import torch

        return TokenWeights(
            torch.tensor(list(logs), dtype=torch.long), torch.tensor(list(logs.values()), dtype=torch.float32), others
        )

    def apply(self, row: Tensor, temperature: float) -> Tensor:
        """Weight the probabilities that logits (V,), float32, will have at a temperature; in place, returns the row."""
        import torch

        scale = temperature or 1.0
        ids = self.ids.to(row.device)
        logits = row[ids]
        found = torch.where(logits > -math.inf, logits + scale * self.logs.to(row.device), logits)
        if self.others:
            row += scale * self.others
        return row.index_copy_(0, ids, found)


class Beginning(Protocol):
    """A beginning of an answer whose future validity is known."""

    @property
    def weights(self) -> TokenWeights | None:
        """Of the tokens that may follow; None where none may."""
        ...

    def child(self, token: int) -> Beginning | None:
        """With one more token; None where no valid answer goes on so."""
        ...


@dataclass(eq=False, slots=True)
class ValidityNode:
    """A beginning of an answer in a tree of answers.

    ``log_probs``: log-probabilities of the tokens that may follow it, under the model without the grammar; tokens that
    end the answer are among them, and in ``ends``. ``log_validity``: the logarithm of its h.
    """

    log_probs: dict[int, float] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    children: dict[int, ValidityNode] = field(default_factory=dict)
    whole: bool = False
    """Whether the answer ends here by itself."""
    log_validity: float = -math.inf
    _weights: TokenWeights | None = None

    def child(self, token: int) -> ValidityNode | None:
        return self.children.get(token)

    @property
    def weights(self) -> TokenWeights | None:
        if self._weights is None and self.log_probs:
            logs = dict.fromkeys(self.ends, 0.0) | {at: one.log_validity for at, one in self.children.items()}
            self._weights = TokenWeights.of(logs, -math.inf)
        return self._weights

    def settle(self) -> None:
        """Find ``log_validity`` from that of the children, and give up children that lead nowhere."""
        if self.whole:
            self.log_validity = 0.0
            return
        self.children = {at: one for at, one in self.children.items() if one.log_validity > -math.inf}
        logs = [self.log_probs[at] for at in self.ends]
        logs += [self.log_probs[at] + one.log_validity for at, one in self.children.items()]
        self.log_validity = log_sum(logs)


def log_sum(logs: Sequence[float]) -> float:
    """The logarithm of a sum of numbers, from their logarithms."""
    best = max(logs, default=-math.inf)
    return best if best == -math.inf else best + math.log(math.fsum(math.exp(one - best) for one in logs))


@dataclass(frozen=True, slots=True)
class WeightedState:
    """A grammar's state, and the beginning of an answer that it belongs to (None: one that no valid answer has)."""

    inner: ConstraintState
    at: Beginning | None

    @property
    def weights(self) -> TokenWeights | None:
        """Of the tokens that may follow; None: all the same."""
        return None if self.at is None else self.at.weights

    @property
    def complete(self) -> bool:
        return self.inner.complete

    def allowed(self, size: int) -> Bits:
        return self.inner.allowed(size)

    def advance(self, token: int) -> WeightedState | None:
        after = self.inner.advance(token)
        return None if after is None else WeightedState(after, None if self.at is None else self.at.child(token))

    def forced(self) -> Sequence[int]:
        return self.inner.forced()

    def longest(self, size: int) -> Sequence[int]:
        return self.inner.longest(size) if isinstance(self.inner, KnowsSpelling) else ()


class WeightedConstraint:
    """A grammar after one prompt: with the future validity of every beginning of an answer."""

    def __init__(self, constraint: Constraint, root: Beginning) -> None:
        self.constraint, self.root = constraint, root

    def begin(self) -> WeightedState:
        return WeightedState(self.constraint.begin(), self.root)

    def accepts(self, text: str) -> bool:
        return self.constraint.accepts(text)


@dataclass(slots=True)
class Weighed:
    """What the weights of one request are, and how far they may be trusted.

    kind: "fvo-exact" or "fvo-one-step". nodes: rows that were scored for them. validity: the probability that the
    model's own answer would be valid; None where it is not known. error: of exact weights, a bound on the total
    variation distance from the conditional distribution; of estimates, by how much the next step revises them: the mean
    over rounds of 1 - E(weight of the next token), 0 where it does not.
    """

    kind: str
    nodes: int = 0
    validity: float | None = None
    error: float | None = None
    rounds: int = 0

    def revised(self, share: float) -> None:
        """One more round of estimates."""
        self.error = ((self.error or 0.0) * self.rounds + share) / (self.rounds + 1)
        self.rounds += 1

    def public(self) -> dict[str, Any]:
        """As results give it."""
        return {"validity": self.validity, "nodes": self.nodes, "error": self.error}
