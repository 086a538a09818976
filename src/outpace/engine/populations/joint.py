"""The joint distribution over (beam, next token), and ordered draws from it without replacement.

A beam with score s (the log-probability of its tokens) and a next token x have the joint score s + log p(x | beam).
Beam search takes the pairs with the largest joint scores. Stochastic beam sampling at temperature T draws pairs one
after the other without replacement, each with probability proportional to exp(joint score / T); its limit for T to 0 is
beam search, and with one beam it is sampling at temperature T. Top-k, top-p and min-p, at temperature T, say which
tokens may follow a beam at all.

A pair is drawn beam first, then token: each beam's next token is one distribution of the target's own kind, and no row
of probabilities is written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core.chance import Chance
from outpace.core.processors import ProcessorFailure
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import DenseDistribution, OpenRows, TokenDistribution, normalised
from outpace.core.tree_distribution import TreeDistribution
from outpace.targets.base import TreeScores

_LITTLE = 1e-20
"""Where less than this share of a distribution is left it is made anew, relative to what is left: floating point loses
shares below 1e-38."""


def log_probs(scores: TreeScores, nodes: Seq[int]) -> Tensor:
    """Log-probabilities of every token after ``nodes``: (len(nodes), V) float32.

    Bias, penalties and processors change log-probabilities, not logits, and nothing is normalised afterwards: as in
    transformers' beam search. Raises ProcessorFailure for a processor that raises; one that bans every token leaves a
    row of -inf.
    """
    rows = scores.logits[[node + 1 for node in nodes]].float().log_softmax(-1)
    sampler = scores.sequence.sampler
    if not sampler.changes_logits:
        return rows
    where = {node + 1: at for at, node in enumerate(nodes)}
    found = TreeDistribution(sampler, scores.tree, rows, where, lambda: scores.logits)
    processed = found.processed(nodes)
    for node in nodes:
        if isinstance(failure := found.failure(node), ProcessorFailure):
            raise failure
    return processed


class JointDistribution:
    """Probabilities of places, beam * V + token: ``laws``, of the tokens after each beam (None: no token can follow),
    and ``shares``, what each beam has of ``total``."""

    def __init__(self, laws: Seq[TokenDistribution | None], shares: Seq[float], vocab_size: int) -> None:
        self.laws, self._shares, self._vocab_size = list(laws), list(shares), vocab_size
        self.total = math.fsum(shares)

    @classmethod
    def of(cls, weights: Tensor) -> JointDistribution:
        """Of one beam whose tokens have ``weights`` (m,), with a total of 1."""
        return cls([DenseDistribution(normalised(weights))], [1.0], len(weights))

    def __getitem__(self, place: int) -> float:
        beam, token = divmod(place, self._vocab_size)
        law = self.laws[beam]
        return 0.0 if law is None else self._shares[beam] * law[token]

    def draw(self, chance: Chance) -> int:
        """A place, in proportion to what it has. ``total`` must be above 0."""
        beam = chance.categorical(torch.tensor(self._shares, dtype=torch.float64))
        law = self.laws[beam]
        assert law is not None
        return beam * self._vocab_size + chance.categorical(law)

    def without(self, places: Iterable[int]) -> JointDistribution:
        """The same, with nothing at ``places``."""
        tokens: dict[int, list[int]] = {}
        for place in places:
            beam, token = divmod(place, self._vocab_size)
            tokens.setdefault(beam, []).append(token)
        laws, shares = list(self.laws), list(self._shares)
        for beam, some in tokens.items():
            if (law := laws[beam]) is not None:
                laws[beam], left = law.residual(None, some)
                shares[beam] *= left
        return JointDistribution(laws, shares, self._vocab_size)


Renewed = Callable[[Seq[int]], JointDistribution]
"""From places that were drawn to the joint distribution without them, of a total of 1."""


def joint_distribution(
    rows: Tensor, weights: Seq[float], params: SamplingParams, open_rows: OpenRows
) -> JointDistribution:
    """Of (beam, token) pairs, by log-probabilities ``rows`` (n, V) float32 after beams with scores ``weights``; a total
    of 1, or of 0 where nothing can follow."""
    laws = open_rows(rows, range(len(rows)), params)
    best = [weight + highest for weight, highest in zip(weights, rows.amax(-1).tolist(), strict=True)]
    top = max((one for one in best if math.isfinite(one)), default=0.0)
    shares = []
    for law, one in zip(laws, best, strict=True):
        # What truncation leaves of a beam's e^(joint score / T), from its likeliest token, which is always left.
        if law is None or not math.isfinite(one):
            shares.append(0.0)
        else:
            shares.append(math.exp((one - top) / params.temperature) / law.highest())
    total = math.fsum(shares) or 1.0
    return JointDistribution(laws, [one / total for one in shares], rows.shape[1])


def likeliest(joint: Tensor, most: int) -> Iterator[int]:
    """The ``most`` pairs with the largest joint scores (n, V), as places in the flattened rows, best first."""
    flat = joint.flatten()
    best = flat.topk(min(most, len(flat)))
    for place, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        if not value > -torch.inf:  # NaN comes first
            return
        yield place


def renewing(
    p: JointDistribution, rows: Tensor, weights: Seq[float], params: SamplingParams, open_rows: OpenRows
) -> Renewed:
    """What makes ``p``, the joint distribution of the other arguments, anew without some places: relative to what is
    left. At low temperatures most pairs are too unlikely, beside the likeliest, for floating point."""

    def renewed(places: Seq[int]) -> JointDistribution:
        left = rows.clone()
        if params.top_p < 1.0 or params.min_p > 0.0:
            for row, law in zip(left, p.laws, strict=True):
                row[... if law is None else law.dense().to(row.device) == 0.0] = -torch.inf
        elif 0 < params.top_k < rows.shape[1]:
            left[rows < rows.topk(params.top_k, dim=-1).values[:, -1:]] = -torch.inf
        left.view(-1)[list(places)] = -torch.inf
        return joint_distribution(left, weights, SamplingParams(temperature=params.temperature), open_rows)

    return renewed


def ordered_draws(
    p: JointDistribution | Tensor,
    chance: Chance,
    proposed: Iterable[int] = (),
    q: Mapping[int, float] | Tensor | None = None,
    renewed: Renewed | None = None,
) -> Iterator[int]:
    """Places of ``p`` (or of weights, (m,)), drawn one after the other without replacement.

    ``proposed``: places that were drawn so from ``q``, in order; ``q`` are weights of the places that could be drawn.
    Each is accepted with probability min(1, p / q) in place of a draw, where p is what earlier rejections have left for
    this draw and q what earlier proposals have left (recursive rejection: Jeon et al. 2024, arXiv 2402.14160, algorithm
    1); when none is left, what remains is drawn. A proposal is judged without a look at later ones, so the law of the
    draws is that of ``p`` alone.

    A rejection takes nothing from places that ``q`` does not have: these are one number, and a draw among them.

    ``renewed``: gives ``p`` anew, relative to what is left of it, where that is little (:func:`renewing`).
    """
    joint = p if isinstance(p, JointDistribution) else JointDistribution.of(p)
    weights = dict(enumerate(q.tolist())) if isinstance(q, Tensor) else q or {}
    known = [place for place, weight in weights.items() if weight > 0.0]
    where = {place: at for at, place in enumerate(known)}
    proposal = np.array([weights[place] for place in known], dtype=np.float64)

    def parted(whole: JointDistribution) -> tuple[NDArray[np.float64], JointDistribution]:
        """What the known places have, and the others."""
        return np.array([whole[place] for place in known], dtype=np.float64), whole.without(known)

    inside, outside = parted(joint)
    drafts, drawn = iter(proposed), list[int]()
    while True:
        total = float(inside.sum()) + outside.total
        if total < _LITTLE and renewed is not None:
            inside, outside = parted(renewed(drawn))
            total = float(inside.sum()) + outside.total
        if total <= 0.0:
            return
        rest, beyond = inside / total, outside.total / total
        taken: int | None = None
        for place in drafts:
            at = where[place]
            law = proposal / proposal.sum()
            proposal[at] = 0.0
            if chance.bernoulli(float(rest[at] / law[at])):
                taken = at
                break
            residual = (rest - law).clip(min=0.0)
            if (mass := float(residual.sum()) + beyond) > 0.0:  # else p equals q up to rounding: nothing is rejected
                rest, beyond = residual / mass, beyond / mass
        if taken is None:
            taken = chance.categorical(torch.tensor([*rest.tolist(), beyond], dtype=torch.float64)) if known else 0
        if taken < len(known):
            inside[taken] = 0.0
            drawn.append(known[taken])
        else:
            drawn.append(outside.draw(chance))
            outside = outside.without(drawn[-1:])
        yield drawn[-1]
