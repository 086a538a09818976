"""Claims: what a paper says, what came here, and a verdict that follows from an interval alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["confirmed", "refuted", "undecided"]
LEVEL = 0.95
RESAMPLES = 2000


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
    """
    low, high = (float(one) for one in np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    verdict: Verdict = "confirmed" if low > threshold else "refuted" if high < threshold else "undecided"
    return Claim(says, found, (low, high), f"above {threshold:g}", verdict)


def holds(says: str, held: NDArray[np.bool_]) -> Claim:
    """The claim that something is so. ``held``: whether it is in each resample. Confirmed where it is in at least
    97.5 % of them, refuted where in at most 2.5 %."""
    share, edge = float(np.mean(held)), (1 - LEVEL) / 2
    verdict: Verdict = "confirmed" if share >= 1 - edge else "refuted" if share <= edge else "undecided"
    return Claim(says, share, None, "share of resamples in which it holds", verdict)


def by_formula(says: str, found: float, threshold: float, *, below: bool = False) -> Claim:
    """A claim about a figure without chance: it follows from the formula and the sizes that are named."""
    right = found < threshold if below else found > threshold
    word = "below" if below else "above"
    return Claim(says, found, None, f"by formula, {word} {threshold:g}", "confirmed" if right else "refuted")


def resampled_within(groups: Seq[str], seed: int = 0) -> NDArray[np.float64]:
    """As :func:`resampled`, each group of prompts by itself, so that none is empty. ``groups``: of each prompt."""
    found = np.zeros((RESAMPLES, len(groups)))
    for number, name in enumerate(dict.fromkeys(groups)):
        members = [at for at, one in enumerate(groups) if one == name]
        found[:, members] = resampled(len(members), seed + number)
    return found


def resampled(count: int, seed: int = 0) -> NDArray[np.float64]:
    """(RESAMPLES, count): how often each of ``count`` prompts is in each bootstrap resample."""
    generator = np.random.default_rng(seed)
    drawn: NDArray[np.float64] = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(float)
    return drawn
