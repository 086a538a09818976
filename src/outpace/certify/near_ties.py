"""Are two outputs the same, and where not: a near tie, or a mistake?

At the first difference the target scores the common prefix again. The *gap* is how far the less likely of the two
chosen tokens lies below the largest logit. It is a near tie where the gap is within rounding: within ``NEAR_TIE`` of
the model's precision, or within twice the *noise*, by how much the difference of the two logits changes when the last
2, 4 or 8 tokens are scored at once instead of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.future_validity import weigh
from outpace.targets.base import Sequence as TargetSequence, Target

NEAR_TIE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""Largest gap in logits that rounding may explain. In bfloat16 logits near 20 are 0.125 apart."""


def near_tie_gap(dtype: object) -> float:
    """The tolerance for a precision, by its name; that of bfloat16 for whatever is coarser or unknown."""
    return NEAR_TIE.get(str(dtype).removeprefix("torch."), NEAR_TIE["bfloat16"])


def parting(ours: Sequence[int], plain: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """Position of the first difference and the two tokens there (None: the output has ended); None where equal."""
    pairs = enumerate(zip_longest(ours, plain))
    return next(((at, mine, theirs) for at, (mine, theirs) in pairs if mine != theirs), None)


@dataclass(frozen=True, slots=True)
class Gap:
    """How far apart two choices were, and how far rounding alone moves them (both in logits)."""

    size: float
    noise: float
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.size <= max(self.tolerance, 2.0 * self.noise)


def gap(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    chosen: Sequence[int | None],
    params: SamplingParams,
    ends: Iterable[int],
) -> Gap:
    """The gap between the two ``chosen`` tokens after ``prompt`` and ``output``.

    None among them stands for the end of the answer: the likeliest of ``ends``.
    """
    stops = list(ends)
    with prefilled(target, prompt, output, params) as sequence:
        scores = target.score([(sequence, TokenTree())])[0]
        logits = scores.distribution.processed([ROOT])[0]
        picks = [
            stops[int(logits[stops].argmax())] if token is None else token
            for token in chosen
            if token is not None or stops
        ]
        apart = [_difference(scores.logits[0], picks)]
        again = [rows for rows in (2, 4, 8) if rows < len(sequence.tokens)]
        apart += [_difference(_rescored(target, sequence, rows), picks) for rows in again]
    size = float(logits.max()) - min(float(logits[token]) for token in picks)
    return Gap(size, max(abs(one - apart[0]) for one in apart), near_tie_gap(target.dtype))


@contextmanager
def prefilled(
    target: Target, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, begun: Any = None
) -> Iterator[TargetSequence]:
    """A fresh sequence of ``prompt`` and ``output`` with the K/V of all but its last token; closed at the end.

    ``begun``: K/V that begins with that of all of the prompt's tokens but the last, which is copied.
    """
    kv = None if begun is None else target.fork(begun, len(prompt) - 1)
    sequence = target.sequence(prompt, params, kv=kv)
    try:
        if params.weighting.weighs:  # weights are found where the answer begins
            target.prefill([sequence])
            weigh(target, sequence)
        sequence.tokens.extend(output)
        sequence.sampler.extend(output)
        target.prefill([sequence])
        yield sequence
    finally:
        target.close(sequence.kv)


def _difference(logits: Tensor, picks: Sequence[int]) -> float:
    return float(logits[picks[0]]) - float(logits[picks[-1]])


def _rescored(target: Target, sequence: TargetSequence, rows: int) -> Tensor:
    """Raw logits after the last token, the last ``rows`` tokens being scored at once."""
    start = len(sequence.tokens) - rows
    twin = target.sequence(sequence.tokens[: start + 1], kv=target.fork(sequence.kv, start))
    try:
        return target.score([(twin, TokenTree.chain(sequence.tokens[start + 1 :]))])[0].logits[-1]
    finally:
        target.close(twin.kv)
