"""EngineCertificate: what was found about a server's speculation, in words and in JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from outpace.certify.certificate import Check, Rescored
from outpace.certify.numerics import Numerics


@dataclass(frozen=True, slots=True)
class EngineCertificate:
    """``lossless``: False where a check refuses; None where nothing could be decided, or nothing was drafted.

    ``reference``: what the engine was compared with. ``p_value``: the smallest of the sampled tests, adjusted for their
    number (Bonferroni). ``null_bias``: the total variation distance that the tests allow, from ``numerics``.
    ``detectable_bias``: the largest of what each test would have shown nine times in ten. ``speculation``: draft tokens
    and accepted ones during the tests, where the server counts them. ``inconclusive``: something speaks against it that
    could not be decided, or no test was possible. ``remarks``: tests that were left out, and why.
    """

    endpoint: str
    model: str
    reference: str
    lossless: bool | None
    inconclusive: bool
    verdict: str
    sampling: str
    logprobs: dict[str, Any] | None = None
    speculation: dict[str, int] | None = None
    numerics: Numerics | None = None
    alpha: float = 0.01
    null_bias: float = 0.0
    p_value: float | None = None
    detectable_bias: float | None = None
    first_difference: dict[str, Any] | None = None
    rescored: Rescored | None = None
    checks: tuple[Check, ...] = field(default=(), repr=False)
    remarks: tuple[str, ...] = ()

    def public(self) -> dict[str, Any]:
        """The JSON of ``outpace certify --endpoint URL --json``."""
        return asdict(self)
