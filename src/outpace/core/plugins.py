"""Finding what registers itself: every module below a package is imported."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache


@cache
def import_all(package: str, entry: str = "") -> None:
    """Import every module of ``package``, those of its subpackages included.

    Of a package that has a module called ``entry``, that module alone is imported. A package is searched once.
    """
    found = list(pkgutil.iter_modules(importlib.import_module(package).__path__))
    entries = [one for one in found if one.name == entry]
    for one in entries or found:
        name = f"{package}.{one.name}"
        if one.ispkg:
            import_all(name, entry)
        else:
            importlib.import_module(name)
