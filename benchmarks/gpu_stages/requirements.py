"""What an interpreter lacks of the packages that outpace depends on; outpace itself may be a folder on its path."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def missing() -> list[str]:
    """Requirements, as pyproject.toml has them, of packages that are not installed. Versions are not compared."""
    required: list[str] = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    return [one for one in required if not _installed(re.split(r"[<>=!~ \[]", one)[0])]


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
