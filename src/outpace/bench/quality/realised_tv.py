"""How far the distribution that a rule commits a token from lies from the target's, in total variation.

A round of the answer is scored again, and the rule decides on it with every outcome of its random choices, weighted,
instead of one. What it draws from a distribution is not drawn: the distribution itself is the outcome. So the
distribution of the next committed token after a node is known exactly, given that the walk has reached the node. A
draft token that was sampled is replaced by each token that its q could have given, likeliest first. For the rules of
this package :mod:`outpace.bench.quality.closed_forms` gives the same in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.bench.quality.closed_forms import closed_form
from outpace.certify.near_ties import prefilled
from outpace.core.chance import Chance, ChanceSource, Enumeration
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import DETERMINISTIC, ROOT, Draw, TokenTree
from outpace.engine.request import RoundTrace
from outpace.targets.base import Target, TreeScores

COVERED = 0.99
"""Share of a sampled draft token's q that is replaced token by token; what is left could change the result by less."""
MOST_TOKENS = 512
"""Tokens that one draw is replaced by at most; a node where they do not cover q is left out."""


@dataclass(frozen=True, slots=True)
class Variation:
    """Sum of the total variation over the ``nodes`` that were measured; ``lost``: those where it cannot be had."""

    total: float = 0.0
    nodes: int = 0
    lost: int = 0


def variation(
    target: Target,
    context: Sequence[int],
    rounds: Sequence[RoundTrace],
    rule: AcceptanceRule,
    params: SamplingParams,
    places: Collection[tuple[int, int]],
    begun: Any = None,
) -> Variation:
    """The variation at ``places`` of an answer's rounds (:class:`~outpace.bench.quality.measured_nodes.MeasuredNodes`).
    ``context``: the prompt's tokens; ``params``: the request's; ``begun``: K/V of the context, if there is."""
    total, nodes, lost = 0.0, 0, 0
    with prefilled(target, context, (), params, begun) as sequence:
        for at, one in enumerate(rounds):
            depths = [depth for depth in range(len(one.committed)) if (at, depth) in places]
            if depths:
                scores = target.score([(sequence, one.tree)])[0]
                for depth in depths:
                    node = one.path[depth - 1] if depth else ROOT
                    found = _at_node(scores, node, rule)
                    if found is None:
                        lost += 1
                    else:
                        total, nodes = total + found, nodes + 1
            if not any(place > at for place, _ in places):
                break
            sequence.tokens.extend(one.committed)
            sequence.sampler.extend(one.committed)
            target.prefill([sequence])
    return Variation(total, nodes, lost)


def _at_node(scores: TreeScores, node: int, rule: AcceptanceRule) -> float | None:
    """The total variation after ``node``; None where it cannot be had."""
    tree = scores.tree
    sampled = [draw for draw in tree.draws_at(node) if draw.q_row != DETERMINISTIC]
    p = scores.p(node).double()
    if rule.by_node == "chains" and not tree.is_chain:
        return None
    found = closed_form(rule, scores, node)
    if found is not None:
        pass
    elif not sampled:
        found = _committed(scores, node, tree.draws_at(node), rule)
    elif len(tree.draws_at(node)) == 1:
        found = _over_q(scores, node, sampled[0], rule)
    else:
        return None
    return None if found is None else float((found.to(p.device) - p).abs().sum()) / 2


def _over_q(scores: TreeScores, node: int, draw: Draw, rule: AcceptanceRule) -> Tensor | None:
    """The committed token's distribution, over all tokens that the draw could have been."""
    q = scores.tree.q_rows[draw.q_row].dense(len(scores.p(node))).double()
    weights, tokens = q.topk(min(MOST_TOKENS, len(q)))
    count = int((weights.cumsum(0) < COVERED).sum()) + 1
    if count > len(tokens):
        return None
    total = torch.zeros_like(q)
    for weight, token in zip(weights[:count].tolist(), tokens[:count].tolist(), strict=True):
        found = _committed(scores, node, [draw._replace(token=token)], rule)
        if found is None:
            return None
        total += weight * found.to(total.device)
    return total / float(weights[:count].sum())


