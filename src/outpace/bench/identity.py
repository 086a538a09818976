"""Are the answers those of plain decoding? And where not: is it a near tie, or a mistake?

Scoring several tokens at once rounds differently from scoring one at a time, so the two most likely tokens can swap
places when their logits are nearly equal. At the first difference the target scores plain decoding's prefix again. The
*gap* is how far the less likely of the two chosen tokens lies below the largest logit; a difference is a near tie where
the gap is at most ``NEAR_TIE`` of the model's precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from outpace.bench.records import Record
from outpace.sampling import SamplingParams
from outpace.targets.base import Target
from outpace.tree import ROOT, TokenTree

NEAR_TIE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""Largest gap in logits that rounding may explain. In bfloat16 logits near 20 are 0.125 apart."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a method's answers to a prompt and plain decoding's."""

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


def near_tie_gap(dtype: object) -> float:
    """The tolerance for a precision, by its name; that of bfloat16 for whatever is coarser or unknown."""
    return NEAR_TIE.get(str(dtype).removeprefix("torch."), NEAR_TIE["bfloat16"])


def first_difference(
    target: Target, ours: Record, plain: Record, params: SamplingParams, eos_ids: Iterable[int], tolerance: float
) -> Difference | None:
    """Compare two records of one prompt; None where every turn's tokens are the same."""
    for turn, (mine, theirs) in enumerate(zip(ours.answers, plain.answers, strict=True)):
        if mine.tokens == theirs.tokens:
            continue
        pairs = list(zip_longest(mine.tokens, theirs.tokens))
        position = next(i for i, (a, b) in enumerate(pairs) if a != b)
        gap = None
        if mine.context == theirs.context:
            prefix = (*theirs.context, *theirs.tokens[:position])
            gap = _gap(target, prefix, pairs[position], theirs.context, params, eos_ids)
        near = gap is not None and gap <= tolerance
        return Difference(plain.prompt, plain.category, turn + 1, position, gap, near)
    return None


def _gap(
    target: Target,
    prefix: Sequence[int],
    chosen: Sequence[int | None],
    prompt: Sequence[int],
    params: SamplingParams,
    eos_ids: Iterable[int],
) -> float:
    """How far the less likely of the chosen tokens lies below the best; None stands for the end of the answer."""
    sequence = target.sequence(prompt, params)
    try:
        sequence.tokens.extend(prefix[len(prompt) :])
        sequence.sampler.extend(prefix[len(prompt) :])
        target.prefill([sequence])
        logits = target.score([(sequence, TokenTree())])[0].distribution.processed([ROOT])[0]
    finally:
        target.close(sequence.kv)
    ends = list(eos_ids)
    values = [logits[ends].max() if token is None else logits[token] for token in chosen if token is not None or ends]
    return float(logits.max() - min(map(float, values)))
