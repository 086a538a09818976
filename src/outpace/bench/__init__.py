"""Bench: methods beside each other, and beside other libraries; the report for terminal, JSON and HTML.

The package can be called: ``outpace.bench(model, ["pld", "sam"])`` is :func:`outpace.bench.benchmark.bench`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that is named as the function in it: importing any part of it must not hide the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from outpace.bench.benchmark import bench

        return bench(*args, **options)


sys.modules[__name__].__class__ = _Callable