def _committed(scores: TreeScores, node: int, draws: Sequence[Draw], rule: AcceptanceRule) -> Tensor | None:
    """The distribution of the token committed after ``node``, given these draws and that ``node`` is reached."""
    tree, rows, reached = _cut(scores.tree, node, draws)
    hidden_states = {layer: states[rows] for layer, states in scores.hidden_states.items()}
    cut = TreeScores(scores.sequence, tree, scores.logits[rows], hidden_states)
    total, mass = torch.zeros(scores.logits.shape[-1], dtype=torch.float64), 0.0
    try:
        for (path, outcome), weight in Enumeration.outcomes(lambda source: _decide(rule, cut, len(reached), source)):
            if path[: len(reached)] != reached:
                continue
            mass += weight
            if isinstance(outcome, int):
                total[outcome] += weight
            else:
                total += weight * outcome.cpu()
    except NotImplementedError:
        return None
    return total / mass if mass > 0.0 else None


def _cut(tree: TokenTree, node: int, draws: Sequence[Draw]) -> tuple[TokenTree, list[int], list[int]]:
    """The tree that ends with ``draws`` after ``node``, the rows of scores of its nodes, and its path to ``node``.

    Along the path it has all draws, because a rule judges a draw with its siblings.
    """
    path = tree.path(node)
    found, rows, q_rows, reached = TokenTree(replacement=tree.replacement), [0], dict[int, int](), list[int]()
    for at, parent in enumerate((ROOT, *path)):
        after = reached[-1] if reached else ROOT
        for draw in tree.draws_at(parent) if parent != node else draws:
            q = None if draw.q_row == DETERMINISTIC else q_rows.get(draw.q_row, tree.q_rows[draw.q_row])
            found.add(after, draw.token, q)
            if isinstance(q, QRow):
                q_rows[draw.q_row] = len(found.q_rows) - 1
            rows += [1 + draw.node] * (1 + len(found) - len(rows))
        if parent != node:
            reached += [child for child in found.children(after) if found.tokens[child] == tree.tokens[path[at]]]
    return found, rows, reached


def _decide(
    rule: AcceptanceRule, scores: TreeScores, depth: int, source: ChanceSource
) -> tuple[list[int], int | Tensor]:
    """The accepted path, and what follows its first ``depth`` nodes: a token, or the distribution of one."""
    chance = _Undrawn(source.at(0, "accept"))
    [verdict] = rule.accept([scores], [rule.begin(scores.sequence)], [chance])
    path = list(verdict.path)
    if len(path) > depth:
        return path, scores.tree.tokens[path[depth]]
    return path, verdict.token if chance.undrawn is None else chance.undrawn


class _Undrawn:
    """Chance that keeps the distribution that a token would be drawn from. Nothing may be decided after that."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.undrawn: Tensor | None = None

    def bernoulli(self, p: float) -> bool:
        self._last()
        return self._chance.bernoulli(p)

    def bernoulli_at_most(self, most: float, p: Callable[[], float]) -> bool:
        return self.bernoulli(p())

    def categorical(self, weights: Tensor | TokenDistribution) -> int:
        self._last()
        found = (weights.dense() if isinstance(weights, TokenDistribution) else weights).double()
        self.undrawn = found / found.sum()
        return int(found.argmax())

    def _last(self) -> None:
        if self.undrawn is not None:
            raise NotImplementedError("the rule decides with a token that it has drawn")

    def ordered_sample(self, weights: Tensor | TokenDistribution, k: int) -> list[int]:
        raise NotImplementedError

    def uniform(self) -> float:
        raise NotImplementedError

    def gumbel(self, n: int) -> Tensor:
        raise NotImplementedError

    def race(self, weights: Tensor) -> int:
        raise NotImplementedError
