"""Siblings: requests with one prompt. The first to join reads it, and the others copy its K/V."""

from __future__ import annotations

from collections.abc import Iterable

from outpace.engine.request import Generation


def lender(one: Generation, active: Iterable[Generation]) -> Generation | None:
    """A sibling that has read the prompt, if any."""
    return next((other for other in active if _siblings(one, other)), None)


def read_now(one: Generation, reading: Iterable[Generation]) -> bool:
    """Whether a sibling is reading the prompt."""
    return any(_siblings(one, other) for other in reading)


def _siblings(one: Generation, other: Generation) -> bool:
    shared = one.request.siblings
    return shared is not None and shared is other.request.siblings and one is not other
