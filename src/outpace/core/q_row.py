"""QRow: the distribution that a draft token was sampled from, which the acceptance rule tests it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.core.token_distribution import TokenDistribution, normalised

if TYPE_CHECKING:
    from torch import Tensor


def _places(ids: Tensor, token: int) -> list[int]:
    """Where ``ids`` (n,) hold ``token``."""
    if ids.is_cpu:  # once a draw: PyTorch takes ten times as long as NumPy for as little as this
        found: list[int] = (ids.numpy() == token).nonzero()[0].tolist()
        return found
    return (ids == token).nonzero()[:, 0].tolist()


@dataclass(frozen=True, slots=True)
class QRow:
    """The very distribution that a draw was sampled from, at its own precision.

    ``source``: what was drawn from, a distribution over the whole vocabulary when ``ids`` is None, else over a reduced
    one: the tokens ``ids`` (n,), every other token having probability zero. Probabilities as a tensor, (V,) or (n,),
    need not sum to one (rows rounded to bf16 do not); rules read them normalised. ``drawn``: a token that was drawn and
    its probability, where whoever drew it knows: finding a token among ``ids`` means reading all of these.
    """

    source: Tensor | TokenDistribution
    ids: Tensor | None = None
    drawn: tuple[int, float] | None = None

    @property
    def probs(self) -> Tensor:
        """Probabilities as they were drawn from: (V,) or (n,)."""
        return self.source.dense() if isinstance(self.source, TokenDistribution) else self.source

    def prob(self, token: int) -> float:
        """q(token)."""
        if self.drawn is not None and self.drawn[0] == token:
            return self.drawn[1]
        at = [token] if self.ids is None else _places(self.ids, token)
        if isinstance(self.source, TokenDistribution):
            return sum(self.source[index] for index in at)
        probs = normalised(self.probs)
        return float(probs[at].sum())

    def dense(self, vocab_size: int) -> Tensor:
        """q over the whole vocabulary, shape (vocab_size,), float32 or wider."""
        if self.ids is None and isinstance(self.source, TokenDistribution):
            return self.source.dense()
        probs = normalised(self.probs)
        if self.ids is None:
            return probs
        return probs.new_zeros(vocab_size).index_add_(0, self.ids, probs)

    def distribution(self, like: TokenDistribution) -> TokenDistribution:
        """q over the whole vocabulary, to be compared with ``like``."""
        source = self.source
        if isinstance(source, TokenDistribution):
            return source if self.ids is None else source.widened(self.ids, like.size)
        return like.of_weights(source if self.ids is None else self.dense(like.size))
