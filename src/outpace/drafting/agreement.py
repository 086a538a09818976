"""How likely draft tokens of two drafters for one position are accepted: one that copies, one that reads the context.

Each drafter states its probabilities as if it drafted alone. United they say more: a copied token that the other
drafter does not have among its own is rarely right, one that it has nearly always, and where a long match is copied the
other's different tokens are rarely right. A mixture describes all three: the next token is the copied one with weight
w, and follows the other drafter's distribution with weight 1 - w, where w is the square of what the copy states. The
square was read off ``benchmarks/agreement.py``.
"""

from __future__ import annotations

from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.merged import cut


def mixed(copied: TokenTree, other: TokenTree, budget: Budget) -> TokenTree:
    """Two deterministic trees as one, with the path acceptance probabilities of the mixture: what of it the budget
    wants, the likeliest first. Where only one of the trees drafts after a node, its probabilities stand.
    """
    # Nodes of ``copied`` come first, each where it was.
    tokens, parents, depths = list(copied.tokens), list(copied.parents), list(copied.depths)
    in_other: dict[int, int] = {ROOT: ROOT}
    """Which node of ``other`` a node of the whole is."""
    where: dict[int, int] = {ROOT: ROOT}
    """The other way round."""
    for node, (parent, token) in enumerate(zip(other.parents, other.tokens, strict=True)):
        above = where[parent]
        found = copied.child(above, token) if above < len(copied.tokens) else None
        if found is None:
            found = len(tokens)
            tokens.append(token)
            parents.append(above)
            depths.append(other.depths[node])
        where[node], in_other[found] = found, node
    probs = list[float]()
    after = dict[int, tuple[dict[int, float], dict[int, float]]]()
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent >= len(copied.tokens):
            prob = _alone(other, in_other[node], in_other[parent])
        elif parent not in in_other:
            prob = _alone(copied, node, parent)
        else:
            if parent not in after:
                after[parent] = following(copied, parent), following(other, in_other[parent])
            prob = _mixed(token, *after[parent])
        probs.append(prob if parent == ROOT else prob * probs[parent])
    return cut(TokenTree(tokens, parents, depths, probs), budget)  # which records the draws of what is left


def _alone(tree: TokenTree, node: int, parent: int) -> float:
    """How likely a draft token is accepted if the one before it, which is not the root, was."""
    before = tree.path_acceptance_probs[parent]
    return min(1.0, tree.path_acceptance_probs[node] / before) if before > 0.0 else 0.0


def _mixed(token: int, copies: dict[int, float], own: dict[int, float]) -> float:
    """The probability of a token, given that the path before it is accepted."""
    if not own:
        return copies[token]
    if not copies:
        return own[token]
    stated = min(1.0, sum(copies.values()))
    return (1.0 - stated * stated) * own.get(token, 0.0) + stated * copies.get(token, 0.0)


def following(tree: TokenTree, node: int) -> dict[int, float]:
    """What a tree drafts after one of its nodes, and how likely that is accepted if the node was."""
    before = 1.0 if node == ROOT else tree.path_acceptance_probs[node]
    if before <= 0.0:
        return {tree.tokens[child]: 0.0 for child in tree.children(node)}
    return {tree.tokens[child]: min(1.0, tree.path_acceptance_probs[child] / before) for child in tree.children(node)}
