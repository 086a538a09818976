"""Does a method answer a prompt as autoregressive decoding does? See :mod:`outpace.certify.near_ties`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outpace.bench.records import Record
from outpace.certify.near_ties import gap, parting
from outpace.core.sampling import SamplingParams
from outpace.targets.base import Target


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a method's answers to a prompt and those of autoregressive decoding."""

    prompt: str
    category: str
    turn: int
    position: int
    gap: float | None
    near_tie: bool

    def public(self) -> dict[str, Any]:
        """As the JSON has it."""
        return {
            "prompt": self.prompt,
            "turn": self.turn,
            "position": self.position,
            "gap": self.gap,
            "near_tie": self.near_tie,
        }


def first_difference(
    target: Target, ours: Record, reference: Record, params: SamplingParams, eos_ids: Iterable[int]
) -> Difference | None:
    """Compare two records of one prompt; None where every turn's tokens are the same."""
    for turn, (mine, theirs) in enumerate(zip(ours.answers, reference.answers, strict=True)):
        parted = parting(mine.tokens, theirs.tokens)
        if parted is None:
            continue
        position, *chosen = parted
        if mine.context != theirs.context:  # an earlier turn parted at a tie that was counted there
            return Difference(reference.prompt, reference.category, turn + 1, position, None, False)
        apart = gap(target, theirs.context, theirs.tokens[:position], chosen, params, eos_ids)
        return Difference(reference.prompt, reference.category, turn + 1, position, apart.size, apart.near_tie)
    return None
