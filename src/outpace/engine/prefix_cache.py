"""PrefixCache: K/V of texts' beginnings, so that a prompt that begins like an earlier one is not computed again.

A radix tree over blocks of tokens, as in RadixAttention (Zheng et al. 2024, arXiv 2312.07104, section 3): a node is a
block after a certain beginning, and a prompt walks down as far as its blocks are known. Blocks are copied into a
sequence and out of it. The copy is small beside the prefill that it saves, and no sequence depends on what the cache
forgets. When memory is needed the leaf leaves that was used least recently.

How fast an answer comes tells what the cache knew, so every owner has a tree of its own: nobody can learn from a
response time what others have asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Reversible, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.targets.base import Sequence, Target
from outpace.targets.states import States

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Tokens of a block."""


@dataclass(eq=False, slots=True)
class _Node:
    """One block after all blocks above. ``states``: (BLOCK, hidden) of the layers that were kept beside its K/V."""

    parent: _Node | None
    key: tuple[int, ...]
    kv: Any = None
    states: dict[int, Tensor] = field(default_factory=dict)
    bytes: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)

    def holds(self, layers: Seq[int]) -> bool:
        return all(layer in self.states for layer in layers)


@dataclass(slots=True)
class PrefixUse:
    """What a cache has been asked for, and what it had, in tokens; ``evicted``: blocks that had to leave."""

    asked: int = 0
    found: int = 0
    evicted: int = 0


class PrefixCache:
    """Blocks of one target's K/V, ``most_bytes`` at most. The target must have ``kv_blocks``."""

    def __init__(self, target: Target, most_bytes: int) -> None:
        self._target = target
        self.most_bytes = most_bytes
        self.bytes = 0
        self.use = PrefixUse()
        self._roots: dict[str, _Node] = {}
        self._recent: OrderedDict[_Node, str] = OrderedDict()
        """All nodes with their owners, the least recently used first; a node is always used after those below it."""

    def __len__(self) -> int:
        return len(self._recent)

    def lend(self, owner: str, sequence: Sequence, layers: Seq[int] = ()) -> States | None:
        """Copy the longest known beginning of ``sequence.tokens`` into its K/V, which must be empty.

        The last token is left out: it is scored by the first round. ``layers``: only blocks whose hidden states of
        these layers are known are used; their rows are returned (None without layers, or where nothing is known).
        """
        tokens, path = sequence.tokens, list[_Node]()
        node = self._roots.get(owner)
        while node is not None and (len(path) + 1) * BLOCK < len(tokens):
            node = node.children.get(tuple(tokens[len(path) * BLOCK : (len(path) + 1) * BLOCK]))
            if node is None or not node.holds(layers):
                break
            path.append(node)
        self.use.asked += len(tokens) - 1
        self.use.found += len(path) * BLOCK
        if path:
            self._target.reserve_kv(sequence.kv, len(tokens))
        for one in path:
            self._target.append_kv(sequence.kv, one.kv, BLOCK)
        self._touch(path)
        if not layers or not path:
            return None
        states = States(layers)
        for one in path:
            states.add(one.states)
        return states

    def keep(self, owner: str, sequence: Sequence) -> None:
        """Take over the blocks of the sequence's committed K/V that are not known, with the states kept beside it."""
        held = self._target.length(sequence.kv) // BLOCK * BLOCK
        if not held:
            return
        states = sequence.states
        if states is not None and states.length(states.layers) < held:
            states = None
        root = node = self._roots.get(owner) or _Node(None, ())
        path = dict[_Node, None]()
        block = BLOCK * self._target.kv_bytes_per_token
        try:
            for start in range(0, held, BLOCK):
                key = tuple(sequence.tokens[start : start + BLOCK])
                if key in node.children:
                    self._recent.move_to_end(node.children[key])
                elif not self._shrink_to(self.most_bytes - block, path):
                    break  # the blocks before it take all there is
                self._roots[owner] = root  # its last block may have had to leave
                node = self._child(owner, node, key, sequence.kv, start, states)
                path[node] = None
                self._shrink_to(self.most_bytes, path)
        finally:  # also where memory does not suffice for a copy: blocks before it are known, and may be evicted
            self._touch(path)
            self.shrink(self.most_bytes)

    def shrink(self, most_bytes: int) -> None:
        """Let blocks go, the least recently used first, until at most so many bytes are left."""
        self._shrink_to(most_bytes, ())

    def _shrink_to(self, most_bytes: int, path: Collection[_Node]) -> bool:
        """Let blocks go that are not on ``path``, which are used later than all others; whether that suffices."""
        while self.bytes > most_bytes and self._recent and next(iter(self._recent)) not in path:
            node, owner = self._recent.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.key]
            self.bytes -= node.bytes
            self.use.evicted += 1
            if node.parent.parent is None and not node.parent.children:
                self._roots.pop(owner, None)
        return self.bytes <= most_bytes

    def forget(self, owner: str) -> None:
        """Let all blocks of an owner go."""
        self._roots.pop(owner, None)
        for node in [one for one, whose in self._recent.items() if whose == owner]:
            del self._recent[node]
            self.bytes -= node.bytes

    def _child(
        self, owner: str, parent: _Node, key: tuple[int, ...], kv: Any, start: int, states: States | None
    ) -> _Node:
        node = parent.children.get(key)
        if node is None:
            node = _Node(parent, key, self._target.kv_block(kv, start, start + BLOCK))
            node.bytes = _size(node.kv)
            self.bytes += node.bytes
            parent.children[key] = node
            self._recent[node] = owner
        if states is not None and not node.holds(states.layers):
            for layer, rows in states.rows(start, start + BLOCK).items():
                if layer not in node.states:
                    node.states[layer] = rows.clone()
                    node.bytes += rows.nbytes
                    self.bytes += rows.nbytes
        return node

    def _touch(self, path: Reversible[_Node]) -> None:
        for one in reversed(path):  # so that a block never leaves before those that come after it
            self._recent.move_to_end(one)


def _size(block: Any) -> int:
    """Bytes of a block's tensors, in whatever a target puts them."""
    if isinstance(block, list | tuple):
        return sum(map(_size, block))
    return int(getattr(block, "nbytes", 8))
