"""Branches: rows that grow from the committed rows of many sequences, a level at a time, as drafts do.

A row begins with the state that left the row before it. A level is one forward over the rows of all sequences, of whose
logits a draft reads little: the largest ones of each row, and what normalises them. Implementations keep states and K/V
of the rows until the next beginning; callers know rows by number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Best = tuple[list[float], list[int], float]
"""The largest logits of a row, their columns, and the log of the sum of the exponentials of all its logits times the
inverse temperature."""


class Begins(IntEnum):
    """What a row enters the layers with: the state of the row before it; that behind the norm of the spec's entry; or
    what the entry makes of the embedding of the row's token and that state side by side."""

    STATE = 0
    NORMED_STATE = 1
    EMBEDDING_AND_STATE = 2


class Root(NamedTuple):
    """The next rows of a sequence, which are committed to ``kv`` when branches begin.

    ``entering``, (n, inputs): what goes through the spec's entry. ``tokens``, (n,). ``position``: of the first.
    """

    kv: Any
    position: int
    entering: Tensor
    tokens: Seq[int]


class Reading(NamedTuple):
    """What is read of the rows: the ``topk`` largest logits of each (0: none, at most V), and all of them or not.

    ``inverse_temperatures``: one for each row.
    """

    topk: int
    inverse_temperatures: Seq[float]
    logits: bool = False


@dataclass(slots=True)
class Found:
    """What was read, by row. ``best`` is empty for ``topk`` 0; ``logits``, (rows, V), only where they were wanted."""

    best: list[Best]
    logits: Tensor | None = None


class Branches(ABC):
    """Rows that grow. They are numbered from 0: the roots in their order, then each level's."""

    @abstractmethod
    def begin(self, roots: Seq[Root], reading: Reading) -> Found:
        """Commit the next rows of some sequences and read the last of each. What grew before is forgotten."""

    @abstractmethod
    def grow(self, after: Seq[int], tokens: Seq[int], reading: Reading) -> Found:
        """Run a level: row ``i`` holds ``tokens[i]`` and follows row ``after[i]``. Those of one sequence stand beside
        one another. Each sees its sequence's committed rows, the path to it and itself."""
