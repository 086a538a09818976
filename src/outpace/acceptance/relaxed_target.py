"""Rules that verify exactly against another distribution ``h`` near the target's ``p``: the committed token follows h.

``h`` is a function of p and of what the drafter may propose at the node: its deterministic tokens and the row that it
samples from. It is never one of the token that was sampled, nor of what follows from that one, such as how many draws
a drafter makes after it. Only then is the committed token distributed as h, and
does a bound on h hold for the output. (Papers that relax the target for each drawn token in turn bound each of these
distributions, but not the distribution of the token that results: see ``tests/acceptance/test_lossy_rules.py``.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.acceptance.lossy import NodeByNode, S
from outpace.acceptance.rejection import RecursiveRejection
from outpace.core.chance import Chance
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import DETERMINISTIC, Draw, TokenTree
from outpace.targets.base import TreeScores

if TYPE_CHECKING:
    from torch import Tensor

MOST = 256
"""Tokens of a sampled row that are relaxed one by one, the most probable ones; all others are relaxed as one."""
EXACTLY = RecursiveRejection()


@dataclass(frozen=True)
class Proposed:
    """What may be drafted after a node: ``tokens`` for certain, and ``draws`` draws of the row ``q``, (V,), if any.

    Of draws without replacement one counts, as drafters make the more of them the less likely the first one was.
    """

    tokens: tuple[int, ...]
    q: Tensor | None
    draws: int

    @classmethod
    def of(cls, tree: TokenTree, draws: Seq[Draw], p: TokenDistribution) -> Proposed:
        """The draws after one node; of several rows that were sampled from, the first."""
        tokens = tuple(dict.fromkeys(draw.token for draw in draws if draw.q_row == DETERMINISTIC))
        sampled = [draw.q_row for draw in draws if draw.q_row != DETERMINISTIC]
        q = tree.q_rows[sampled[0]].distribution(p).dense().to(p.dense().device) if sampled else None
        return cls(tokens, q, len(sampled) if tree.replacement else min(1, len(sampled)))


class RelaxedTarget(NodeByNode[S]):
    """Recursive rejection against :meth:`relaxed` instead of the target's distribution."""

    keeps_greedy = True

    def choose(self, scores: TreeScores, node: int, draws: Seq[Draw], chance: Chance) -> Draw | int:
        p = scores.distribution.at(node)
        if not self.exact:
            weights = self.relaxed(p.dense(), Proposed.of(scores.tree, draws, p))
            if weights is not None:
                p = p.of_weights(weights)
        return EXACTLY.choose(scores.tree, draws, p, chance)

    @abstractmethod
    def relaxed(self, p: Tensor, proposed: Proposed) -> Tensor | None:
        """The distribution of the committed token, (V,), 0 where ``p`` is; None: p itself."""
