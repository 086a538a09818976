"""Packages that are called like the function they are for: ``outpace.bench(...)`` beside ``outpace.bench.charts``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Let a call of ``package``, the name of an imported one, call ``function``; its signature and help are that one's.

    Importing a submodule binds the package's name to the module in its parent, so that a function of the same name
    would be hidden there.
    """

    class CallablePackage(ModuleType):
        """A package and the function that it is for."""

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(function)

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options)

    sys.modules[package].__class__ = CallablePackage
