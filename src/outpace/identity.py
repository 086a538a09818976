"""Are two outputs the same, and where not: a near tie, or a mistake?

Scoring several tokens at once rounds differently from scoring one at a time, so the two most likely tokens can swap
places when their logits are nearly equal. At the first difference the target scores the common prefix again. The
*gap* is how far the less likely of the two chosen tokens lies below the largest logit; a difference is a near tie where
the gap is at most ``NEAR_TIE`` of the model's precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from outpace.sampling import SamplingParams
from outpace.targets.base import Target
from outpace.tree import ROOT, TokenTree

NEAR_TIE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""Largest gap in logits that rounding may explain. In bfloat16 logits near 20 are 0.125 apart."""


def near_tie_gap(dtype: object) -> float:
    """The tolerance for a precision, by its name; that of bfloat16 for whatever is coarser or unknown."""
    return NEAR_TIE.get(str(dtype).removeprefix("torch."), NEAR_TIE["bfloat16"])


def parting(ours: Sequence[int], plain: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """Position of the first difference and the two tokens there (None: the output has ended); None where equal."""
    pairs = enumerate(zip_longest(ours, plain))
    return next(((at, mine, theirs) for at, (mine, theirs) in pairs if mine != theirs), None)


def gap(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    chosen: Sequence[int | None],
    params: SamplingParams,
    ends: Iterable[int],
) -> float:
    """How far the less likely of the ``chosen`` tokens lies below the best after ``prompt`` and ``output``.

    None among them stands for the end of the answer: the likeliest of ``ends``.
    """
    sequence = target.sequence(prompt, params)
    try:
        sequence.tokens.extend(output)
        sequence.sampler.extend(output)
        target.prefill([sequence])
        logits = target.score([(sequence, TokenTree())])[0].distribution.processed([ROOT])[0]
    finally:
        target.close(sequence.kv)
    stops = list(ends)
    values = [logits[stops].max() if token is None else logits[token] for token in chosen if token is not None or stops]
    return float(logits.max() - min(map(float, values)))
