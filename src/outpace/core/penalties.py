"""Logit bias, the penalties on repetition, and what a grammar allows: what they change of the logits after a path.

Bias and penalties concern the tokens that a bias names and those of the history, at most a few thousand of the
vocabulary; what a grammar allows is a set of bits. So changes are a value that is applied where a row is read: here to
a tensor, or by the kernels while they open a distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.constraint import Bits, mask

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class Counted(NamedTuple):
    """Different tokens ``ids`` (n,) int64, and how often the answer holds each: ``counts`` (n,) float32."""

    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.float32]

    @staticmethod
    def of(counts: dict[int, float]) -> Counted:
        """``counts`` by token."""
        import numpy as np

        size = len(counts)
        return Counted(np.fromiter(counts, np.int64, size), np.fromiter(counts.values(), np.float32, size))


class History:
    """The tokens that penalties change the logits of, and how often the answer holds each. A value: see ``with_``."""

    __slots__ = ("_arrays", "_counts")

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._arrays: Counted | None = None

    @property
    def tokens(self) -> Counted:
        """The tokens, in the order in which they came."""
        if self._arrays is None:
            self._arrays = Counted.of(self._counts)
        return self._arrays

    def with_(self, tokens: Sequence[int], count: int = 1) -> History:
        """The history with more tokens of the answer (``count`` 1) or of the prompt (0)."""
        if not tokens:
            return self
        longer = History()
        longer._counts = self._counts | self._after(tokens, count)
        return longer

    def after(self, path: Sequence[int]) -> Counted:
        """The different tokens of ``path``, counted with what the answer holds of them already."""
        return Counted.of(self._after(path, 1))

    def _after(self, tokens: Sequence[int], count: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for token in tokens:
            found[token] = found.get(token, self._counts.get(token, 0.0)) + count
        return found


class Bias:
    """``values``, what is added to the logits of the different tokens ``ids``: (n,) float32 and int64."""

    __slots__ = ("ids", "values")

    def __init__(self, given: Iterable[tuple[int, float]]) -> None:
        import numpy as np

        ids, values = zip(*given, strict=True)
        self.ids: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self.values: npt.NDArray[np.float32] = np.array(values, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """What bias, penalties and a grammar change of a row of logits.

    ``repetition`` divides positive logits of ``history`` and ``path`` and multiplies the others; then ``presence`` is
    taken off those that the answer holds, and ``frequency`` for each time. ``path``: draft tokens after the history,
    with the counts that are right for both. Last, tokens that are not ``allowed`` are banned; None: all are.
    """

    bias: Bias | None
    history: History
    path: Counted
    repetition: float
    presence: float
    frequency: float
    allowed: Bits | None = None

    def apply(self, row: Tensor) -> Tensor:
        """Change a row of logits (V,), float32, in place; returns it."""
        import torch

        if self.bias is not None:
            row[torch.from_numpy(self.bias.ids).to(row.device)] += torch.from_numpy(self.bias.values).to(row.device)
        parts = [
            (torch.from_numpy(part.ids).to(row.device), torch.from_numpy(part.counts).to(row.device))
            for part in (self.history.tokens, self.path)
            if len(part.ids)
        ]
        # The path's logits are read before the history's are changed: tokens of both are changed once.
        for ids, values in [(ids, self._penalised(row[ids], counts)) for ids, counts in parts]:
            row.index_copy_(0, ids, values)
        return row if self.allowed is None else mask(row, self.allowed)

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        import torch

        if self.repetition != 1.0:
            values = torch.where(values < 0, values * self.repetition, values / self.repetition)
        return values - self.frequency * counts - self.presence * (counts > 0)
