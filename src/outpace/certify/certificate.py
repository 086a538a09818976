"""Certificate: what a certification found, in words and in JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison inside a certification: its name and its figures; ``passed`` None where it could not decide.

    ``detectable_bias``: what this test would have shown nine times in ten, where it is known for each test.
    """

    name: str
    passed: bool | None
    max_abs_error: float | None = None
    p_value: float | None = None
    note: str = ""
    detectable_bias: float | None = None


@dataclass(frozen=True, slots=True)
class Rescored:
    """Prefixes that rounds had scored, scored again alone. Distances are total variation.

    ``differing``: how many were further apart than ``tolerance``. ``prompt_tokens`` and ``output_tokens``: of the
    prefix with the ``largest_difference``, draft tokens among the latter; None without prefixes.
    """

    prefixes: int
    differing: int
    largest_difference: float
    tolerance: float
    prompt_tokens: int | None
    output_tokens: int | None

    @property
    def passed(self) -> bool:
        """Whether all were within the tolerance."""
        return not self.differing

    def __str__(self) -> str:
        if self.prompt_tokens is None or self.output_tokens is None:
            return "no prefix was rescored"
        if not self.passed:
            return (
                f"{self.differing} of {self.prefixes} prefixes have another distribution when they are scored alone; "
                f"most that of {self.prompt_tokens + self.output_tokens} tokens ({self.prompt_tokens} of the prompt): "
                f"{self.largest_difference:.2g} apart (total variation), tolerance {self.tolerance:.2g}"
            )
        if not self.tolerance:
            return f"{self.prefixes} prefixes rescored alone, equal bit for bit"
        return (
            f"{self.prefixes} prefixes rescored alone, at most {self.largest_difference:.2g} apart (total variation), "
            f"tolerance {self.tolerance:.2g}"
        )


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """What was found of a rule's promise with one choice of settings (``rule``).

    ``holds``: None where it promises nothing. ``lossless``: the settings mean lossless, and outputs are so.
    ``nodes``: how many were compared; ``outputs``: settings in which whole outputs were; ``largest``: the largest
    divergence of nodes; ``nearest``: the largest share of a limit that was reached, above temperature 0 and at it,
    where there are limits. ``total_variation``: the largest of whole outputs. ``where``: what broke the promise.
    """

    rule: str
    measure: str | None
    limit: str | None
    lossless: bool
    holds: bool | None
    nodes: int
    outputs: int
    largest: float | None
    nearest: tuple[float, ...]
    total_variation: float
    where: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """``lossless``: True, False, or None where the level could not decide. Undefined figures are None.

    ``p_value`` is the smallest of the checks', adjusted for their number (Holm). ``detectable_bias`` is the smallest
    total variation distance that the samples would have shown nine times in ten. ``sampling``: the parameters that it
    was certified with, in words; for the exact level's own matrix "". ``rescored``: of the statistical level.
    """

    method: str
    level: str
    lossless: bool | None
    verdict: str
    max_abs_error: float | None = None
    p_value: float | None = None
    detectable_bias: float | None = None
    first_difference: dict[str, Any] | None = None
    sampling: str = ""
    rescored: Rescored | None = None
    checks: tuple[Check, ...] = field(default=(), repr=False)
    bounds: tuple[BoundCheck, ...] = field(default=(), repr=False)
    """Of level 'bound': one for each choice of the rule's settings."""

    @property
    def passed(self) -> bool | None:
        """What the level decides: whether the method is lossless; of level 'bound', whether no bound was broken; of
        level 'population', whether beams or particles have the law that they are stated to have."""
        if self.level == "population":
            return all(check.passed is not False for check in self.checks)
        if self.level == "bound":
            return all(one.holds is not False for one in self.bounds)
        return self.lossless

    def public(self) -> dict[str, Any]:
        """The JSON of ``outpace certify --json``."""
        return {
            "method": self.method,
            "lossless": self.lossless,
            "level": self.level,
            "passed": self.passed,
            "sampling": self.sampling,
            "p_value": self.p_value,
            "max_abs_error": self.max_abs_error,
            "detectable_bias": self.detectable_bias,
            "first_difference": self.first_difference,
            "rescored": None if self.rescored is None else asdict(self.rescored),
            "verdict": self.verdict,
            "checks": [asdict(check) for check in self.checks],
            "bounds": [asdict(one) for one in self.bounds],
        }
