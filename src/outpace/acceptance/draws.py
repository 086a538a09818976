"""What every sampling rule asks of a tree: the draws after a node, and the distribution of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.core.token_distribution import DenseDistribution, TokenDistribution
from outpace.core.tree import DETERMINISTIC, ROOT, Draw, TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.targets.base import TreeScores


def draws_by_parent(tree: TokenTree) -> dict[int, list[Draw]]:
    """The tree's draws by the node they were made after, in order; missing nodes have none."""
    found: dict[int, list[Draw]] = defaultdict(list)
    for draw in tree.draws:
        found[draw.parent].append(draw)
    return found


def open_ahead(scores: TreeScores, draws_at: Mapping[int, Seq[Draw]]) -> None:
    """Open together the distributions that a walk from the root through first draws reads before it turns back: of
    nodes that draws were made after.

    Off the CPU, all: one pass over all rows takes no longer there than one over a row.
    """
    nodes = [ROOT]
    if scores.device.type != "cpu":
        nodes += range(len(scores.tree))
    else:
        while (draws := draws_at.get(nodes[-1])) and draws[0].node in draws_at:
            nodes.append(draws[0].node)
    scores.distribution.ensure(nodes)


def drawn_from(tree: TokenTree, earlier: Seq[Draw], draw: Draw, like: TokenDistribution) -> TokenDistribution | None:
    """The distribution that ``draw`` came from given its ``earlier`` siblings, to compare with ``like``; None for a
    one-hot.

    With replacement that is its q row. Without, it is its q row with the tokens of earlier siblings that were drawn
    from the same row taken out, renormalised: the distribution of the next draw in sequential (or Gumbel-top-k)
    sampling.
    """
    if draw.q_row == DETERMINISTIC:
        return None
    q = tree.q_rows[draw.q_row].distribution(like)
    gone = [] if tree.replacement else [one.token for one in earlier if one.q_row == draw.q_row]
    return q.residual(None, gone)[0] if gone else q


def proposal_distribution(tree: TokenTree, earlier: Seq[Draw], draw: Draw, like: Tensor) -> Tensor | None:
    """:func:`drawn_from` as a tensor, (V,), beside the tensor ``like``."""
    q = drawn_from(tree, earlier, draw, DenseDistribution(like))
    return None if q is None else q.dense().to(like.device)


def acceptance_probability(p: Tensor, q: Tensor | None, token: int, prefix: float = 1.0) -> float:
    """:meth:`TokenDistribution.acceptance` for tensors (V,)."""
    return DenseDistribution(p).acceptance(None if q is None else DenseDistribution(q), token, prefix)


def left_by(
    p: TokenDistribution, q: TokenDistribution | None, token: int, prefix: float = 1.0
) -> tuple[TokenDistribution, float]:
    """max(0, prefix * p - q) normalised, and its sum before: what a rejected draw of ``token`` leaves of the target.

    ``q`` None is a one-hot at the token. Where the sum is 0, p itself: then p equals q up to rounding, and a rejection
    had probability zero.
    """
    return p.residual(q, (token,) if q is None else (), prefix)


def residual_distribution(p: Tensor, q: Tensor | None, token: int, prefix: float = 1.0) -> tuple[Tensor, float]:
    """max(0, prefix * p - q), (V,), and its sum: what a rejected draw leaves of the target distribution."""
    import torch

    if q is None:
        rest = prefix * p if prefix != 1.0 else p.clone()
        rest[token] = 0.0
    else:
        rest = torch.sub(prefix * p if prefix != 1.0 else p, q).clamp_(min=0.0)
    return rest, float(rest.sum(dtype=torch.float64))
