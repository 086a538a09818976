"""The rows of all trees laid end to end for one forward, and what that forward leaves behind for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.targets.base import Scores, Trees
from outpace.targets.forward_plan import SequenceRows
from outpace.targets.sub_graph import SubGraph


@dataclass(slots=True)
class ForwardState:
    """What a forward leaves behind for commit and resume, per sequence: K/V of its rows, boundary states, and how many
    tokens were committed."""

    graph: SubGraph
    side_kv: list[Any]
    states: list[Tensor | None]
    """Residual stream entering layer ``graph.first_difference``, (rows, hidden) per sequence."""
    lengths: list[int]


def lay_out(
    batch: Trees, graph: SubGraph, resume: Scores | None, first_rows: Callable[[Any, int], Any]
) -> tuple[list[SequenceRows], list[int], dict[int, Tensor]]:
    """Rows of all trees end to end: parts, token ids, and input embeddings that replace a token's.

    ``first_rows``: cuts a forward's K/V to its first rows, for trees that ``resume`` has begun.
    """
    parts: list[SequenceRows] = []
    tokens: list[int] = []
    embeddings: dict[int, Tensor] = {}
    for index, (sequence, tree) in enumerate(batch):
        length = sequence.kv.length
        done = 0 if resume is None else 1 + resume[index].nodes
        if not (done or tree or tree.auxiliary_tokens):
            parts.append(
                SequenceRows(sequence.kv, len(tokens), len(tokens) + 1, [length], tree, subset=graph.kv.get(index))
            )
            tokens.append(sequence.tokens[length])
            continue
        rows = tree.row_tokens(sequence.tokens[length])
        start, stop = len(tokens), len(tokens) + len(rows) - done
        for row, auxiliary in enumerate(tree.auxiliary_tokens, stop - len(tree.auxiliary_tokens)):
            if auxiliary.embedding is not None:
                embeddings[row] = auxiliary.embedding
        earlier = None if resume is None else first_rows(resume.forward_state.side_kv[index], done)
        positions = [at + length for at in tree.positions()]
        parts.append(SequenceRows(sequence.kv, start, stop, positions, tree, earlier, graph.kv.get(index)))
        tokens += rows[done:]
    return parts, tokens, embeddings


def certain_rows(batch: Trees, parts: Seq[SequenceRows]) -> list[int]:
    """Rows whose logits are left out."""
    return [part.start + row for (_, tree), part in zip(batch, parts, strict=True) for row in sorted(tree.certain_rows)]


def side_kv_of(part: SequenceRows) -> Any:
    """K/V of all of a part's rows; a pass without new rows leaves what there was."""
    return part.side_kv if part.new_rows else part.earlier_kv


def joined(old: Tensor, new: Tensor | None) -> Tensor:
    """Rows of an earlier pass and the new ones behind them."""
    return old if new is None or len(new) == 0 else torch.cat([old, new])
