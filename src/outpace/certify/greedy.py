"""The greedy level: the tokens of autoregressive decoding, one by one; a first difference is a near tie or a bug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outpace.certify.certificate import Certificate, Check
from outpace.certify.near_ties import gap, parting
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.registry import Context, build
from outpace.targets.base import Target


def certify_greedy(
    method: Method,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    length: int = 48,
    stop_ids: frozenset[int] = frozenset(),
    params: SamplingParams | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Decode every prompt plainly and with the method. One difference that is no near-tie: not lossless.

    ``params`` (default: none) must be of temperature 0.
    """
    params = params or SamplingParams()
    plain = build("none", Context(target))
    first: dict[str, Any] | None = None
    checks, ties, drafted = [], 0, 0
    for number, prompt in enumerate(prompts):
        want = answer_of(plain, target, prompt, length, stop_ids, params)[0]
        got, count = answer_of(method, target, prompt, length, stop_ids, params)
        drafted += count
        found = difference(target, prompt, want, got, stop_ids, params)
        near = found is not None and found["near_tie"]
        ties += near
        note = "" if found is None else f"differs at token {found['position']}"
        checks.append(Check(f"prompt {number}", found is None or near, note=note))
        if found is not None and (first is None or (first["near_tie"] and not near)):
            first = {"prompt": number, **found}
        if on_progress is not None:
            on_progress(number + 1, len(prompts))
    wrong = sum(not check.passed for check in checks)
    if wrong:
        lossless, verdict = False, f"not lossless: {wrong} of {len(checks)} answers differ beyond a near-tie"
    elif not drafted and method.may_draft:
        lossless, verdict = None, "inconclusive: the method drafted nothing on these prompts"
    else:
        lossless = True
        verdict = f"{len(checks) - ties} of {len(checks)} answers identical" + (f", {ties} near-ties" if ties else "")
    return Certificate(
        method.name,
        "greedy",
        lossless,
        verdict,
        first_difference=first,
        sampling=params.described,
        checks=tuple(checks),
    )


def answer_of(
    method: Method, target: Target, prompt: Sequence[int], length: int, stop_ids: frozenset[int], params: SamplingParams
) -> tuple[list[int], int]:
    """The tokens of one answer, and how many tokens were drafted for it."""
    decoder = Decoder(target)
    generation = decoder.submit(Request(tuple(prompt), method, params, max_new_tokens=length, stop_ids=stop_ids))
    decoder.run()
    generation.raise_error()
    return generation.sequence.tokens[len(prompt) :], generation.metrics.drafted


def difference(
    target: Target,
    prompt: Sequence[int],
    want: Sequence[int],
    got: Sequence[int],
    stop_ids: frozenset[int],
    params: SamplingParams,
) -> dict[str, Any] | None:
    """Where two outputs part, and how far the less likely of the two tokens lies below the best."""
    parted = parting(got, want)
    if parted is None:
        return None
    at, found, expected = parted
    apart = gap(target, prompt, want[:at], (found, expected), params, stop_ids)
    return {
        "position": at,
        "expected": expected,
        "found": found,
        "gap": apart.size,
        "noise": apart.noise,
        "near_tie": apart.near_tie,
    }
