"""The joint distribution over (beam, next token), and ordered draws from it without replacement.

A beam with score s (the log-probability of its tokens) and a next token x have the joint score s + log p(x | beam).
Beam search takes the pairs with the largest joint scores. Stochastic beam sampling at temperature T draws pairs one
after the other without replacement, each with probability proportional to exp(joint score / T); its limit for T to 0 is
beam search, and with one beam it is sampling at temperature T. Top-k, top-p and min-p, at temperature T, say which
tokens may follow a beam at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Seq

import torch
from torch import Tensor

from outpace.core.chance import Chance
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import warp
from outpace.core.tree_distribution import TreeDistribution
from outpace.targets.base import TreeScores


def log_probs(scores: TreeScores, nodes: Seq[int]) -> Tensor:
    """Log-probabilities of every token after ``nodes``: (len(nodes), V) float32.

    Bias, penalties and processors change log-probabilities, not logits, and nothing is normalised afterwards: as in
    transformers' beam search.
    """
    rows = scores.logits[[node + 1 for node in nodes]].float().log_softmax(-1)
    sampler = scores.sequence.sampler
    if not sampler.changes_logits:
        return rows
    where = {node + 1: at for at, node in enumerate(nodes)}
    return TreeDistribution(sampler, scores.tree, rows, where, lambda: scores.logits).processed(nodes)


def joint_probabilities(rows: Tensor, weights: Seq[float], params: SamplingParams) -> Tensor:
    """Probabilities of (beam, token) pairs: (n, V) float64, of log-probabilities ``rows`` (n, V) after beams with
    scores ``weights``. All 0 where nothing can follow."""
    joint = (rows.double() + torch.tensor(weights, dtype=torch.float64, device=rows.device)[:, None]).nan_to_num(
        nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf
    )
    if params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
        alive = rows.amax(-1).isfinite()
        kept = warp(rows.masked_fill(~alive[:, None], 0.0), params) > 0.0
        joint = joint.masked_fill(~kept, -torch.inf)
    best = joint.max()
    if not best.isfinite():
        return torch.zeros_like(joint)
    probs = ((joint - best) / params.temperature).exp()
    return probs / probs.sum()


def likeliest(joint: Tensor, most: int) -> Iterator[int]:
    """The ``most`` pairs with the largest joint scores (n, V), as places in the flattened rows, best first."""
    flat = joint.flatten()
    best = flat.topk(min(most, len(flat)))
    for place, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        if not value > -torch.inf:  # NaN comes first
            return
        yield place


def ordered_draws(p: Tensor, chance: Chance, proposed: Iterable[int] = (), q: Tensor | None = None) -> Iterator[int]:
    """Places of ``p`` (m,), drawn one after the other without replacement.

    ``proposed``: places that were drawn so from ``q`` (m,), in order. Each is accepted with probability min(1, p / q)
    in place of a draw, where p is what earlier rejections have left for this draw and q what earlier proposals have
    left (recursive rejection: Jeon et al. 2024, arXiv 2402.14160, algorithm 1); when none is left, what remains is
    drawn. A proposal is judged without a look at later ones, so the law of the draws is that of ``p`` alone.
    """
    left = p.clone()
    drafts = iter(proposed)
    proposal = None if q is None else q.clone()
    while (total := float(left.sum())) > 0.0:
        rest = left / total
        taken: int | None = None
        for place in drafts:
            assert proposal is not None
            law = proposal / proposal.sum()
            proposal[place] = 0.0
            if chance.bernoulli(float(rest[place] / law[place])):
                taken = place
                break
            residual = (rest - law).clamp_(min=0.0)
            if (mass := float(residual.sum())) > 0.0:  # else p equals q up to rounding, and nothing is rejected
                rest = residual / mass
        if taken is None:
            taken = chance.categorical(rest)
        left[taken] = 0.0
        yield taken
