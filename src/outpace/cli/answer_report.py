"""What is said about one answer: the line under it, the object of ``--json``, the table of log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from outpace.cli.output import out

if TYPE_CHECKING:
    from outpace.api.result import RankedAnswer
    from outpace.core.future_validity import Weighed
    from outpace.engine.request import Generation
    from outpace.model import Model


def report(model: Model, generation: Generation, interrupted: bool) -> dict[str, Any]:
    """The object that ``--json`` prints; metrics have the names of the bench's rows."""
    method = generation.request.method
    figures = {
        "method": method.name,
        "lossless": method.lossless,
        "lossy": method.lossy,
        "controller": method.controlled_by,
        **generation.metrics.figures(),
        **generation.constraint_figures,
        "seed": seed(generation),
    }
    value: dict[str, Any] = {
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason,
        "metrics": figures,
    }
    if generation.request.params.logprobs:
        show = model.tokenizer.token_text
        value["logprobs"] = [
            {
                "token": one.token,
                "text": show(one.token),
                "logprob": one.logprob,
                "top": [{"token": token, "text": show(token), "logprob": logprob} for token, logprob in one.top],
            }
            for one in generation.logprobs
        ]
    if generation.hypotheses:
        from outpace.api.result import ranked

        found = ranked(generation, model.tokenizer)
        value |= {"score": found[0].score, "population": population(found)}
    if interrupted:
        value["complete"] = False
    return value


def population(found: Iterable[RankedAnswer]) -> list[dict[str, Any]]:
    """Beams or particles with their weights, as ``--json`` shows them: null for the logarithm of a weight of 0."""
    return [
        {
            "text": one.text,
            "tokens": one.tokens,
            "finish_reason": one.finish_reason,
            "log_weight": one.log_weight if math.isfinite(one.log_weight) else None,
            "score": one.score,
        }
        for one in found
    ]


def seed(generation: Generation) -> int | None:
    """What repeats a sampled answer when it is given as --seed; None for a greedy one."""
    params = generation.request.params
    return None if params.greedy else params.fixed_seed


def weighed(found: Weighed) -> str:
    """How allowed tokens were weighted, and how far that may be trusted."""
    said = found.kind
    if found.validity is not None:
        said += f": {found.validity:.2g} of the model's probability was valid"
    if found.error is not None:
        what = "total variation at most" if found.validity is not None else "mean revision of the estimate"
        said += f" ({what} {found.error:.2g})"
    return said


def status(generation: Generation) -> str:
    """The line under an answer: method, length, rate and wait; the seed of a sampled one."""
    figures = generation.metrics.figures()
    method = generation.request.method
    under = f" under {method.controlled_by}" if method.controlled_by else ""
    parts = [f"{method.name}{under}: {figures['tokens']} tokens"]
    if figures["decode_tokens_per_second"]:
        parts.append(f"{figures['decode_tokens_per_second']:.1f} tokens/s")
    if figures["mean_acceptance_length"]:
        parts.append(f"{figures['mean_acceptance_length']:.2f} tokens/round")
    if figures["ttft_ms"]:
        parts.append(f"first token after {figures['ttft_ms']:.0f} ms")
    if (lossy := generation.request.method.lossy) is not None:
        parts.append(f"lossy: {lossy}")
    if generation.weighed is not None:
        parts.append(weighed(generation.weighed))
    if (drawn := seed(generation)) is not None:
        parts.append(f"seed {drawn}")
    return ", ".join(parts)


def print_logprobs(model: Model, generation: Generation) -> None:
    """The table of tokens, their log-probabilities and the most likely alternatives."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("token", "logprob", "most likely"):
        table.add_column(heading, no_wrap=heading != "most likely")
    show = model.tokenizer.token_text
    for one in generation.logprobs:
        top = "  ".join(f"{show(token)!r} {logprob:.2f}" for token, logprob in one.top)
        table.add_row(escape(repr(show(one.token))), f"{one.logprob:.3f}", escape(top))
    out().print()
    out().print(table)
