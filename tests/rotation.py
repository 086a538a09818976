"""Which part of the certification runs today: one of a few slices, another one every day.

``make test`` has today's slice, and ``make certify`` the others. A failure is repeated with OUTPACE_SEED=YYYYMMDD.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import date
from zlib import crc32

import pytest

SEED = int(os.environ.get("OUTPACE_SEED") or date.today().strftime("%Y%m%d"))
DAYS = 5
"""Slices."""


def rotate(items: Iterable[pytest.Item]) -> None:
    """Mark those of the tests marked ``certification`` slow whose turn is on another day."""
    for one in items:
        if one.get_closest_marker("certification") and (crc32(one.nodeid.encode()) + SEED) % DAYS:
            one.add_marker(pytest.mark.slow)
