"""Costs: how long a target's forwards take, as controllers ask for it; and nominal ones, for which no clock is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from outpace.core.tree import TokenTree

if TYPE_CHECKING:
    import torch

NOMINAL, AMPLE, BEYOND = 0.05, 7, 0.2
"""Fixed costs of a draft token, in autoregressive steps: up to AMPLE of them and after. About what it costs on
processors where drafting gains at all; beyond some number of rows each costs in proportion everywhere."""


class Costs(ABC):
    """Seconds of a target's forwards."""

    fixed: bool = False
    """Whether they are nominal. Then no decision may depend on a clock, at any temperature."""
    overhead: float = 0.0
    """Seconds of a round beside its forward and its draft, where the forwards do not hold them."""

    @abstractmethod
    def seconds(self, rows: int, context: int = 0) -> float:
        """Of one forward over ``rows`` rows of one sequence, after ``context`` committed tokens."""

    def forward(self, rows: Sequence[int], contexts: Sequence[int]) -> float:
        """Of one forward over ``rows[i]`` rows of every sequence i, after ``contexts[i]`` committed tokens. Here as of
        one sequence with their mean context."""
        return self.seconds(sum(rows), sum(contexts) // len(contexts))

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        """Of one forward over ``rows`` rows, shared out among ``batch`` sequences of ``context`` tokens; each has one
        at least."""
        each, more = divmod(max(rows, batch), batch)
        return self.forward([each + (at < more) for at in range(batch)], [context] * batch)

    def reading(self, rows: int, context: int = 0) -> float:
        """Of reading ``rows`` tokens of a prompt after ``context`` others, of which no logits are needed."""
        return self.seconds(rows, context)

    @abstractmethod
    def once(self, name: str, measure: Callable[[], float]) -> float:
        """What ``measure`` gave when ``name`` was first asked for on this machine, in seconds. Not for fixed costs."""

    @abstractmethod
    def beside(self, model: Scorer, name: str) -> Costs:
        """Costs of a small model that was made for this target, kept with the target's own under ``name``."""

    def relative(self, count: int, batch: int = 1, context: int = 0) -> float:
        """A round with ``count`` draft tokens for each of ``batch`` requests, in autoregressive steps of the batch."""
        return self.even(batch * (1 + count), batch, context) / self.even(batch, batch, context)

    def round_seconds(
        self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False, sampled: bool = False
    ) -> float:
        """Of a whole round over ``rows`` rows of ``batch`` requests, without its draft. ``live``: as rounds have turned
        out to take in this process, of greedy requests or of ``sampled`` ones; otherwise as recorded, so that the same
        seed gives the same answer."""
        return self.even(rows, batch, context) + self.overhead

    def took(self, rows: int, context: int, seconds: float, *, greedy: bool, batch: int = 1) -> None:  # noqa: B027
        """A round over ``rows`` rows of ``batch`` requests took ``seconds`` without its draft."""

    def correct(self, name: str, seconds: float) -> None:  # noqa: B027 (fixed costs have no records)
        """What has a record under ``name`` (:meth:`once`) has come to take ``seconds``. A record that proves far too
        long was made on a busy machine, and is replaced."""

    @property
    def version(self) -> int:
        """Changes where times that were read before are out of date."""
        return 0

    @property
    def measurements(self) -> int:
        """How many times were measured in this process, which takes time of the requests that needed them."""
        return 0

    def steps(self, seconds: Callable[[], float], nominal: float, batch: int = 1, context: int = 0) -> float:
        """A time in autoregressive steps of ``batch`` requests; ``nominal`` where costs are fixed."""
        return nominal if self.fixed else seconds() / self.even(batch, batch, context)


class FixedCosts(Costs):
    """Nominal costs in autoregressive steps. Neither the batch nor the context changes them: a sampled request drafts
    what its seed, its prompt and the model determine."""

    fixed = True

    def seconds(self, rows: int, context: int = 0) -> float:
        count = max(0, rows - 1)
        return 1.0 + NOMINAL * count + (BEYOND - NOMINAL) * max(0, count - AMPLE)

    def relative(self, count: int, batch: int = 1, context: int = 0) -> float:
        return self.seconds(1 + count)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        raise ValueError(f"fixed costs measure nothing, and so not '{name}'")

    def beside(self, model: Scorer, name: str) -> Costs:
        return self


class Scorer(Protocol):
    """The part of a target that measuring needs."""

    vocab_size: int
    context_length: int

    @property
    def device(self) -> torch.device: ...

    def round(self) -> AbstractContextManager[None]: ...

    def sequence(self, prompt: Sequence[int], /, *, kv: Any = None) -> Any: ...

    def fork(self, kv: Any, /) -> Any: ...

    def prefill(self, sequences: Sequence[Any], /) -> None: ...

    def lengthen(self, sequence: Any, tokens: Sequence[int], /) -> None: ...

    def score(self, batch: Sequence[tuple[Any, TokenTree]], /) -> Any: ...

    def close(self, kv: Any, /) -> None: ...
