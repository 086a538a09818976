"""SubGraph: which part of a target a forward runs through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SubGraph:
    """A cheaper forward through part of the target.

    Layers ``start <= i < stop`` run (``stop`` None: to the end; the final norm and LM head always follow).
    ``skip_attention`` and ``skip_mlp`` name layers whose sublayer adds nothing to the residual stream.
    ``kv`` maps a sequence's index in the batch to the committed positions that attention may read, ascending: (k,) long
    for all layers and heads alike, or (layers, kv_heads, k), a choice for each.
    """

    start: int = 0
    stop: int | None = None
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    kv: Mapping[int, Tensor] = field(default_factory=dict)

    def first_difference(self, layers: int) -> int:
        """The first of the model's ``layers`` layers that may compute something else than in the full forward."""
        if self.kv or self.start:
            return 0
        skipped = [*self.skip_attention, *self.skip_mlp, layers if self.stop is None else self.stop]
        return min(skipped)


FULL = SubGraph()
