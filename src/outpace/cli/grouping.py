"""Options in groups: a command names a group as one parameter, and typer sees the group's options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def grouped(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take dataclasses of options: each of their fields, annotated for typer, becomes an option.

    ``defaults``: of options of a group, where the command has its own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[type[Any], list[str]]] = {}
        for one in inspect.signature(command, eval_str=True).parameters.values():
            if is_dataclass(one.annotation) and isinstance(one.annotation, type):
                hints = get_type_hints(one.annotation, include_extras=True)
                for field in fields(one.annotation):
                    own = inspect.Parameter.empty if field.default is MISSING else field.default
                    default = defaults.get(field.name, own)
                    parameters.append(_keyword(field.name, default, hints[field.name]))
                groups[one.name] = one.annotation, [field.name for field in fields(one.annotation)]
            else:
                parameters.append(_keyword(one.name, one.default, one.annotation))

        def run(**values: Any) -> None:
            for name, (group, options) in groups.items():
                values[name] = group(**{option: values.pop(option) for option in options})
            command(**values)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
