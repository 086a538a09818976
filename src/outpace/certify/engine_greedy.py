"""An engine at temperature 0: are its answers the reference's, token by token? Near ties are told from bugs by margins.

The reference is a server without speculation, outpace's own target of the same weights, or, with neither, the engine's
own log-probabilities: each token of its answer must be the most likely one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.certify.certificate import Check
from outpace.certify.endpoint import Endpoint, Top, units
from outpace.certify.greedy import answer_of, difference
from outpace.certify.near_ties import Gap, parting
from outpace.certify.numerics import Numerics
from outpace.certify.server_client import Answer, Prompt
from outpace.core.sampling import SamplingParams
from outpace.methods.registry import Context, build
from outpace.model import Model

Difference = dict[str, Any]
"""``position``, ``expected``, ``found``, ``gap``, ``noise``, ``near_tie``; None in the last: no margin is known."""


@dataclass(slots=True)
class GreedyResult:
    """One check for each prompt; ``undecided``: answers that differ where no log-probabilities show the margin."""

    checks: list[Check] = field(default_factory=list)
    first_difference: Difference | None = None
    ties: int = 0
    undecided: int = 0

    @property
    def wrong(self) -> int:
        """Answers that differ beyond a near tie."""
        return sum(one.passed is False for one in self.checks)

    def add(self, found: Difference | None) -> None:
        """The comparison of the next prompt."""
        near = True if found is None else found["near_tie"]
        note = "" if found is None else f"differs at token {found['position']}"
        self.checks.append(Check(f"greedy, prompt {len(self.checks)}", near, note=note))
        if found is None:
            return
        self.ties += near is True
        self.undecided += near is None
        first = self.first_difference
        if first is None or (first["near_tie"] is not False and near is False):
            self.first_difference = {"prompt": len(self.checks) - 1, **found}

    def __str__(self) -> str:
        same = sum(one.passed is True for one in self.checks) - self.ties
        parts = [f"{same} of {len(self.checks)} greedy answers identical"]
        parts += [f"{self.ties} near ties"] if self.ties else []
        parts += [f"{self.wrong} differ beyond a near tie"] if self.wrong else []
        parts += (
            [f"{self.undecided} differ and no log-probabilities show whether it is a tie"] if self.undecided else []
        )
        return ", ".join(parts)


def against_baseline(
    endpoint: Endpoint,
    baseline: Endpoint,
    prompts: Sequence[Prompt],
    length: int,
    numerics: Numerics,
    tell: Callable[[], None],
) -> GreedyResult:
    """Compare with a server that decodes without speculation."""
    result = GreedyResult()
    for prompt in prompts:
        got, want = endpoint.greedy(prompt, length), baseline.greedy(prompt, length)
        by_text = not (got.tokens and want.tokens and type(got.tokens[0]) is type(want.tokens[0]))
        mine, others = units([got, want], by_text=by_text)
        result.add(_difference(mine, others, None if by_text else want, numerics))
        tell()
    return result


def _difference(
    mine: Sequence[Any], others: Sequence[Any], want: Answer | None, numerics: Numerics
) -> Difference | None:
    parted = parting(mine, others)
    if parted is None:
        return None
    at, found, expected = parted
    margin = None
    if want is not None and want.top is not None and at < len(want.top):
        margin = _gap(want.top[at], (found, expected), numerics)
    return _told(at, found, expected, margin)


def _told(at: int, found: Any, expected: Any, margin: Gap | None) -> Difference:
    return {
        "position": at,
        "expected": expected,
        "found": found,
        "gap": None if margin is None else margin.size,
        "noise": None if margin is None else margin.noise,
        "near_tie": None if margin is None else margin.near_tie,
    }


def _gap(top: Top, chosen: Sequence[Any], numerics: Numerics) -> Gap:
    """How far the less likely choice lies below the best. One that is not listed is below all that are."""
    least = min(top.values())
    size = max(top.values()) - min(top.get(token, least) for token in chosen)
    if any(token not in top for token in chosen):
        size = max(size, numerics.near_tie * 2.0 + 2.0 * numerics.noise)
    return Gap(size, numerics.noise, numerics.near_tie)


def against_itself(
    endpoint: Endpoint, prompts: Sequence[Prompt], length: int, numerics: Numerics, tell: Callable[[], None]
) -> GreedyResult:
    """Every token must be the most likely one by the engine's own log-probabilities."""
    result = GreedyResult()
    for prompt in prompts:
        got = endpoint.greedy(prompt, length)
        result.add(_unlikely(got, numerics))
        tell()
    return result


def _unlikely(got: Answer, numerics: Numerics) -> Difference | None:
    """The first token that is not the most likely one; a near tie only where there is nothing worse."""
    first = None
    for at, (token, top) in enumerate(zip(got.tokens, got.top or (), strict=False)):
        best = max(top, key=lambda one: top[one])
        if token == best or top.get(token) == top[best]:
            continue
        found = _told(at, token, best, _gap(top, (token, best), numerics))
        if not found["near_tie"]:
            return found
        first = first or found
    return first


def against_target(
    endpoint: Endpoint, model: Model, prompts: Sequence[Sequence[int]], length: int, tell: Callable[[], None]
) -> GreedyResult:
    """Compare with autoregressive decoding of outpace's own target of the same weights."""
    result, params = GreedyResult(), SamplingParams()
    plain = build("none", Context(model.target))
    stops = frozenset[int]() if endpoint.never_ends else frozenset(model.eos_ids)
    for prompt in prompts:
        got = endpoint.greedy(prompt, length)
        want = answer_of(plain, model.target, prompt, length, stops, params)[0]
        mine = [int(token) for token in got.tokens]
        if not endpoint.never_ends:  # some servers list the token that ended the answer, and others do not
            mine = [token for token in mine if token not in stops]
            want = [token for token in want if token not in stops]
        result.add(difference(model.target, prompt, want, mine, stops, params))
        tell()
    return result
