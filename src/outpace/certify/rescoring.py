"""Rescoring: are the distributions that rounds read those of autoregressive decoding?

A round scores the trees of many sequences in one forward, behind K/V that earlier rounds committed. A wrong attention
mask, position or K/V row changes these scores, and with them both the tokens and the distributions that the tokens are
tested against: no test of the tokens can find it. So a sample of the prefixes that rounds scored, a committed text and
the draft tokens down to a node, is scored again, each alone: a fresh sequence, prefilled, and one row.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from torch import Tensor

from outpace.certify.certificate import Rescored
from outpace.certify.near_ties import near_tie_gap, prefilled
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import warp
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Target, TreeScores

PREFIXES = 64
"""Size of the sample. What is wrong in one row of twenty is missed with probability 0.04."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What a round scored: ``output`` holds committed and draft tokens, ``found`` (V,) the distribution after them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    found: Tensor


class PrefixSample:
    """A random sample of ``size`` prefixes of all that :meth:`offer` was given, for one set of parameters.

    On a target that is batch-invariant the processed distributions must be equal, bit for bit. Elsewhere rounding may
    move logits by ``near_tie_gap``, and distributions by ``tolerance`` in total variation; there they are compared
    before top-k, top-p and min-p, at whose edge rounding may decide whether a token is in.
    """

    def __init__(self, target: Target, params: SamplingParams, size: int = PREFIXES, seed: int = 0) -> None:
        self.target, self.params, self.size = target, params, size
        self.tolerance = 0.0 if target.batch_invariant else largest_distance(near_tie_gap(target.dtype), params)
        self._compared = params if target.batch_invariant else replace(params, top_k=0, top_p=1.0, min_p=0.0)
        self._kept: list[_Prefix] = []
        self._offered = 0
        self._rng = random.Random(seed)

    def offer(self, scores: TreeScores) -> None:
        """One row of a scored tree: the root, or as often a random node (Vitter 1985, algorithm R, over all calls)."""
        node = ROOT
        if scores.nodes and self._rng.random() < 0.5:
            node = self._rng.randrange(scores.nodes)
        if scores.distribution.dead_end(node):
            return
        self._offered += 1
        place = self._rng.randrange(self._offered)
        if len(self._kept) < self.size:
            place = len(self._kept)
            self._kept.append(self._prefix(scores, node))
        elif place < self.size:
            self._kept[place] = self._prefix(scores, node)

    def _prefix(self, scores: TreeScores, node: int) -> _Prefix:
        sequence = scores.sequence
        prompt, committed = sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]
        output = (*committed, *scores.tree.path_tokens(node))
        return _Prefix(tuple(prompt), output, self._distribution(scores, node).cpu())

    def _distribution(self, scores: TreeScores, node: int) -> Tensor:
        if self._compared is self.params:
            return scores.p(node)  # what the rule read, or would have read
        return warp(scores.distribution.processed([node]), self._compared)[0]

    def rescore(self) -> Rescored:
        """Score every prefix of the sample alone and compare."""
        distances = [self._distance(prefix) for prefix in self._kept]
        worst = max(range(len(distances)), key=distances.__getitem__, default=None)
        return Rescored(
            prefixes=len(distances),
            differing=sum(distance > self.tolerance for distance in distances),
            largest_difference=0.0 if worst is None else distances[worst],
            tolerance=self.tolerance,
            prompt_tokens=None if worst is None else len(self._kept[worst].prompt),
            output_tokens=None if worst is None else len(self._kept[worst].output),
        )

    def _distance(self, prefix: _Prefix) -> float:
        with prefilled(self.target, prefix.prompt, prefix.output, self.params) as sequence:
            scores = self.target.score([(sequence, TokenTree())])[0]
            alone = self._distribution(scores, ROOT).cpu()
        distance = 0.5 * float((alone.double() - prefix.found.double()).abs().sum())
        return 1.0 if math.isnan(distance) else distance


def largest_distance(logits: float, params: SamplingParams) -> float:
    """The total variation distance that a change of every logit by at most ``logits`` can make."""
    penalty = max(params.repetition_penalty, 1.0 / params.repetition_penalty)  # which scales logits, too
    return math.tanh(logits * penalty / (2.0 * params.temperature))
