"""Rules that accept some draft tokens outright, and judge all others exactly."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence as Seq

from outpace.acceptance.bounds import NodeView, view
from outpace.acceptance.draws import drawn_from, left_by
from outpace.acceptance.lossy import NodeByNode, S
from outpace.core.chance import Chance
from outpace.core.tree import Draw
from outpace.targets.base import TreeScores

Stands = Callable[[Draw], bool]
"""Whether a draft token is accepted outright."""


class Outright(NodeByNode[S]):
    """Accepts the draws that :meth:`standing` names. Others are judged by recursive rejection, at temperature 0 by the
    greedy walk."""

    @abstractmethod
    def standing(self, scores: TreeScores, node: int) -> Stands:
        """Which draws after ``node`` are accepted outright: never one of a token that the request's sampling parameters
        exclude. Not asked where the settings mean lossless."""

    def choose(self, scores: TreeScores, node: int, draws: Seq[Draw], chance: Chance) -> Draw | int:
        greedy = scores.sequence.params.greedy
        token = scores.argmax(node) if greedy else -1
        if greedy:
            best = next((draw for draw in draws if draw.token == token), None)
            if best is not None or self.exact or scores.distribution.failure(node) is not None:
                return token if best is None else best
        stands: Stands = (lambda _: False) if self.exact else self.standing(scores, node)
        if greedy:
            return next((draw for draw in draws if stands(draw)), token)
        p = scores.distribution.at(node)
        for index, draw in enumerate(draws):
            if stands(draw):
                return draw
            q = drawn_from(scores.tree, draws[:index], draw, p)
            if chance.bernoulli(p.acceptance(q, draw.token)):
                return draw
            p, _ = left_by(p, q, draw.token)
        return chance.categorical(p)


class Forgiving(Outright[S]):
    """Accepts what :meth:`accepted` names, so that only tokens of that set become more probable than they are under
    p."""

    @abstractmethod
    def accepted(self, node: NodeView) -> Callable[[int], bool]:
        """Which tokens are accepted after a node."""

    @abstractmethod
    def least(self, node: NodeView) -> float:
        """A probability that no accepted token is below."""

    def limit(self, node: NodeView) -> float:
        return 0.0 if self.exact else 1.0 - self.least(node)

    def greedy_limit(self, node: NodeView) -> float:
        if self.exact:
            return 0.0
        least = self.least(node)
        return math.log(node.highest / least) if least > 0.0 else math.inf

    def standing(self, scores: TreeScores, node: int) -> Stands:
        seen = view(scores, node)
        accepted = self.accepted(seen)
        return lambda draw: float(seen.probs[draw.token]) > 0.0 and accepted(draw.token)
