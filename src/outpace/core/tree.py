"""TokenTree: the draft tokens of one sequence in one round, and how each of them was drawn.

Nodes are unique ``(parent, token)`` pairs in topological order; the target scores nodes. Draws are the proposals as
they were made, in order; acceptance rules read draws. Two draws may point at one node (two drafters agree, or sampling
with replacement repeats a token). The parent ``ROOT`` (-1) is the last committed token, which is not a node. An empty
tree makes the round an autoregressive step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1
DETERMINISTIC = -1


class Draw(NamedTuple):
    """One proposal: ``token`` proposed after ``parent``; it is held by node ``node``.

    ``q_row`` indexes ``TokenTree.q_rows``; ``DETERMINISTIC`` (-1) where q is one-hot.
    """

    parent: int
    token: int
    node: int
    q_row: int = DETERMINISTIC


@dataclass(slots=True)
class TokenTree:
    """Nodes, draws and q rows of one sequence in one round. Build it with :meth:`add` or :meth:`chain`."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    path_acceptance_probs: list[float] = field(default_factory=list)
    """The drafter's estimate, per node, that the path to it is accepted; 1 where it has none."""
    draws: list[Draw] = field(default_factory=list)
    q_rows: list[QRow] = field(default_factory=list)
    auxiliary_tokens: list[AuxiliaryToken] = field(default_factory=list)
    replacement: bool = True
    """Whether sibling draws that share a q row were drawn with replacement. Without, the row is that of the first,
    and each later one is drawn from the row without the earlier siblings' tokens, renormalised; a sibling with a row
    of its own was drawn from that very row."""
    certain_rows: frozenset[int] = frozenset()
    """Rows (0: the root, i + 1: node i) after which one token alone can follow, whatever the logits there: a target may
    leave these out of its forward until somebody reads them."""
    vouched: frozenset[int] = frozenset()
    """Nodes that their drafter vouches for. The rule of its own method accepts them unverified; others do not ask."""
    _children: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(
        cls,
        tokens: Iterable[int],
        q_rows: Sequence[QRow | None] | None = None,
        path_acceptance_probs: Iterable[float] | None = None,
    ) -> TokenTree:
        """A chain of draft tokens: deterministic, where the drafter may have estimates, or with one q row per token."""
        if q_rows is None:  # as :meth:`add` would build it, in a third of the time
            listed = list(tokens)
            count = len(listed)
            probs = [1.0] * count if path_acceptance_probs is None else list(path_acceptance_probs)
            parents = list(range(ROOT, count - 1))
            draws = list(map(Draw, parents, listed, range(count)))
            children = {node - 1: {token: node} for node, token in enumerate(listed)}
            return cls(listed, parents, list(range(1, count + 1)), probs, draws, _children=children)
        tree = cls()
        node = ROOT
        for depth, token in enumerate(tokens):
            node = tree.add(node, token, q_rows[depth])
        return tree

    @classmethod
    def deterministic(
        cls, tokens: list[int], parents: list[int], depths: list[int], path_acceptance_probs: list[float]
    ) -> TokenTree:
        """The tree of these lists, which become its own: a deterministic draw for each node, parents before children,
        no two siblings alike."""
        children: dict[int, dict[int, int]] = {}
        for node, parent in enumerate(parents):
            siblings = children.get(parent)
            if siblings is None:
                children[parent] = {tokens[node]: node}
            else:
                siblings[tokens[node]] = node
        draws = list(map(Draw, parents, tokens, range(len(tokens))))
        return cls(tokens, parents, depths, path_acceptance_probs, draws, _children=children)

    def add(self, parent: int, token: int, q: QRow | int | None = None, path_acceptance_prob: float = 1.0) -> int:
        """Record a draw of ``token`` after node ``parent``; return its node, which may exist already.

        ``path_acceptance_prob``: how likely the path to it is accepted; of two for one node the larger stays. ``q``
        is the row it was sampled from, the index of a row that this tree holds already (siblings drawn from one
        context share it), or None for a deterministic proposal.
        """
        if not ROOT <= parent < len(self.tokens):
            raise BadInput(f"tree has no node {parent} to draft after (it has {len(self.tokens)} nodes)")
        if q is None:
            row = DETERMINISTIC
        elif isinstance(q, int):
            row = q
        else:
            row = len(self.q_rows)
            self.q_rows.append(q)
        node = self._node(parent, token, path_acceptance_prob)
        self.draws.append(Draw(parent, token, node, row))
        return node

    def _node(self, parent: int, token: int, path_acceptance_prob: float) -> int:
        siblings = self._children.setdefault(parent, {})
        node = siblings.get(token)
        if node is None:
            node = len(self.tokens)
            siblings[token] = node
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
            self.path_acceptance_probs.append(path_acceptance_prob)
        elif path_acceptance_prob > self.path_acceptance_probs[node]:
            self.path_acceptance_probs[node] = path_acceptance_prob
        return node

    def first(self, count: int) -> TokenTree:
        """The first ``count`` nodes of a deterministic tree: parents come before children, so they are a tree."""
        return self.only(range(min(count, len(self))))

    def only(self, nodes: Iterable[int]) -> TokenTree:
        """The given nodes of a deterministic tree, in the order given: each after its parent."""
        if not self.is_deterministic:
            raise ValueError("sampled draws are never dropped")
        kept, parents, where = list[int](), list[int](), {ROOT: ROOT}
        for node in nodes:
            parents.append(where[self.parents[node]])
            where[node] = len(kept)
            kept.append(node)
        tokens, depths, probs = self.tokens, self.depths, self.path_acceptance_probs
        tree = TokenTree.deterministic(
            [tokens[node] for node in kept], parents, [depths[node] for node in kept], [probs[node] for node in kept]
        )
        if self.vouched:
            tree.vouched = frozenset(where[node] for node in self.vouched if node in where)
        return tree

    def likeliest_first(self) -> tuple[list[int], list[float]]:
        """All nodes by the probability that their path is accepted, parents before children, and these probabilities.

        Where two drafters disagree a child's estimate may exceed its parent's, which bounds it.
        """
        if not self.tokens:
            return [], []
        reachable = list(self.path_acceptance_probs)
        for node, parent in enumerate(self.parents):
            if parent != ROOT and reachable[node] > reachable[parent]:
                reachable[node] = reachable[parent]
        # Sorting is stable, also in reverse: of equals the first stays first.
        order = sorted(range(len(reachable)), key=reachable.__getitem__, reverse=True)
        return order, [reachable[node] for node in order]

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that holds ``token``, or None."""
        return self._children.get(node, {}).get(token)

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that spell ``tokens`` from the root down, as far as there are any (at most one per token)."""
        nodes: list[int] = []
        for token in tokens:
            node = self.child(nodes[-1] if nodes else ROOT, token)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def children(self, node: int) -> list[int]:
        """The children of ``node`` (``ROOT`` allowed) in the order in which they appeared."""
        return list(self._children.get(node, {}).values())

    def draws_at(self, node: int) -> list[Draw]:
        """The draws made after ``node``, in order."""
        return [draw for draw in self.draws if draw.parent == node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``; empty for ``ROOT``."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        nodes.reverse()
        return nodes

    def path_tokens(self, node: int) -> list[int]:
        """The tokens along :meth:`path`."""
        return [self.tokens[i] for i in self.path(node)]

    def check_path(self, nodes: Sequence[int]) -> None:
        """Raise ValueError unless ``nodes`` lead from the root down, each the parent of the next."""
        if nodes and any(self.parents[node] != before for before, node in zip((ROOT, *nodes), nodes, strict=False)):
            raise ValueError(f"{list(nodes)} is not a path of the tree")

    def leaves(self) -> Iterator[int]:
        """Nodes without children; ``ROOT`` alone for an empty tree."""
        if not self.tokens:
            yield ROOT
        for node in range(len(self.tokens)):
            if not self._children.get(node):
                yield node

    @property
    def is_chain(self) -> bool:
        """No node has two children and no draw repeats a node."""
        return len(self.draws) == len(self.tokens) and self._is_line

    @property
    def _is_line(self) -> bool:
        return self.parents == list(range(ROOT, len(self.tokens) - 1))

    @property
    def is_deterministic(self) -> bool:
        """Every draw is a deterministic proposal."""
        return not self.q_rows or all(draw.q_row == DETERMINISTIC for draw in self.draws)

    def seen(self) -> list[list[int]]:
        """For every row (root, nodes, auxiliary tokens) the rows that it sees, in ascending order.

        A node sees the root, its ancestors and itself: ascending order is the order of the path.
        """
        paths: list[list[int]] = [[0]]
        for node, parent in enumerate(self.parents):
            paths.append([*paths[parent + 1], node + 1])
        for row, auxiliary in enumerate(self.auxiliary_tokens, start=1 + len(self.tokens)):
            paths.append(sorted({row, *(seen + 1 for seen in auxiliary.attends)}))
        return paths

    def ancestor_mask(self) -> Tensor:
        """Bool (1 + n + s, 1 + n + s): row i sees column j. Rows are the root, nodes, auxiliary tokens."""
        import torch

        rows = 1 + len(self.tokens) + len(self.auxiliary_tokens)
        if not self.auxiliary_tokens and self._is_line:
            return torch.ones(rows, rows, dtype=torch.bool).tril_()
        mask = torch.zeros(rows, rows, dtype=torch.bool)
        view = mask.numpy()
        for row, seen in enumerate(self.seen()):
            view[row, seen] = True
        return mask

    def positions(self) -> list[int]:
        """Position of every row relative to the root: 0, then depths, then those of the auxiliary tokens."""
        return [0, *self.depths, *(one.position for one in self.auxiliary_tokens)]

    def row_tokens(self, root: int) -> list[int]:
        """Token ids of every row, given the root's token."""
        return [root, *self.tokens, *(one.token for one in self.auxiliary_tokens)]

    @staticmethod
    def merge(trees: Iterable[TokenTree]) -> TokenTree:
        """Unite trees over one root: equal nodes become one, every draw is kept, in the order given.

        Auxiliary tokens come along; what they attend to is renumbered to the nodes and auxiliary tokens of the whole.
        """
        trees = list(trees)
        merged = TokenTree(replacement=all(tree.replacement for tree in trees))
        names = []
        for tree in trees:
            offset = len(merged.q_rows)
            # Siblings that share a row's index would read as drawn without replacement: each gets its own.
            apart = tree.replacement and not merged.replacement
            if not apart:
                merged.q_rows.extend(tree.q_rows)
            where = {ROOT: ROOT}
            for draw in tree.draws:
                row: QRow | int | None = None
                if draw.q_row != DETERMINISTIC:
                    row = tree.q_rows[draw.q_row] if apart else draw.q_row + offset
                where[draw.node] = merged.add(
                    where[draw.parent], draw.token, row, tree.path_acceptance_probs[draw.node]
                )
            names.append(where)
        for tree, where in zip(trees, names, strict=True):
            shift = len(merged) + len(merged.auxiliary_tokens) - len(tree)
            merged.auxiliary_tokens += [
                replace(one, attends=tuple(where[seen] if seen < len(tree) else seen + shift for seen in one.attends))
                for one in tree.auxiliary_tokens
            ]
        return merged
