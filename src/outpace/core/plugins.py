"""Finding what registers itself: every module below a package is imported."""

from __future__ import annotations

import importlib
import pkgutil


def import_all(package: str) -> None:
    """Import every module of ``package``, those of its subpackages included."""
    module = importlib.import_module(package)
    for entry in pkgutil.walk_packages(module.__path__, f"{package}."):
        importlib.import_module(entry.name)
