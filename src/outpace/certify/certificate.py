"""Certificate: what a certification found, in words and in JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison inside a certification: its name and its figures; ``passed`` None where it could not decide."""

    name: str
    passed: bool | None
    max_abs_error: float | None = None
    p_value: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """``lossless``: True, False, or None where the level could not decide. Undefined figures are None.

    ``p_value`` is the smallest of the checks', adjusted for their number (Holm). ``detectable_bias`` is the smallest
    total variation distance that the samples would have shown nine times in ten.
    """

    method: str
    level: str
    lossless: bool | None
    verdict: str
    max_abs_error: float | None = None
    p_value: float | None = None
    detectable_bias: float | None = None
    first_difference: dict[str, Any] | None = None
    checks: tuple[Check, ...] = field(default=(), repr=False)

    def public(self) -> dict[str, Any]:
        """The JSON of ``outpace certify --json``."""
        return {
            "method": self.method,
            "lossless": self.lossless,
            "level": self.level,
            "p_value": self.p_value,
            "max_abs_error": self.max_abs_error,
            "detectable_bias": self.detectable_bias,
            "first_difference": self.first_difference,
            "verdict": self.verdict,
            "checks": [asdict(check) for check in self.checks],
        }
