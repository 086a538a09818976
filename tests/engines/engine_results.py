"""What the tests with another engine have found, for the table of docs/engines.md: kept over several runs of them.

The environment variable OUTPACE_ENGINES names the file; without it nothing is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def keep(engine: str, found: dict[str, Any]) -> None:
    """Add what one run has found of an engine."""
    if place := os.environ.get("OUTPACE_ENGINES"):
        file = Path(place)
        kept = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**kept, engine: merged(kept.get(engine, {}), found)}, indent=1))


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
