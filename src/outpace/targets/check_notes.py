"""Notes that a fast target was compared with plain PyTorch and found right, so that later loads need not repeat it.

    <cache>/checks/<digest>.json     one for each weights, precision, build of the kernels, machine and version

A note that cannot be read counts as none; where none can be written, every load compares.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outpace.core.errors import BadInput
from outpace.core.files import read_json, write_atomically
from outpace.core.version import __version__
from outpace.models.gguf_cache import cache_dir
from outpace.targets.cost_table import instructions, kernels

FORMAT = 1


def is_noted(weights: str, precision: str) -> bool:
    """Whether a target of these weights in this precision was found right here before."""
    about = _about(weights, precision)
    with suppress(BadInput):
        return read_json(_place(about)) == about
    return False


def note(weights: str, precision: str) -> None:
    """Write down that it was, if the cache can be written."""
    about = _about(weights, precision)
    place = _place(about)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps(about, indent=1).encode())


def _about(weights: str, precision: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "weights": weights,
        "precision": precision,
        "kernels": kernels(),
        "instructions": instructions(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "outpace": __version__,
        "packing": _packing(),
    }


@cache
def _packing() -> str:
    """Of the code between the files and the kernels, which may change within a version."""
    found = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "dense").glob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _place(about: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "checks" / f"{name}.json"
