"""Packages that are called like the function they are for: ``outpace.bench(...)`` beside ``outpace.bench.charts``."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(package: str, function: str) -> None:
    """Let a call of ``package``, the name of an imported one, call ``function`` ("module:name").

    The function is imported when it is first called or described. Importing a submodule binds the package's name to the
    module in its parent, so that a function of the same name would be hidden there.
    """

    class CallablePackage(ModuleType):
        """A package and the function that it is for."""

        @property
        def __wrapped__(self) -> Callable[..., Any]:  # inspect.signature and IDEs look here
            found: Callable[..., Any] = pkgutil.resolve_name(function)
            return found

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return self.__wrapped__(*arguments, **options)

    sys.modules[package].__class__ = CallablePackage
