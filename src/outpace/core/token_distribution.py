"""TokenDistribution: the distribution of the next token, as rules and drafters read it.

Rules mostly need the probability of one token; only a draw needs the whole row. So rows are asked, not read:
``distribution[token]``, :meth:`TokenDistribution.draw`, :meth:`TokenDistribution.residual`. Each kind of distribution
answers all of them from the same numbers: the p that a token is tested with is the p that a token is drawn from.

:class:`DenseDistribution`, a tensor of probabilities on any device, is the reference. Targets may bring others
(:data:`OpenRows`); :mod:`outpace.targets.dense.native_distribution` computes on the CPU without a pass per question.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.core.penalties import LogitChanges
    from outpace.core.sampling import SamplingParams

_COLDEST = 1e-30
"""Lower temperatures would overflow float32; their distribution is the same."""


class TokenDistribution(ABC):
    """Probabilities of the ``size`` tokens of a vocabulary."""

    size: int

    @abstractmethod
    def __getitem__(self, token: int) -> float:
        """The probability of ``token``."""

    def acceptance(self, q: TokenDistribution | None, token: int, prefix: float = 1.0) -> float:
        """min(1, ``prefix`` * self / ``q``) of ``token``; ``q`` None is a one-hot at it. Where self is 0, 0."""
        p_token = prefix * self[token]
        if p_token <= 0.0:
            return 0.0
        q_token = 1.0 if q is None else q[token]
        return 1.0 if p_token >= q_token else p_token / q_token

    @abstractmethod
    def draw(self, number: float) -> int:
        """The token on which ``number``, in [0, 1), falls when the probabilities are laid end to end by token id.

        It has a probability above 0."""

    @abstractmethod
    def residual(
        self, q: TokenDistribution | None, tokens: Sequence[int] = (), prefix: float = 1.0
    ) -> tuple[TokenDistribution, float]:
        """max(0, ``prefix`` * self - ``q``), and 0 at ``tokens``, normalised; and its sum before that.

        ``q`` None: nothing is subtracted. Where the sum is 0, the distribution is this one.
        """

    @abstractmethod
    def of_weights(self, weights: Tensor) -> TokenDistribution:
        """``weights`` (size,), not negative, as a distribution of this kind, for :meth:`residual`."""

    @abstractmethod
    def widened(self, ids: Tensor, size: int) -> TokenDistribution:
        """Over a vocabulary of ``size`` tokens, where this one's tokens have the different ``ids`` (self.size,)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """All probabilities: (size,), float32 or wider."""

    @abstractmethod
    def highest(self) -> float:
        """The largest probability."""

    def sequential_draws(self, numbers: Iterable[float]) -> list[int]:
        """A token for each of ``numbers``, drawn without replacement; fewer where no other has a probability."""
        drawn: list[int] = []
        left, total = self, 1.0
        for number in numbers:
            if drawn:
                left, total = left.residual(None, drawn[-1:])
            if total <= 0.0:
                break
            drawn.append(left.draw(number))
        return drawn


class OpenRows(Protocol):
    """From logits to distributions."""

    def __call__(
        self, logits: Tensor, rows: Sequence[int], params: SamplingParams, changes: Sequence[LogitChanges | None] = ()
    ) -> list[TokenDistribution | None]:
        """Distributions of some ``rows`` of ``logits``, (n, V): temperature, top-k, top-p and min-p applied, and before
        them ``changes`` (one for each of ``rows``, or none at all). ``logits`` themselves stay as they are.

        None where no token can follow: no logit is finite, or one is NaN or infinite.
        """
        ...


class DenseDistribution(TokenDistribution):
    """A tensor of probabilities, (V,) float32 or wider, that need not sum to exactly 1."""

    def __init__(self, probs: Tensor) -> None:
        self.probs = probs
        self.size = len(probs)

    def __getitem__(self, token: int) -> float:
        return float(self.probs[token])

    def draw(self, number: float) -> int:
        return drawn(self.probs, number)

    def residual(
        self, q: TokenDistribution | None, tokens: Sequence[int] = (), prefix: float = 1.0
    ) -> tuple[TokenDistribution, float]:
        import torch

        if q is None and not tokens:
            return self, prefix
        rest = self.probs if prefix == 1.0 else prefix * self.probs
        if q is not None:
            rest = torch.sub(rest, q.dense().to(rest.device)).clamp_(min=0.0)
        elif tokens and rest is self.probs:
            rest = rest.clone()
        if tokens:
            rest[list(tokens)] = 0.0
        total = float(rest.sum(dtype=torch.float64))
        return (DenseDistribution(rest / total), total) if total > 0.0 else (self, 0.0)

    def of_weights(self, weights: Tensor) -> TokenDistribution:
        return DenseDistribution(normalised(weights).to(self.probs.device))

    def widened(self, ids: Tensor, size: int) -> TokenDistribution:
        return DenseDistribution(self.probs.new_zeros(size).index_add_(0, ids, self.probs))

    def dense(self) -> Tensor:
        return self.probs

    def highest(self) -> float:
        return float(self.probs.max())


