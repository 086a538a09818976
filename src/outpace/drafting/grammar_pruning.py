"""Draft tokens that a request's grammar does not allow are not scored, where leaving them out changes nothing.

They are accepted with probability 0. A deterministic draft goes without them. A sampled draw stays, whatever its token:
its rejection is a part of what the rule computes, and dropping it would bias what comes instead.
"""

from __future__ import annotations

from typing import TypeVar

from outpace.core.constraint import GrammarState
from outpace.core.errors import BadInput
from outpace.core.sampling import Sampler
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.targets.base import Sequence

S = TypeVar("S")


def without_forbidden(drafter: Drafter[S], state: S, sequence: Sequence, tree: TokenTree) -> TokenTree:
    """The tree that a drafter has proposed, without what the grammar forbids; the same tree where nothing may be, or
    need be, left out."""
    sampler = sequence.sampler
    if sampler.grammar is None or not len(tree) or not drafter.may_be_cut(tree, greedy=sequence.params.greedy):
        return tree
    places: dict[int, GrammarState] = {ROOT: sampler.place}
    for node, parent in enumerate(tree.parents):  # parents come before children
        if parent in places:
            place = sampler.moved(places[parent], tree.tokens[node])
            if _possible(sampler, places[parent], tree.tokens[node], place):
                places[node] = place
    if len(places) == len(tree) + 1 or drafter.reusable_forward([state]) is not None:
        return tree
    return tree.only(node for node in range(len(tree)) if node in places)


def _possible(sampler: Sampler, before: GrammarState, token: int, after: GrammarState) -> bool:
    """Whether ``token`` may be accepted after a state; behind a stop token nothing is."""
    if before is None or sampler.grammar is None:
        return False
    return sampler.grammar.complete(before) if token in sampler.stop_ids else not isinstance(after, BadInput)
