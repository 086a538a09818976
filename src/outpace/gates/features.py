"""What gates read: of a draft model's row (``sprinter``), of the target's states and row (``pad``)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outpace.acceptance.bounds import view
from outpace.targets.base import Target, TreeScores

_BEST = 8
_LEAST = 1e-8
"""Probabilities are at least this where their logarithm is taken."""
_DEEPEST = 16
ROW_FEATURES = _BEST + 8
"""Features of a draft model's row."""
_OF_P = 5
"""Features of the target's row beside the states."""


def row_features(probs: Tensor, token: int, depth: int, *, greedy: bool) -> Tensor:
    """Of ``token``, drafted at ``depth`` (1 = first) from a draft model's distribution ``probs`` (V,): (ROW_FEATURES,).

    At temperature 0 ``probs`` are those of temperature 1. The log-probabilities of the likeliest tokens and of the
    token itself, its rank, how sure the model was, and how far the draft has come since the target was last asked.
    """
    probs = probs.float()
    own = float(probs[token])
    best = probs.topk(min(_BEST, len(probs))).values.tolist()
    best += [0.0] * (_BEST - len(best))
    found = [
        *(_log(one) for one in best),
        _log(own),
        float(own >= best[0]),
        math.log1p(int((probs > probs[token]).sum())),
        best[0] - best[1],
        float(torch.special.entr(probs).sum()),
        1.0 - math.fsum(best),
        min(depth, _DEEPEST) / _DEEPEST,
        float(greedy),
    ]
    return torch.tensor(found)


def state_features_of(target: Target) -> int:
    """How many features :func:`state_features` has."""
    return 2 * target.hidden_size + _OF_P


def state_features(scores: TreeScores, node: int, child: int, layer: int) -> Tensor:
    """Of a draft token that the target would reject after ``node``, held by ``child``: (2 * hidden + 5,).

    The target's last hidden states before and behind the token, each divided by its root mean square; and from the
    target's distribution the log-probabilities of the token and of the likeliest, its rank, entropy and margin.
    """
    states = scores.hidden_states[layer]
    pair = states[[node + 1, child + 1]].float().cpu()
    pair = pair / pair.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    probs = view(scores, node).probs.float().cpu()
    own = probs[scores.tree.tokens[child]]
    best = probs.topk(min(2, len(probs))).values.tolist()
    of_p = [
        _log(float(own)),
        _log(best[0]),
        math.log1p(int((probs > own).sum())),
        best[0] - (best[1] if len(best) > 1 else 0.0),
        float(torch.special.entr(probs).sum()),
    ]
    return torch.cat([pair.flatten(), torch.tensor(of_p)])


def _log(value: float) -> float:
    return math.log(max(_LEAST, value))
