"""The likelihood of an answer under the target, in a few forwards over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outpace.certify.near_ties import near_tie_gap, prefilled
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Target

_ROWS = 64  # tokens scored at once: at 50,000 tokens of vocabulary, 13 MB of logits


@dataclass(frozen=True, slots=True)
class Likelihood:
    """An answer under the target, summed over its ``tokens`` (the end-of-sequence token is not one of them).

    ``nll``: negative log-likelihood in nats, of the target's logits after penalties, bias and processors, at the
    request's temperature, at 1 for temperature 0; top-k, top-p and min-p are left out, because a token outside them
    would have none. ``not_first``: tokens that are not the target's first choice after the same tokens; ``near_ties``:
    further ones that are not either, but so near to it that rounding may decide, where rows round differently when they
    are scored together.
    """

    tokens: int
    nll: float
    not_first: int
    near_ties: int


def likelihood(
    target: Target, context: Sequence[int], answer: Sequence[int], params: SamplingParams, begun: Any = None
) -> Likelihood:
    """The likelihood of ``answer`` after ``context``, both token ids. ``begun``: K/V of the context, if there is."""
    total, not_first, near_ties = 0.0, 0, 0
    tolerance = 0.0 if target.batch_invariant else near_tie_gap(target.dtype)
    with prefilled(target, context, (), params, begun) as sequence:
        for begin in range(0, len(answer), _ROWS):
            part = answer[begin : begin + _ROWS]
            tree = TokenTree.chain(part[:-1])
            scores = target.score([(sequence, tree)])
            logits = scores[0].distribution.processed([ROOT, *range(len(tree))])
            chosen = torch.tensor(part, device=logits.device)
            log_probs = (logits / (params.temperature or 1.0)).double().log_softmax(-1)
            total -= float(log_probs.gather(1, chosen[:, None]).sum())
            below = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
            not_first += (beyond := int((below > tolerance).sum()))
            near_ties += int((below > 0).sum()) - beyond
            target.commit(scores, [list(range(len(tree)))])
            sequence.tokens.extend(part)
            sequence.sampler.extend(part)
    return Likelihood(len(answer), total, not_first, near_ties)
