"""Where a grammar lets one token alone follow, the target's probabilities are not asked: logits are left out there.

A row's K/V is needed all the same, so the row is a part of the forward; what is saved is the LM head. A copied span of
hundreds of tokens costs what it costs to prefill it.
"""

from __future__ import annotations

from outpace.core.constraint import GrammarState, single
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.request import Generation

FEWEST = 16
"""Rows that are worth a call of its own of the LM head for the others; smaller trees are not looked at."""


def mark_certain_rows(one: Generation, tree: TokenTree) -> None:
    """Note in the tree after which rows the request's grammar allows one token alone.

    Nothing is noted where that token may be banned by something else, and where logits are asked for all the same: for
    log-probabilities, and for weights of tokens.
    """
    sampler, params = one.sequence.sampler, one.request.params
    tree.certain_rows = frozenset()
    asks = params.logit_bias or params.processors or params.logprobs or params.weighting.weighs
    if sampler.grammar is None or asks or len(tree) < FEWEST or tree.auxiliary_tokens:
        return
    places: dict[int, GrammarState] = {ROOT: sampler.place}
    for node, parent in enumerate(tree.parents):
        places[node] = sampler.moved(places[parent], tree.tokens[node])
    certain = []
    for node, place in places.items():
        allowed = sampler.allowed(place)
        if allowed is not None and not isinstance(allowed, BadInput) and single(allowed) is not None:
            certain.append(node + 1)
    if len(certain) >= FEWEST:
        tree.certain_rows = frozenset(certain)
