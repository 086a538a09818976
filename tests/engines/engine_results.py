"""What the tests with another engine have found, for the table of docs/engines.md: kept over several runs of them.

The environment variable OUTPACE_ENGINES names the file; without it nothing is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from outpace.core.files import write_atomically

FILE, RUNS = "OUTPACE_ENGINES", "OUTPACE_ENGINE_RUNS"


def wanted(label: str) -> bool:
    """Whether a run is to be done: all are, unless OUTPACE_ENGINE_RUNS names some, "eagle3;Proposer: sam"."""
    only = os.environ.get(RUNS)
    return not only or label in only.split(";")


def missing(reason: str) -> NoReturn:
    """Skip a test whose engine is not installed; under ``make engines``, which installs it, that is a failure."""
    if os.environ.get(FILE):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def keep(engine: str, found: dict[str, Any]) -> None:
    """Add what one run has found of an engine, if it found any."""
    place = os.environ.get(FILE)
    if place and found.get("version"):
        file = Path(place)
        kept = json.loads(file.read_text()) if file.is_file() else {}
        now = {**kept, engine: merged(kept.get(engine, {}), found)}
        write_atomically(file, json.dumps(now, indent=1).encode())


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What several runs have found, each of some configurations: the later result of one stays, and results of another
    version of the engine leave."""
    if before.get("version") != now.get("version"):
        return now
    inner = {
        name: {**before[name], **value}
        for name, value in now.items()
        if isinstance(value, dict) and isinstance(before.get(name), dict)
    }
    return {**before, **now, **inner}
