"""Particles: a sequential Monte Carlo population, with importance weights in place of rejection.

Every particle is drafted a chain of tokens from a distribution q, and the target scores all chains in one forward. A
particle's weight is multiplied by p / q of each of its tokens; when the effective sample size falls below a share of
their number, the particles are resampled in proportion to their weights, which all become the mean. Each that goes on
then gets a token of the target's own. Nothing is rejected, and all chains have one length.

After a run of N particles, (1/N) * sum of weight * f(tokens) is an unbiased estimate of the mean of f under the target,
whatever q, resampling and N are, as long as q is above 0 wherever p is (Del Moral 2004; for language models Lew et al.
2023, arXiv 2306.03081). The answer is one particle, drawn in proportion to the weights: its distribution is the
target's in the limit of many particles, and nearer to the draft model's the fewer there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT
from outpace.engine.populations.base import Forest, GroupRule, GroupVerdict, Heir, Hypothesis, Member
from outpace.engine.populations.ends import Ends
from outpace.engine.populations.resampling import Resampling, effective_sample_size
from outpace.targets.base import TreeScores


@dataclass(frozen=True, slots=True)
class Grown:
    """A particle after its draft: that of member ``ancestor``, and how far its chain goes."""

    ancestor: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    log_weight: float


@dataclass(slots=True)
class ParticleState:
    """What is kept of a population: when its particles end, and those that have."""

    ends: Ends
    ended: list[Hypothesis] = field(default_factory=list)


class ParticleRule(GroupRule):
    """``threshold``: resample when the effective sample size is below this share of the particles (1: in every round in
    which weights differ; 0: never)."""

    def __init__(self, particles: int, resampling: Resampling, threshold: float) -> None:
        self.first_members = particles
        self.resampling, self.threshold = resampling, threshold

    def check(self, params: SamplingParams, limit: int) -> None:
        if params.greedy:
            raise BadInput("particles are samples, and temperature 0 has one answer; give a temperature above 0")

    def begin(self, ends: Ends) -> ParticleState:
        return ParticleState(ends)

    def judge(
        self, state: ParticleState, members: Seq[Member], forest: Forest, scores: Seq[TreeScores], chance: Chance
    ) -> GroupVerdict:
        depth = max(len(one.tree) for one in scores)
        particles: list[Grown | Hypothesis] = list(state.ended)
        particles += [self._weighted(state.ends, at, one, scores[at]) for at, one in enumerate(members)]
        particles = self._resampled(particles, chance)
        heirs: list[Heir] = []
        state.ended = []
        for one in particles:
            after = one if isinstance(one, Hypothesis) else self._extended(state.ends, one, scores, chance)
            if isinstance(after, Hypothesis):
                state.ended.append(after)
            else:
                heirs.append(after)
        ended = None if heirs else self._answer(state.ended, chance)
        return GroupVerdict(tuple(heirs), depth, depth + 1, ended)

    @staticmethod
    def _weighted(ends: Ends, at: int, member: Member, scores: TreeScores) -> Grown | Hypothesis:
        """A particle with its chain's p / q in its weight, up to where the chain ends it."""
        tree, weight, tokens, path = scores.tree, member.log_weight, member.new_tokens, list[int]()
        scores.distribution.ensure([ROOT, *range(len(tree))])
        for draw in tree.draws:
            p, q = scores.distribution.at(draw.parent)[draw.token], tree.q_rows[draw.q_row].prob(draw.token)
            if (failure := scores.failure(draw.parent)) is not None:
                raise failure
            weight += (math.log(p) if p > 0.0 else -math.inf) - math.log(q)
            tokens = (*tokens, draw.token)
            if (reason := ends.reason(tokens)) is not None:
                return Hypothesis(tokens, weight, 0.0, reason)
            path.append(draw.node)
        return Grown(at, tuple(path), tokens, weight)

    def _resampled(self, particles: Seq[Grown | Hypothesis], chance: Chance) -> list[Grown | Hypothesis]:
        logs = [one.log_weight for one in particles]
        weights, top = _relative(logs)
        if effective_sample_size(weights) >= self.threshold * len(weights):
            return list(particles)
        mean = top + math.log(sum(weights) / len(weights))
        return [replace(particles[at], log_weight=mean) for at in self.resampling(weights, chance)]

    @staticmethod
    def _extended(ends: Ends, one: Grown, scores: Seq[TreeScores], chance: Chance) -> Heir | Hypothesis:
        """A particle with a token of the target's own, whose weight is 1."""
        mine, last = scores[one.ancestor], one.path[-1] if one.path else ROOT
        token = chance.categorical(mine.distribution.at(last))
        if (failure := mine.failure(last)) is not None:
            raise failure
        tokens = (*one.tokens, token)
        if (reason := ends.reason(tokens)) is not None:
            return Hypothesis(tokens, one.log_weight, 0.0, reason)
        return Heir(one.ancestor, one.path, token, one.log_weight)

    @staticmethod
    def _answer(ended: Seq[Hypothesis], chance: Chance) -> tuple[Hypothesis, ...]:
        """All particles with their shares of the weights, one that is drawn by these first."""
        import torch

        weights, _ = _relative([one.log_weight for one in ended])
        total = sum(weights)
        found = [replace(one, score=weight / total) for one, weight in zip(ended, weights, strict=True)]
        first = chance.categorical(torch.tensor(weights, dtype=torch.float64))
        return (found[first], *found[:first], *found[first + 1 :])


def _relative(logs: Seq[float]) -> tuple[list[float], float]:
    """Weights divided by the largest, and the logarithm of that. Raises BadInput where all are 0."""
    top = max(logs)
    if not math.isfinite(top):
        raise BadInput(
            f"the weights of all {len(logs)} particles are 0: the target gives none of the drafted tokens a "
            "probability; take more particles, fewer draft tokens, or leave out top_k, top_p and min_p"
        )
    return [math.exp(one - top) for one in logs], top
