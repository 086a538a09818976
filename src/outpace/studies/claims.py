"""Claims: what a paper says, what came here, and a verdict that follows from an interval alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outpace.bench.statistics import widening

Verdict = Literal["confirmed", "refuted", "undecided"]
LEVEL = 0.95
RESAMPLES = 2000
FROM, TO = "from (95 %)", "to (95 %)"
"""Titles of the columns behind a figure that have the ends of its interval."""


@dataclass(frozen=True, slots=True)
class Claim:
    """``says``: the paper's claim, in our words. ``found``: the figure here with its ``interval`` (95 %), and ``test``,
    what it is compared with."""

    says: str
    found: float | None
    interval: tuple[float, float] | None
    test: str
    verdict: Verdict

    def public(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        return {
            "says": self.says,
            "found": self.found,
            "interval": interval,
            "test": self.test,
            "verdict": self.verdict,
        }


def above(says: str, found: float, samples: NDArray[np.float64], threshold: float) -> Claim:
    """The claim that a figure is above ``threshold``. ``samples``: the figure in resamples of the data.

    Confirmed where the whole interval is above, refuted where it is below, else undecided: an interval that ends at the
    threshold does not tell a figure above it from one below, and samples that are all the same have one of no width.
    Undecided without an interval.
    """
    low, high = interval(samples)
    if low is None or high is None:
        return undecided(says, found, f"above {threshold:g}")
    verdict: Verdict = "confirmed" if low > threshold else "refuted" if high < threshold else "undecided"
    return Claim(says, found, (low, high), f"above {threshold:g}", verdict)


def undecided(says: str, found: float | None, test: str) -> Claim:
    """A claim that so few prompts tell nothing of."""
    return Claim(says, found, None, f"{test}; too few prompts for an interval", "undecided")


def interval(samples: NDArray[np.float64]) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of a figure in resamples; of a single prompt there is one resample, and no interval."""
    if len(samples) < 2:
        return None, None
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def holds(says: str, held: NDArray[np.bool_]) -> Claim:
    """The claim that something is so. ``held``: whether it is in each resample. Confirmed where it is in at least
    97.5 % of them, refuted where in at most 2.5 %; undecided where there is one resample."""
    if len(held) < 2:
        return undecided(says, None, "share of resamples in which it holds")
    share, edge = float(np.mean(held)), (1 - LEVEL) / 2
    verdict: Verdict = "confirmed" if share >= 1 - edge else "refuted" if share <= edge else "undecided"
    return Claim(says, share, None, "share of resamples in which it holds", verdict)


def by_formula(says: str, found: float, threshold: float, *, below: bool = False) -> Claim:
    """A claim about a figure without chance: it follows from the formula and the sizes that are named."""
    right = found < threshold if below else found > threshold
    word = "below" if below else "above"
    return Claim(says, found, None, f"by formula, {word} {threshold:g}", "confirmed" if right else "refuted")


def resampled_within(groups: Seq[str], seed: int = 0) -> NDArray[np.float64]:
    """As :func:`resampled`, each group of prompts by itself, so that none is empty. ``groups``: of each prompt.

    A group of one prompt is the same in every resample: what is about it alone has no interval (:func:`single`).
    """
    names = list(dict.fromkeys(groups))
    found = np.ones((1 if len(names) == len(groups) else RESAMPLES, len(groups)))
    for number, name in enumerate(names):
        members = [at for at, one in enumerate(groups) if one == name]
        found[:, members] = resampled(len(members), seed + number)
    return found


def single(member: NDArray[np.float64]) -> bool:
    """Whether a group has fewer than two prompts. ``member`` (P,): 1 for its prompts, else 0."""
    return float(member.sum()) < 2.0


def resampled_groups(groups: Seq[int], seed: int = 0) -> NDArray[np.float64]:
    """As :func:`resampled`, whole groups of prompts that were answered together: they share rounds and the machine.
    ``groups``: of each prompt; of a single group there is one resample."""
    names, members = np.unique(np.array(groups), return_inverse=True)
    found: NDArray[np.float64] = resampled(len(names), seed)[:, members]
    return found


def resampled(count: int, seed: int = 0) -> NDArray[np.float64]:
    """(RESAMPLES, count): how much each of ``count`` prompts counts in each bootstrap resample; in the mean 1.

    As many prompts are drawn as make intervals as wide as Student's t has them, fewer than there are: drawing all is
    too certain of few prompts (Hesterberg 2015). (1, 1) of a single prompt, which can be drawn in one way: resamples of
    it would be equal, and look certain.
    """
    if count == 1:
        return np.ones((1, 1))
    drawn = max(1, round(count / widening(count, LEVEL) ** 2))
    times = np.random.default_rng(seed).multinomial(drawn, np.full(count, 1 / count), size=RESAMPLES)
    found: NDArray[np.float64] = (times * (count / drawn)).astype(np.float64)
    return found
