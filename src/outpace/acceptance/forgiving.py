"""Rules that accept the draft tokens of a set outright, and judge all others exactly."""

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


class Forgiving(NodeByNode[S]):
    """Accepts what :meth:`accepted` names. Other draws are judged by recursive rejection, at temperature 0 by the
    greedy walk, so that only tokens of the set become more probable than they are under p."""

    @abstractmethod
    def accepted(self, node: NodeView) -> Callable[[int], bool]:
        """Which tokens are accepted after a node."""

    @abstractmethod
    def least(self, node: NodeView) -> float:
        """A probability that no accepted token is below."""

    def limit(self, node: NodeView) -> float:
        return 0.0 if self.exact else 1.0 - self.least(node)

    def greedy_limit(self, node: NodeView) -> float:
        return 0.0 if self.exact else math.log(node.highest / self.least(node))

    def choose(self, scores: TreeScores, node: int, draws: Seq[Draw], chance: Chance) -> Draw | int:
        greedy = scores.sequence.params.greedy
        token = scores.argmax(node) if greedy else -1
        if greedy:
            best = next((draw for draw in draws if draw.token == token), None)
            if best is not None or self.exact or scores.distribution.failure(node) is not None:
                return token if best is None else best
        forgiven = self._forgiven(scores, node)
        if greedy:
            return next((draw for draw in draws if forgiven(draw.token)), token)
        p = scores.distribution.at(node)
        for index, draw in enumerate(draws):
            if forgiven(draw.token):
                return draw
            q = drawn_from(scores.tree, draws[:index], draw, p)
            if chance.bernoulli(p.acceptance(q, draw.token)):
                return draw
            p, _ = left_by(p, q, draw.token)
        return chance.categorical(p)

    def _forgiven(self, scores: TreeScores, node: int) -> Callable[[int], bool]:
        """:meth:`accepted`, without tokens that the request's sampling parameters exclude."""
        if self.exact:
            return lambda _: False
        seen = view(scores, node)
        accepted = self.accepted(seen)
        return lambda token: float(seen.probs[token]) > 0.0 and accepted(token)
