"""AnswerTree: the answers that a grammar allows, as a token tree that the target scores, the likeliest first.

The same text has many spellings in tokens, and each is an answer of its own to the model. Beginnings of answers are
scored in the order of their probability under the model without the grammar, a forward for many at once, until those
that were left out could not change the conditional distribution by more than a tolerance. What all of them could still
add to the probability of a valid answer is known at any time: it is at most the sum of their own probabilities.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from outpace.core.constraint import AnswerComplete, DeadEnd, GrammarState, Masks, tokens_of
from outpace.core.errors import BadInput
from outpace.core.future_validity import ConstraintWeighting, ValidityNode, log_sum
from outpace.core.sampling import Sampler
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 48
"""Beginnings that are scored in one forward."""
_LARGE = 700.0
"""Whose exponential is still a number."""


@dataclass(eq=False, slots=True)
class _Prefix:
    """A beginning of an answer: its tokens, the grammar's state before the last of them (of the empty one: there), and
    its log-probability under the model."""

    path: tuple[int, ...]
    before: GrammarState
    log_prob: float
    node: ValidityNode = field(default_factory=ValidityNode)


class AnswerTree:
    """The tree of one request. ``sequence``: the prompt, of which all but the last token is in the target's K/V.

    ``root``: the empty answer, with the future validity of every beginning after :meth:`grow`. ``nodes``: beginnings
    that were scored. ``error``: a bound on the total variation distance between the conditional distribution and that
    of the answers found.
    """

    def __init__(self, target: Target, sequence: Sequence, weighting: ConstraintWeighting) -> None:
        assert sequence.params.constraint is not None
        self.target, self.sequence, self.weighting = target, sequence, weighting
        sampler = sequence.sampler
        self.masks = Masks(sequence.params.constraint, sampler.stop_ids, target.vocab_size)
        self.free = sampler.without_grammar()
        self.nodes = 0
        self.root = ValidityNode()
        self._open: list[tuple[float, int, _Prefix]] = []
        """Beginnings to score, a heap by their probability."""
        self._number = count()
        self._scored: list[_Prefix] = []
        self._found = self._left_out = -math.inf
        """Log-probabilities of the valid answers found, and of beginnings that will never be scored."""
        self._waiting = 0.0
        """That of those to score."""
        self._floor = -math.inf
        """Less probable beginnings would never be scored."""

    @property
    def error(self) -> float:
        """As described above; 1 where no valid answer was found."""
        left = log_sum((self._left_out, self._waiting))
        return 1.0 if self._found == -math.inf else math.exp(left - log_sum((left, self._found)))

    def grow(self) -> Generator[None, None, bool]:
        """Score beginnings, a forward at each step, until the tolerance is met or there is nothing more to score;
        returns whether it is met.

        Raises BadInput where one of the grammar's states cannot be computed.
        """
        self._push(_Prefix((), self.masks.begin(), 0.0, self.root))
        while self._open and self.nodes < self.weighting.max_nodes:
            self._waiting = log_sum([-one[0] for one in self._open])
            if self._exact or self.too_many:
                break
            self._score(self._next())
            self._bound()
            yield
        self._waiting = log_sum([-one[0] for one in self._open])
        for one in reversed(self._scored):  # a beginning is scored before those that continue it
            one.node.settle()
        return self._exact

    @property
    def too_many(self) -> bool:
        """Whether what will never be scored is beyond the tolerance, even if all that is to score were valid."""
        most = log_sum((self._left_out, self._found, self._waiting))
        return self.weighting.tolerance < 1.0 and math.exp(self._left_out - most) > self.weighting.tolerance

    def _bound(self) -> None:
        """Leave out beginnings that are less probable than as many as can still be scored."""
        left = self.weighting.max_nodes - self.nodes
        if len(self._open) > 2 * left + MOST_ROWS:
            self._open.sort()
            self._left_out = log_sum((self._left_out, *(-one[0] for one in self._open[left:])))
            del self._open[left:]
            self._floor = -self._open[-1][0] if self._open else math.inf

    @property
    def _exact(self) -> bool:
        return self._found > -math.inf and self.error <= self.weighting.tolerance

    def _push(self, one: _Prefix) -> None:
        heapq.heappush(self._open, (-one.log_prob, next(self._number), one))

    def _next(self) -> list[_Prefix]:
        """The likeliest beginnings, as many as one forward takes, but none that the tolerance leaves out anyway."""
        most, best = min(MOST_ROWS, self.weighting.max_nodes - self.nodes), -self._open[0][0]
        waiting = math.exp(self._waiting - best)  # all in units of the likeliest: answers may be very improbable
        enough = self.weighting.tolerance * math.exp(min(self._found - best, _LARGE))
        enough -= math.exp(min(self._left_out - best, _LARGE))
        chosen: list[_Prefix] = []
        while self._open and len(chosen) < most and (not chosen or waiting > enough):
            minus_log, _, one = heapq.heappop(self._open)
            waiting -= math.exp(-minus_log - best)
            chosen.append(one)
        return chosen

    def _score(self, chosen: Seq[_Prefix]) -> None:
        tree, rows = TokenTree(), []
        for one in chosen:
            node = ROOT
            for token in one.path:
                known = tree.child(node, token)
                node = tree.add(node, token) if known is None else known
            rows.append(node)
        scores = self.target.score([(self.sequence, tree)])[0]
        logs = log_probs(self.free, tree, scores.logits, rows)
        self.nodes += len(chosen)
        for one, row in zip(chosen, logs, strict=True):
            self._scored.append(one)
            self._expand(one, row)

    def _expand(self, one: _Prefix, row: Tensor) -> None:
        place = self.masks.advance(one.before, one.path[-1]) if one.path else one.before
        allowed = self.masks.allowed(place)
        if isinstance(allowed, AnswerComplete):
            one.node.whole = True
            self._found = log_sum((self._found, one.log_prob))
            return
        if allowed is None or isinstance(allowed, DeadEnd):
            return  # no answer goes on here
        if isinstance(allowed, BadInput):
            raise allowed
        tokens = tokens_of(allowed, self.target.vocab_size)
        best, most = row[tokens], self.weighting.max_nodes - self.nodes + len(self.masks.stop_ids)
        likely = int((best >= self._floor - one.log_prob).sum())
        if len(tokens) > min(most, likely):
            kept = best.topk(min(most, likely)).indices
            mass = float(best.exp().sum() - best[kept].exp().sum())
            if mass > 0.0:
                self._left_out = log_sum((self._left_out, one.log_prob + math.log(mass)))
            tokens, best = tokens[kept.numpy()], best[kept]
        found = {int(token): log for token, log in zip(tokens, best.tolist(), strict=True) if log > -math.inf}
        node = one.node
        node.log_probs = found
        node.ends = frozenset(found).intersection(self.masks.stop_ids)
        room = self.target.context_length - len(self.sequence.tokens) - 1
        for token, log in found.items():
            if token in node.ends:
                self._found = log_sum((self._found, one.log_prob + log))
                continue
            if len(one.path) >= room:
                self._left_out = log_sum((self._left_out, one.log_prob + log))
                continue
            child = _Prefix((*one.path, token), place, one.log_prob + log)
            node.children[token] = child.node
            self._push(child)


def log_probs(free: Sampler, tree: TokenTree, logits: Tensor, nodes: Seq[int]) -> Tensor:
    """Log-probabilities after nodes of a tree, (n, V) float64 on the CPU, under the model without a grammar, at the
    request's temperature (1 at temperature 0), before top-k, top-p and min-p."""
    rows = TreeDistribution(free, tree, logits).processed(nodes)
    return (rows.cpu().double() / (free.params.temperature or 1.0)).log_softmax(-1)
