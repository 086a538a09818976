"""What the training of every kind of gate is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from outpace.gates.gate import Gate
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.targets.base import Target


@dataclass(frozen=True, slots=True)
class Work:
    """``prompts``: an iterator that may have no end. ``tokens``: of answers to decode. ``half_over``: whether half of
    the time for labels is used up; ``over``: all of it; ``all_over``: that for everything. ``told``: called with the
    answer tokens so far."""

    model: Model
    draft: Target
    prompts: Iterator[Prompt]
    options: Any
    tokens: int
    answer_tokens: int
    seed: int
    half_over: Callable[[], bool]
    over: Callable[[], bool]
    all_over: Callable[[], bool]
    told: Callable[[int], None]

    def enough(self, tokens: int, *, first_half: bool = False) -> bool:
        """Whether ``tokens`` of answers are enough, or their time is used up; with ``first_half``, half of the time."""
        self.told(tokens)
        return tokens >= self.tokens or (self.half_over() if first_half else self.over())


@dataclass(frozen=True, slots=True)
class MadeGate:
    """``features`` and ``hidden``: of ``gate``, 0 where its kind has no classifier. ``figures``: for its provenance."""

    thresholds: dict[str, float]
    figures: dict[str, Any]
    gate: Gate | None = None
    features: int = 0
    hidden: int = 0
