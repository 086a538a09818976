"""Result: a finished generation, as callers get it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from outpace.core.errors import shortened
from outpace.core.text import Tokenizer
from outpace.engine.populations.answers import answers
from outpace.engine.request import Generation, Logprob

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class RankedAnswer:
    """One of all answers of a population: a beam, or a particle.

    log_weight: of a beam the log-probability of its tokens; of a particle the logarithm of its importance weight.
    score: what it is ranked by. Of a beam its log-probability / its length ** length_penalty; of a particle its share
        of all weights: averages with these weights are estimates of the model's own.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    log_weight: float
    score: float


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """A finished generation.

    text: the answer, without what stopped it.
    tokens: ids of the answer's tokens, without an end-of-sequence token.
    finish_reason: "stop" (end of sequence, or a stop text), "length" or "cancelled".
    metrics: figures by name, defined in docs/metrics.md, "seed", and "lossy": the lossy acceptance rule with its
        settings, None for a lossless one. "constraint_weighting" and "future_validity": how the tokens that a grammar
        allowed were weighted ("masked", "fvo-exact" or "fvo-one-step"), and what the weights are worth.
        "grammar_complete": whether the answer is whole under its grammar, which one that was cut is not; else None.
    logprobs: one entry for each token where they were asked for: ``token``, ``logprob`` (natural logarithm, of the
        model's own distribution) and ``top``, the alternatives as (token, logprob).
    seed: what the answer was sampled with; given as ``seed`` it repeats the call's answer on this machine (with other
        requests beside it draft lengths differ, and with them the draws). None for greedy answers, which need none.
    prompt_tokens: how many tokens the prompt had.
    score: what this answer is ranked by in its population; None where there is one sequence.
    population: all beams or particles, the answer first; empty where there is one sequence.

    >>> import outpace
    >>> result = outpace.generate(outpace.load("smollm2"), "Why is the sky blue?")  # doctest: +SKIP
    >>> print(result.text, result.metrics["tokens_per_second"])                     # doctest: +SKIP
    """

    text: str
    tokens: list[int]
    finish_reason: str
    metrics: dict[str, Any]
    logprobs: list[Logprob]
    seed: int | None = None
    prompt_tokens: int = 0
    score: float | None = None
    population: list[RankedAnswer] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = shortened(self.text, _SHOWN)
        rate = self.metrics.get("decode_tokens_per_second")
        parts = [repr(text), f"tokens={len(self.tokens)}", f"finish_reason={self.finish_reason!r}"]
        parts += [f"seed={self.seed}"] if self.seed is not None else []
        parts += [f"tokens_per_second={rate:.1f}"] if rate else []
        return f"Result({', '.join(parts)})"


def result(generation: Generation) -> Result:
    """The public face of a finished generation. Raises the error that ended it, if one did."""
    generation.raise_error()
    params = generation.request.params
    seed = None if params.greedy else params.fixed_seed
    return Result(
        text=generation.text,
        tokens=list(generation.tokens),
        finish_reason=generation.finish_reason or "",
        metrics={
            **generation.metrics.figures(),
            **generation.constraint_figures,
            "seed": seed,
            "lossy": generation.request.method.lossy,
        },
        logprobs=list(generation.logprobs),
        seed=seed,
        prompt_tokens=generation.metrics.prompt_tokens,
    )


def ranked(generation: Generation, tokenizer: Tokenizer | None) -> list[RankedAnswer]:
    """All beams or particles of a request, its answer first; none where it has one sequence."""
    return [
        RankedAnswer(one.text, one.tokens, one.finish_reason, one.hypothesis.log_weight, one.hypothesis.score)
        for one in answers(generation, tokenizer)
    ]


def results(generation: Generation, tokenizer: Tokenizer | None, n: int) -> list[Result]:
    """The ``n`` best answers of one request: of a group as many of its hypotheses, else the one that there is."""
    whole = result(generation)
    everything = ranked(generation, tokenizer)
    if not everything:
        return [whole]
    return [
        replace(
            whole,
            text=one.text,
            tokens=one.tokens,
            finish_reason=one.finish_reason,
            score=one.score,
            population=everything,
            metrics=whole.metrics | {"tokens": len(one.tokens)},
        )
        for one in everything[:n]
    ]
