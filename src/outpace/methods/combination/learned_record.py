"""What a learned draft has added to its round, beside what the round would have had without it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outpace.controllers.yields import Yield
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import DETERMINISTIC, ROOT, TokenTree
from outpace.drafting.merged import NO_DRAFT


@dataclass(slots=True)
class Asked:
    """A round in which the learned part was asked: the tokens there were, the free part's draft, the nodes of it that
    the round would have had without the learned part, how likely its first tokens are, whether it was asked against
    expectation, and what it has drafted."""

    at: int
    free: TokenTree
    alone: frozenset[int]
    copied: float
    trial: bool = False
    learned: TokenTree = field(default_factory=lambda: NO_DRAFT)


def learn(known: Yield, asked: Asked, committed: Seq[int], scored: TokenTree) -> None:
    """What a learned draft has added to the round, and had promised to."""
    without = min(len(committed), 1 + sum([node in asked.alone for node in asked.free.follow(committed)]))
    learned = asked.learned
    own = sum([learned.path_acceptance_probs[node] for node in _own(asked, scored)])
    promised = (1.0 - min(1.0, asked.copied)) * own
    probs = sorted(learned.path_acceptance_probs, reverse=True)
    known.learn(probs, promised, len(committed) - without, trial=asked.trial)


def learn_by_target(known: Yield, asked: Asked, scored: TokenTree, p: TokenDistribution) -> None:
    """The same of a request that samples, for the first level: how likely its tokens would have been accepted, by the
    target's distribution ``p`` after the root. Whether one was varies much more."""
    drawn = {draw.node: draw.q_row for draw in asked.learned.draws_at(ROOT) if draw.q_row != DETERMINISTIC}
    promised = added = 0.0
    for node in asked.learned.children(ROOT):
        token = asked.learned.tokens[node]
        if scored.child(ROOT, token) is None or asked.free.child(ROOT, token) in asked.alone:
            continue
        promised += asked.learned.path_acceptance_probs[node]
        q = asked.learned.q_rows[drawn[node]].prob(token) if node in drawn else 1.0
        added += min(1.0, p[token] / q) if q > 0.0 else 0.0
    probs = sorted(asked.learned.path_acceptance_probs, reverse=True)
    known.learn(probs, (1.0 - min(1.0, asked.copied)) * promised, min(1.0, added), trial=asked.trial)


def _own(asked: Asked, scored: TokenTree) -> list[int]:
    """Nodes of the learned draft that were scored, and that the round would not have had without it."""
    learned, free, alone = asked.learned, asked.free, asked.alone
    if scored is learned and not alone:
        return list(range(len(learned)))
    found = []
    places: dict[int, tuple[int, int | None]] = {ROOT: (ROOT, ROOT)}
    """Where those that were scored are in the tree that was, and in the free part's."""
    for node, (parent, token) in enumerate(zip(learned.parents, learned.tokens, strict=True)):
        at = places.get(parent)
        place = None if at is None else scored.child(at[0], token)
        if at is None or place is None:
            continue
        copy = None if at[1] is None else free.child(at[1], token)
        places[node] = place, copy
        if copy not in alone:  # nor is any node below, as paths begin with the likelier ones
            found.append(node)
    return found
