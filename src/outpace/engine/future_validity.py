"""Weights of the tokens that a grammar allows, by the target's own forwards: before an answer begins, or in each round.

Exact weights (:func:`weigh`) are found once, from the tree of all answers, when the prompt has been read. In a decoder
the tree grows by one forward a round, beside the other requests. They hold for
drafts as for the target, as both ask the request's sampler. Estimates (:func:`look_ahead`) are found in each round: at
every node whose distribution may be asked for, the target scores the likeliest allowed tokens, and what is allowed
behind each of them is its weight. Either way weights are a function of the answer so far and not of what was drafted,
so that rejection is exact for the weighted distribution.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, cast

from outpace.core.constraint import AnswerComplete, GrammarState, tokens_of
from outpace.core.errors import BadInput
from outpace.core.future_validity import EXACT, FVO, ONE_STEP, TokenWeights, ValidityNode, Weighed
from outpace.core.lru import Lru
from outpace.core.sampling import Sampler
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.answer_tree import AnswerTree, log_probs
from outpace.engine.request import Generation
from outpace.targets.base import Scores, Sequence, Target, TreeScores

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 8
"""Trees of answers that a decoder keeps: the samples of one prompt share theirs."""


class AnswerTrees:
    """Trees of answers of a decoder's requests: those that are ``known``, for further samples of their prompts, and the
    keys of those that are ``growing``."""

    def __init__(self) -> None:
        self.known: Lru[Hashable, tuple[ValidityNode, Weighed]] = Lru(KEPT)
        self.growing: set[Hashable] = set()


def weigh(target: Target, sequence: Sequence) -> Weighed | None:
    """Find the weights of a request whose prompt has been read, and set them; None where tokens are not weighted.

    Raises BadInput where exact weights are demanded and cannot be had.
    """
    steps = weighing(target, sequence, AnswerTrees())
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return cast("Weighed | None", ended.value)


def weighing(
    target: Target, sequence: Sequence, trees: AnswerTrees, owner: str = ""
) -> Generator[None, None, Weighed | None]:
    """The same in steps of one forward at most, so that other requests go on; a step without one waits for a tree that
    another request grows."""
    weighting = sequence.params.weighting
    if not weighting.weighs:
        return None
    if weighting.kind == ONE_STEP:
        return Weighed(ONE_STEP)
    key = _key(sequence, owner)
    while key is not None and key in trees.growing:
        yield
    found = None if key is None else trees.known.get(key)
    if found is None:
        tree = AnswerTree(target, sequence, weighting)
        trees.growing.add(key)
        try:
            met = yield from tree.grow()
        finally:  # also where the request ends before
            trees.growing.discard(key)
        if not met:
            if weighting.kind == FVO:
                return Weighed(ONE_STEP, tree.nodes)
            raise _too_many(tree)
        found = tree.root, Weighed(EXACT, tree.nodes, math.exp(tree.root.log_validity), tree.error)
        if key is not None:
            trees.known.put(key, found)
    sequence.sampler.weigh(found[0])
    return found[1]


def _key(sequence: Sequence, owner: str) -> Hashable:
    """What the tree of answers depends on, and whose it is: how long an answer takes shows whether there was a tree.
    None where that cannot be compared."""
    params = sequence.params
    if params.processors:
        return None
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    bias = tuple(sorted(params.logit_bias.items()))
    stops = sequence.sampler.stop_ids
    return (
        owner,
        tuple(sequence.tokens),
        params.constraint,
        params.weighting,
        params.temperature,
        penalties,
        bias,
        stops,
    )


def _too_many(tree: AnswerTree) -> BadInput:
    weighting = tree.weighting
    scored = f"after {tree.nodes:,} beginnings of answers"
    if tree.too_many:
        return BadInput(
            f"the future validity of this grammar's answers cannot be had exactly: they are too many for "
            f"{weighting.max_nodes:,} scored beginnings to leave out {weighting.tolerance:.2g} of their probability at "
            "most; take constraint_weighting fvo, which estimates it, or raise max_nodes or the tolerance"
        )
    if tree.error >= 1.0:
        return BadInput(
            f"the future validity of this grammar's answers cannot be had exactly: {scored} no valid answer was "
            "found; take constraint_weighting fvo, which estimates it, or a grammar with fewer answers"
        )
    return BadInput(
        f"the future validity of this grammar's answers cannot be had exactly: {scored} the distribution is known "
        f"to {tree.error:.2g} (total variation), and {weighting.tolerance:.2g} is demanded; take constraint_weighting "
        f"fvo, which estimates it, or raise max_nodes ({weighting.max_nodes:,}) or the tolerance"
    )


# ------------------------------------------------------------------------------------------------ one step ahead


class _Place(NamedTuple):
    """A node of a scored tree, its likeliest allowed tokens, and their shares of the allowed probability."""

    node: int
    tokens: list[int]
    shares: list[float]


def look_ahead(target: Target, active: Seq[Generation], scores: Scores) -> bool:
    """Set the weights at every node of the trees of those requests whose tokens are weighted by estimates.

    One more forward, of the likeliest tokens behind all nodes together. Whether there was one.
    """
    looking = [at for at, one in enumerate(active) if one.weighed is not None and one.weighed.kind == ONE_STEP]
    if not looking:
        return False
    places = {at: _places(active[at], scores[at]) for at in looking}
    batch = [
        (part.sequence, _extended(part.tree, places.get(at, ()), part.nodes)) for at, part in enumerate(scores.parts)
    ]
    further = target.score(batch, resume=scores)
    for at in looking:
        weighed = active[at].weighed
        assert weighed is not None
        weighed.nodes += len(further[at].tree) - scores[at].nodes
        _set(scores[at], further[at], places[at], weighed)
    return True


def _places(one: Generation, scores: TreeScores) -> list[_Place]:
    """Where a choice is to be made, and among which tokens."""
    weighting, sampler = one.request.params.weighting, one.sequence.sampler
    free = sampler.without_grammar()
    nodes = [ROOT, *range(scores.nodes)]
    logs = log_probs(free, scores.tree, scores.logits, nodes)
    found = []
    for node, row in zip(nodes, logs, strict=True):
        scores.distribution.weigh(node, None)
        allowed = sampler.allowed(scores.distribution.place(node))
        if allowed is None or isinstance(allowed, BadInput):
            continue
        tokens = tokens_of(allowed, sampler.vocab_size)
        if len(tokens) < 2:
            continue
        best = row[tokens].softmax(-1).topk(min(weighting.topk, len(tokens)))
        shares = best.values.tolist()
        most = next((at + 1 for at in range(len(shares)) if sum(shares[: at + 1]) >= weighting.coverage), len(shares))
        chosen = [int(tokens[at]) for at in best.indices[:most].tolist()]
        if len(chosen) > 1:
            found.append(_Place(node, chosen, shares[:most]))
    return found


def _extended(tree: TokenTree, places: Seq[_Place], nodes: int) -> TokenTree:
    """The scored tree with further tokens behind some nodes."""
    longer = TokenTree()
    for node in range(nodes):
        longer.add(tree.parents[node], tree.tokens[node])
    for place in places:
        for token in place.tokens:
            if longer.child(place.node, token) is None:
                longer.add(place.node, token)
    return longer


def _set(scores: TreeScores, further: TreeScores, places: Seq[_Place], weighed: Weighed) -> None:
    sampler = scores.distribution.sampler
    free, tree = sampler.without_grammar(), further.tree
    rows = {(one.node, token): tree.child(one.node, token) for one in places for token in one.tokens}
    behind = sorted({node for node in rows.values() if node is not None})
    logs = dict(zip(behind, log_probs(free, tree, further.logits, behind), strict=True)) if behind else {}
    revised = 0.0
    for place in places:
        before, weights = scores.distribution.place(place.node), dict[int, float]()
        for token in place.tokens:
            node = rows[place.node, token]
            assert node is not None
            weights[token] = _behind(sampler, before, token, logs[node])
        mass = sum(share * math.exp(weights[token]) for token, share in zip(place.tokens, place.shares, strict=True))
        mean = mass / sum(place.shares)
        # Where nothing can follow any of them, the others are all there is.
        scores.distribution.weigh(place.node, TokenWeights.of(weights, math.log(mean) if mean > 0.0 else 0.0))
        if place.node == ROOT and math.isfinite(mean):  # not where the logits are NaN
            revised = 1.0 - mean
    weighed.revised(revised)


def _behind(sampler: Sampler, before: GrammarState, token: int, logs: Tensor) -> float:
    """The logarithm of the probability that what follows ``token`` is allowed."""
    if token in sampler.stop_ids:
        return 0.0
    allowed = sampler.allowed(sampler.moved(before, token))
    if isinstance(allowed, AnswerComplete):
        return 0.0
    if allowed is None or isinstance(allowed, BadInput):
        return -math.inf
    return float(logs[tokens_of(allowed, sampler.vocab_size)].logsumexp(-1))
