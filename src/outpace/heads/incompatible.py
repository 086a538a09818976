"""IncompatibleHead: why a head does not load, and which of the checks failed."""

from __future__ import annotations

from typing import Literal

from outpace.core.errors import BadInput

CheckName = Literal[
    "configuration", "target", "weights", "keys", "shapes", "numbers", "vocabulary", "layers", "fingerprint", "decoding"
]
"""What ``outpace validate-head`` checks, in the order of its report."""


class IncompatibleHead(BadInput):
    """A head that is damaged, or does not fit its target. ``check``: the check that failed."""

    def __init__(self, message: str, check: CheckName) -> None:
        super().__init__(message)
        self.check = check
