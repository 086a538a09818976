"""Couplings: redraw a token from a new distribution so that it stays the same as often as possible.

Given x ~ q, :func:`maximal_redraw` returns y ~ p with P(y = x) = sum_x min(p, q), the largest possible;
:func:`gumbel_redraw` returns y ~ p by the Gumbel-max trick with the noise that x came from (Daliri et al. 2024, arXiv
2408.07978), with P(y = x) >= (1 - TV) / (1 + TV).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.acceptance.draws import acceptance_probability, residual_distribution
from outpace.core.chance import Chance

if TYPE_CHECKING:
    from torch import Tensor


def maximal_redraw(p: Tensor, q: Tensor, token: int, chance: Chance) -> int:
    """y ~ ``p``, maximally coupled with ``token`` ~ ``q``; both (V,)."""
    if chance.bernoulli(acceptance_probability(p, q, token)):
        return token
    rest, total = residual_distribution(p, q, token)
    return chance.categorical(rest if total > 0.0 else p)


def gumbel_redraw(p: Tensor, q: Tensor, token: int, chance: Chance) -> int:
    """y = argmax(log ``p`` + G), G being Gumbel noise under which ``token`` = argmax(log ``q`` + G)."""
    return int((p.double().log() + _noise_behind(q, token, chance)).argmax())


def _noise_behind(q: Tensor, token: int, chance: Chance) -> Tensor:
    """Gumbel noise given that ``token`` won under ``q``: the others' perturbed log-probabilities are truncated below
    its own (Maddison et al. 2014, arXiv 1411.0030); tokens without probability are free."""
    import torch

    fresh = chance.gumbel(len(q)).to(q.device)
    log_q = q.double().log()
    best = float(fresh[token])  # max of log q + G is a standard Gumbel, whatever won
    perturbed = log_q + fresh
    truncated = -torch.logaddexp(-perturbed, torch.full_like(perturbed, -best))
    noise = torch.where(q > 0, truncated - log_q, fresh)
    noise[token] = best - float(log_q[token])
    return noise
