"""How likely draft tokens of two drafters for one position are accepted: one that copies, one that reads the context.

Each drafter states its probabilities as if it drafted alone. United they say more: a copied token that the other
drafter does not have among its own is rarely right, one that it has nearly always, and where a long match is copied the
other's different tokens are rarely right. A mixture describes all three: the next token is the copied one with weight
w, and follows the other drafter's distribution with weight 1 - w, where w is the square of what the copy states. The
square was read off ``benchmarks/agreement.py``.
"""

from __future__ import annotations

from outpace.core.tree import ROOT, TokenTree


def mixture(union: TokenTree, copied: TokenTree, other: TokenTree) -> list[float]:
    """Path acceptance probabilities of the nodes of ``union``, which holds nodes of the two trees alone, parents first.

    Where only one of them drafts after a node, its probabilities stand.
    """
    probs = list[float]()
    at: dict[int, tuple[int | None, int | None]] = {ROOT: (ROOT, ROOT)}
    after = dict[int, tuple[dict[int, float], dict[int, float]]]()
    for node, (parent, token) in enumerate(zip(union.parents, union.tokens, strict=True)):
        in_copied, in_other = at[parent]
        if parent not in after:
            after[parent] = following(copied, in_copied), following(other, in_other)
        copies, own = after[parent]
        prob = _mixed(token, copies, own)
        probs.append(prob if parent == ROOT else prob * probs[parent])
        at[node] = (
            None if in_copied is None else copied.child(in_copied, token),
            None if in_other is None else other.child(in_other, token),
        )
    return probs


def _mixed(token: int, copies: dict[int, float], own: dict[int, float]) -> float:
    """The probability of a token, given that the path before it is accepted."""
    if not own:
        return copies[token]
    if not copies:
        return own[token]
    stated = min(1.0, sum(copies.values()))
    return (1.0 - stated * stated) * own.get(token, 0.0) + stated * copies.get(token, 0.0)


def following(tree: TokenTree, node: int | None) -> dict[int, float]:
    """What a tree drafts after one of its nodes, and how likely that is accepted if the node was."""
    if node is None:
        return {}
    before = 1.0 if node == ROOT else tree.path_acceptance_probs[node]
    if before <= 0.0:
        return {tree.tokens[child]: 0.0 for child in tree.children(node)}
    return {tree.tokens[child]: min(1.0, tree.path_acceptance_probs[child] / before) for child in tree.children(node)}
