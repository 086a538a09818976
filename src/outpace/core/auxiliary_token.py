"""AuxiliaryToken: a row that a drafter wants in the target's forward beside its draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AuxiliaryToken:
    """A row in the target's forward that is not a candidate: rules never accept it, commit never writes it.

    ``position`` is relative to the root (root = 0). ``attends`` lists what it sees besides itself and the
    committed prefix: ``ROOT``, tree nodes ``0..n-1``, and earlier auxiliary tokens as ``n + index``.
    ``embedding``, shape (hidden,), replaces the token's input embedding. ``owner``: the drafter that asked for it,
    which finds it again by that when trees are merged.
    """

    token: int
    position: int
    attends: tuple[int, ...] = (-1,)  # ROOT of a TokenTree
    embedding: Tensor | None = None
    owner: object = None
