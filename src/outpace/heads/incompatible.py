"""Unfit: why a head does not load, and which of the checks found it."""

from __future__ import annotations

from typing import Literal

from outpace.core.errors import BadInput

CheckName = Literal[
    "configuration",
    "target",
    "weights",
    "keys",
    "shapes",
    "numbers",
    "vocabulary",
    "layers",
    "fingerprint",
    "decoding",
]
"""What is checked of a head, in order."""


class IncompatibleHead(BadInput):
    """A head that is damaged, or does not fit its target. ``check``: what it does not pass."""

    def __init__(self, message: str, check: CheckName) -> None:
        super().__init__(message)
        self.check = check
