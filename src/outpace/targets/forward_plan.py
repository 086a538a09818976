"""ForwardPlan: what one forward over the rows of many sequences, laid end to end, is to do and what it found."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outpace.core.tree import TokenTree


@dataclass(slots=True)
class SequenceRows:
    """One sequence's share of a forward: rows ``start:stop`` of the flat input.

    ``store``: the sequence's :class:`~outpace.targets.kv_store.KVStore`. ``positions``: of earlier and new rows.
    ``tree``: whose rows they are; None for a causal chunk of the prompt. The tree's first rows may have been run by an
    earlier pass, whose K/V is ``earlier_kv``. ``subset``: the committed positions that attention may read, ascending,
    (k,) long for all layers and heads or (layers, kv_heads, k) for each; None for all. ``side_kv``: K/V of earlier and
    new rows in the target's own layout, left by the forward. ``memo``: what the target keeps between layers.
    """

    store: Any
    start: int
    stop: int
    positions: list[int]
    tree: TokenTree | None = None
    earlier_kv: Any = None
    subset: Tensor | None = None
    side_kv: Any = None
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def committed(self) -> int:
        """How many committed rows each head may read."""
        return int(self.store.length) if self.subset is None else self.subset.shape[-1]

    @property
    def new_rows(self) -> int:
        """How many rows this forward runs."""
        return self.stop - self.start

    @property
    def earlier_rows(self) -> int:
        """How many of the tree's rows an earlier pass has run."""
        return len(self.positions) - self.new_rows


@dataclass(slots=True)
class ForwardPlan:
    """Layers ``start <= i < stop`` over the rows of ``parts``, R in all.

    ``skip_attention`` and ``skip_mlp`` name layers whose sublayer adds nothing. ``wanted``: layers whose
    ``hidden_states``, (R, hidden) of the residual stream entering the layer, the forward leaves (``num_layers``: what
    leaves the last one; behind the final norm where ``normed``). ``states``, (R, hidden), enter layer ``start`` instead
    of embeddings. ``entry_inputs``, (R, inputs), go through a spec's entry, which makes the first states of them.
    ``second``, (R): tokens whose embeddings layer 0 reads beside the residual stream, where a spec says that it does.
    ``best``, where it is a list, receives the place of every row's largest logit, the first of equal ones (-1: not
    known), or stays empty where the target does not tell. ``queries``, where it is a mapping, receives the rotated
    queries (R, heads, width) of every layer that attends.
    ``calls`` records (module, extra arguments) of every attention call, for the probe of a transformers model.
    """

    parts: list[SequenceRows]
    start: int = 0
    stop: int = 0
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    states: Tensor | None = None
    entry_inputs: Tensor | None = None
    second: Seq[int] | None = None
    wanted: frozenset[int] = frozenset()
    normed: bool = False
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    best: list[int] | None = None
    queries: dict[int, Tensor] | None = None
    calls: list[tuple[Any, dict[str, Any]]] | None = None

    def is_whole(self, layers: int) -> bool:
        """Whether all of so many layers run."""
        return self.start == 0 and self.stop == layers and not self.skip_attention and not self.skip_mlp
