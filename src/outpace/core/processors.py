"""Users' logits processors, and the one entrance to them: what they return is checked, what they raise has one form.

A processor is somebody else's program. Whatever it does, the request that asked for it ends with one error, and the
requests beside it in the batch go on: so :class:`Processors` is the only code that calls one, and a failure is a value,
:class:`ProcessorFailure`, that stands where a state or a row would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from outpace.core.errors import BadInput, said

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class LogitsProcessor(Protocol):
    """A user's processor. States are values: ``advance`` returns a new one, so a tree can fork it at every node."""

    def begin(self, prompt: Sequence[int]) -> Any:
        """The state after the prompt."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """The state after one more token; must not change ``state``."""
        ...

    def process(self, state: Any, logits: Tensor) -> Tensor:
        """New float32 logits, shape (V,), for the next token; must not change ``logits``."""
        ...


class ProcessorFailure(BadInput):
    """What a processor did wrong, in one line that names it."""


States = list[Any] | ProcessorFailure | None
"""One state per processor; None behind a stop token, where a grammar may have no state; or why there is none."""


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of one request, in their order. Nothing that they raise (but KeyboardInterrupt) gets out."""

    given: tuple[LogitsProcessor, ...]

    def begin(self, prompt: Sequence[int]) -> States:
        """The states after the prompt."""
        return self._states(lambda at: self.given[at].begin(prompt), "begin")

    def advance(self, states: States, token: int) -> States:
        """The states after one more token."""
        if not isinstance(states, list):
            return states
        return self._states(lambda at: self.given[at].advance(states[at], token), "advance")

    def _states(self, call: Any, name: str) -> States:
        states: list[Any] = []
        for at in range(len(self.given)):
            try:
                states.append(call(at))
            except Exception as error:
                return self._raised(at, name, error)
        return states

    def process(self, states: States, row: Tensor) -> Tensor | ProcessorFailure:
        """Logits (V,) float32 after all processors, from those before them; or what went wrong."""
        if not isinstance(states, list):
            return row if states is None else states
        for at, (processor, state) in enumerate(zip(self.given, states, strict=True)):
            before = row
            try:
                row = processor.process(state, row)
            except Exception as error:
                return self._raised(at, "process", error)
            if (wrong := _wrong(row, before)) is not None:
                return ProcessorFailure(f"{self._name(at)} {wrong}")
            row = row.detach()
        return row

    def _raised(self, at: int, where: str, error: Exception) -> ProcessorFailure:
        failure = ProcessorFailure(f"{self._name(at)} raised {said(error, where)}")
        failure.__cause__ = error
        return failure

    def _name(self, at: int) -> str:
        place = f" ({_ordinal(at + 1)} of {len(self.given)})" if len(self.given) > 1 else ""
        return f"logits processor '{type(self.given[at]).__name__}'{place}"


def _wrong(row: Any, before: Tensor) -> str | None:
    """What is wrong with the logits that a processor returned for those ``before`` it; None: nothing."""
    import torch
    from torch import Tensor

    if not isinstance(row, Tensor):
        return f"returned {type(row).__name__} instead of logits"
    if row.layout != torch.strided or row.device != before.device:
        kind = str(row.layout).removeprefix("torch.")
        return f"returned logits that are {kind} on {row.device}, not strided on {before.device}"
    if row.shape != before.shape or row.dtype != torch.float32:
        shape, wanted = tuple(row.shape), tuple(before.shape)
        return f"returned logits of shape {shape} and type {row.dtype}, not of shape {wanted} and torch.float32"
    best = float(row.max())  # NaN where any is: one pass over the vocabulary tells all three
    if math.isfinite(best) or not math.isfinite(float(before.max())):  # what was wrong before is not its doing
        return None
    if best == -math.inf:
        return "bans every token: no token can follow"
    return f"returned {'NaN' if math.isnan(best) else 'infinite'} logits"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