class Certain(TokenDistribution):
    """All probability on one token."""

    __slots__ = ("size", "token")

    def __init__(self, token: int, size: int) -> None:
        self.token, self.size = token, size

    def __getitem__(self, token: int) -> float:
        return float(token == self.token)

    def draw(self, number: float) -> int:
        return self.token

    def residual(
        self, q: TokenDistribution | None, tokens: Sequence[int] = (), prefix: float = 1.0
    ) -> tuple[TokenDistribution, float]:
        left = prefix if q is None else max(0.0, prefix - q[self.token])
        return self, 0.0 if self.token in tokens else left

    def of_weights(self, weights: Tensor) -> TokenDistribution:
        return DenseDistribution(normalised(weights))

    def widened(self, ids: Tensor, size: int) -> TokenDistribution:
        return Certain(int(ids[self.token]), size)

    def dense(self) -> Tensor:
        import torch

        probs = torch.zeros(self.size)
        probs[self.token] = 1.0
        return probs

    def highest(self) -> float:
        return 1.0


def normalised(weights: Tensor) -> Tensor:
    """Weights (n,) that sum to 1, float32 or float64."""
    import torch

    weights = weights if weights.dtype == torch.float64 else weights.float()
    return weights / weights.sum()


def drawn(weights: Tensor, number: float) -> int:
    """The index on which ``number``, in [0, 1), falls when ``weights`` (n,) are laid end to end; it has a weight.

    Raises ValueError where they are not finite, are negative or all 0.
    """
    import torch

    cumulative = checked_cumsum(weights)
    # right=True: the first index whose cumulative weight exceeds the point, so zero weights are never hit.
    index = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    if index >= len(weights):  # the product rounded up to the total
        index = int(weights.nonzero()[-1])
    return index


def check_weights(weights: Tensor, total: float | None = None) -> None:
    """Raise ValueError unless ``weights`` are finite, not negative and not all 0."""
    import torch

    total = float(weights.sum(dtype=torch.float64)) if total is None else total
    if not 0.0 < total < float("inf") or float(weights.min()) < 0.0:
        raise ValueError(f"categorical weights must be finite, non-negative and not all zero (sum {total})")


def checked_cumsum(weights: Tensor) -> Tensor:
    """Cumulative sums in float64 of checked weights."""
    cumulative = weights.double().cumsum(0)
    check_weights(weights, float(cumulative[-1]))
    return cumulative


def dense_distributions(
    logits: Tensor, rows: Sequence[int], params: SamplingParams, changes: Sequence[LogitChanges | None] = ()
) -> list[TokenDistribution | None]:
    """:data:`OpenRows` in plain PyTorch, on any device, at any temperature."""
    import torch

    picked = logits[rows[0] : rows[0] + 1] if len(rows) == 1 and not changes else logits[list(rows)]
    picked = picked.float()
    for row, change in zip(picked, changes, strict=False):
        if change is not None:
            change.apply(row)
    alive = picked.amax(-1).isfinite().tolist()
    if not all(alive):
        picked = picked.masked_fill(~torch.tensor(alive, device=picked.device)[:, None], 0.0)
    probs = warp(picked, params).unbind(0)
    return [DenseDistribution(row) if one else None for row, one in zip(probs, alive, strict=True)]


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Mask all but the smallest set of tokens whose probability reaches ``top_p``; (n, V) -> (n, V).

    Of equal logits at the edge the smallest ids stay, so that a row's set never depends on the other rows.
    """
    import torch

    vocab = logits.shape[-1]
    probs = logits.softmax(-1)
    size = min(512, vocab)
    while True:  # a full sort costs milliseconds a row; the largest nearly always suffice
        values, ids = logits.topk(size, dim=-1)
        mass = probs.gather(-1, ids).cumsum(-1)
        if size == vocab or bool((mass[:, -1] >= top_p).all()):
            break
        size = min(vocab, size * 8)
    before = torch.cat([mass.new_zeros(len(mass), 1), mass[:, :-1]], dim=-1)
    count = (before < top_p).sum(-1, keepdim=True)
    smallest = values.gather(-1, count - 1)
    dropped = logits < smallest
    if bool(((~dropped).sum(-1, keepdim=True) > count).any()):
        tied = logits == smallest
        dropped |= tied & (tied.cumsum(-1) > count - (logits > smallest).sum(-1, keepdim=True))
    return logits.masked_fill(dropped, -math.inf)


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p, min-p, softmax: (n, V) processed logits -> (n, V) float32 probabilities.

    A row's result is the same bits whatever rows are processed beside it: torch's softmax is computed row by row, while
    its sums over a row are split among threads in another way where there are several rows.
    """
    import torch

    if params.greedy:
        best = logits.max(-1, keepdim=True)
        # A row without a token that can follow is NaN here as it is after a softmax; see TreeDistribution.p.
        return torch.zeros_like(logits).scatter_(-1, best.indices, torch.where(best.values > -math.inf, 1.0, math.nan))
    logits = logits / max(params.temperature, _COLDEST)
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if params.top_p < 1.0:
        logits = _keep_top_p(logits, params.top_p)
    probs = logits.softmax(-1)
    if params.min_p > 0.0:
        floor = params.min_p * probs.max(-1, keepdim=True).values
        probs = logits.masked_fill(probs < floor, -math.inf).softmax(-1)
    return probs
