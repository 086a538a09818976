"""Numerics: how far a server's own probabilities move between two ways of computing them.

A decoding step scores one token behind cached K/V; the same text sent as a prompt is scored many tokens at once. The
difference is rounding, and verifying a draft rounds no more than that. A test of speculation must not call it a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.certify.certificate import Rescored
from outpace.certify.endpoint import Endpoint, Top, distance, likeliest
from outpace.certify.near_ties import NEAR_TIE
from outpace.certify.rescoring import largest_distance
from outpace.certify.server_client import Answer, Token
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams

CONTEXTS = 32


@dataclass(frozen=True, slots=True)
class Scored:
    """A prefix by its token ids, ``prompt`` of them in the prompt, and the log-probabilities that a server had while it
    decoded there."""

    prefix: tuple[int, ...]
    prompt: int
    top: Top


@dataclass(frozen=True, slots=True)
class Numerics:
    """``bias``: the largest total variation distance in ``contexts`` prefixes; ``noise``: by how much the difference
    of the two largest logits changed at most; ``near_tie``: the largest gap of two logits that is a near tie."""

    contexts: int
    bias: float
    noise: float
    near_tie: float

    def tolerance(self, params: SamplingParams) -> float:
        """The largest distance of one prefix that rounding explains."""
        return max(2.0 * self.bias, largest_distance(self.near_tie, params))


UNKNOWN = Numerics(0, 0.0, 0.0, NEAR_TIE["bfloat16"])
"""Nothing was measured: the null of tests is no bias at all, and near ties are those of 16 bits."""


def scored(answers: Sequence[Answer], first: int) -> list[Scored]:
    """The prefixes of answers that have ids and log-probabilities, from position ``first`` on."""
    found = []
    for one in answers:
        if one.prompt is None or one.top is None:
            continue
        for at in range(first, len(one.tokens)):
            prefix = [*one.prompt, *one.tokens[:at]]
            if all(isinstance(token, int) for token in prefix):
                found.append(Scored(tuple(map(int, prefix)), len(one.prompt), one.top[at]))
    return found


def spread(found: Sequence[Scored], count: int) -> list[Scored]:
    """``count`` of them, evenly taken."""
    if len(found) <= count:
        return list(found)
    return [found[number * len(found) // count] for number in range(count)]


def measure(endpoint: Endpoint, found: Sequence[Scored], temperature: float) -> Numerics:
    """Send prefixes that ``endpoint`` decoded at again, as prompts. ``temperature``: at which distances count."""
    if not found:
        return UNKNOWN
    bias = noise = 0.0
    with stage("rescoring the baseline", total=len(found), unit="prefixes") as at:
        for number, one in enumerate(found, 1):
            again = endpoint.next_token(one.prefix, temperature)
            bias = max(bias, distance(one.top, again, temperature if endpoint.raw else 1.0))
            noise = max(noise, _moved(one.top, again))
            at.move(number)
    # More than float32 rounds: 16 bits.
    return Numerics(len(found), bias, noise, NEAR_TIE["float32" if noise <= NEAR_TIE["float32"] else "bfloat16"])


def rescore(reference: Endpoint, found: Sequence[Scored], temperature: float, tolerance: float) -> Rescored:
    """Compare what an engine scored while it drafted with what ``reference`` has for the same prefixes as prompts."""
    distances = []
    with stage("rescoring the endpoint", total=len(found), unit="prefixes") as at:
        for number, one in enumerate(found, 1):
            again = reference.next_token(one.prefix, temperature)
            distances.append(distance(one.top, again, temperature if reference.raw else 1.0))
            at.move(number)
    worst = max(range(len(distances)), key=distances.__getitem__, default=None)
    return Rescored(
        prefixes=len(distances),
        differing=sum(each > tolerance for each in distances),
        largest_difference=0.0 if worst is None else distances[worst],
        tolerance=tolerance,
        prompt_tokens=None if worst is None else found[worst].prompt,
        output_tokens=None if worst is None else len(found[worst].prefix) - found[worst].prompt,
    )


def _moved(one: Top, other: Top) -> float:
    """By how much the difference of the two largest logits changes; 0 where they are not both known."""
    pair: list[Token] = likeliest(one, 2)
    if len(pair) < 2 or not all(token in other for token in pair):
        return 0.0
    return abs((one[pair[0]] - one[pair[1]]) - (other[pair[0]] - other[pair[1]]))
