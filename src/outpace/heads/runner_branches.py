"""RunnerBranches: rows that grow from one another, by a head's layers in one forward a level, wherever these run.

For heads beside targets without kernels of their own, and for LM heads that the layers' runner does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace.heads.head_runner import Rows
from outpace.targets.branches import Best, Branches, Found, Reading, Root
from outpace.targets.top import top_and_totals

if TYPE_CHECKING:
    from outpace.heads.feature_net import Net


@dataclass(slots=True)
class _Tree:
    """The rows that grow from one root: their positions and K/V."""

    kv: Any
    positions: list[int] = field(default_factory=list)
    side: Any = None


@dataclass(slots=True)
class _Row:
    """``seen``: the rows of its tree on the path to it, itself among them."""

    tree: _Tree
    position: int
    seen: list[int]


class RunnerBranches(Branches):
    """On the layers of ``net``."""

    def __init__(self, net: Net) -> None:
        self._net, self.columns = net, len(net.ids)
        self._rows: list[_Row] = []
        self._states = torch.empty(0)

    def begin(self, roots: Seq[Root], reading: Reading) -> Found:
        batch, self._rows = [], []
        for root in roots:
            stop = root.position + len(root.tokens)
            beside = root.tokens if self._net.reads_tokens else ()
            batch.append(Rows(root.kv, root.entering, list(range(root.position, stop)), beside, entry=True))
            self._rows.append(_Row(_Tree(root.kv), stop - 1, []))
        outs = self._net.run(batch)
        self._states = torch.cat([one.states[-1:] for one in outs])
        return _read(torch.cat([one.logits[-1:] for one in outs if one.logits is not None]), reading)

    def grow(self, after: Seq[int], tokens: Seq[int], reading: Reading) -> Found:
        net = self._net
        entering = net.begun(tokens, self._states[list(after)])
        batch: list[Rows] = []
        trees: list[_Tree] = []
        done = 0
        for _, members in groupby(after, lambda row: id(self._rows[row].tree)):
            parents = [self._rows[row] for row in members]
            tree, mine = parents[0].tree, slice(done, done + len(parents))
            done = mine.stop
            old = list(tree.positions)
            new = [_Row(tree, one.position + 1, [*one.seen, len(old) + at]) for at, one in enumerate(parents)]
            tree.positions += [one.position for one in new]
            beside = tokens[mine] if net.reads_tokens else ()
            seen = [one.seen for one in new]
            batch.append(
                Rows(tree.kv, entering[mine], tree.positions[len(old) :], beside, seen, tree.side, old, net.joins)
            )
            trees.append(tree)
            self._rows += new
        outs = net.run(batch)
        for tree, out in zip(trees, outs, strict=True):
            tree.side = out.side
        self._states = torch.cat([self._states, *(one.states for one in outs)])
        return _read(torch.cat([one.logits for one in outs if one.logits is not None]), reading)


def _read(logits: Tensor, reading: Reading) -> Found:
    best: list[Best] = []
    if reading.topk:
        at = 0
        for inverse_temperature, rows in groupby(reading.inverse_temperatures):
            count = len(list(rows))
            best += top_and_totals(logits[at : at + count], reading.topk, inverse_temperature)
            at += count
    return Found(best, logits if reading.logits else None)
