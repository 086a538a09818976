"""Everything public is listed, and says what it takes, returns and raises, with types and an example."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import outpace

VALUES = {"__version__"}
ERRORS = {"BadInput", "OutpaceError"}


def public_methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What a class itself declares for its users."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and inspect.isfunction(value):
            yield name, value


def described() -> list[tuple[str, Callable[..., Any]]]:
    found: list[tuple[str, Callable[..., Any]]] = []
    for name in sorted({*outpace.__all__} - VALUES - ERRORS):
        value = getattr(outpace, name)
        if inspect.isclass(value):
            found += [(f"{name}.{method}", function) for method, function in public_methods(value)]
        else:
            found.append((name, inspect.unwrap(value)))
    return found


def test_dir_lists_the_public_names_and_nothing_else() -> None:
    listed = [name for name in dir(outpace) if not name.startswith("__")]
    assert listed == sorted(set(outpace.__all__) - VALUES)
    assert {"generate", "stream", "agenerate", "astream", "chat", "load", "accelerate", "Model", "Result"} <= set(
        listed
    )
    for name in listed:
        assert getattr(outpace, name) is not None


@pytest.mark.parametrize(("name", "function"), described(), ids=[name for name, _ in described()])
def test_every_public_function_has_types_and_a_docstring(name: str, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    documented = inspect.getdoc(function)
    assert documented, name
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        assert one.annotation is not one.empty, f"{name}: {one.name} has no type"
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            assert f"{one.name}" in documented or name == "AcceleratedModel.to", f"{name}: {one.name} is not explained"
    assert signature.return_annotation is not signature.empty, f"{name} does not say what it returns"


@pytest.mark.parametrize("name", ["generate", "stream", "agenerate", "astream", "chat", "accelerate"])
def test_calls_explain_every_parameter_with_errors_and_an_example(name: str) -> None:
    function = getattr(outpace, name)
    documented = " ".join((inspect.getdoc(function) or "").split())
    for parameter in inspect.signature(function).parameters:
        assert parameter in documented, f"{name}: {parameter} is not explained"
    assert "Raises BadInput" in documented
    assert ">>> " in documented


@pytest.mark.parametrize("name", sorted({*outpace.__all__} - VALUES))
def test_every_public_class_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(outpace, name)), name


def test_help_answers() -> None:
    shown = pydoc.plain(pydoc.render_doc(outpace.generate))
    for word in ("max_new_tokens: int = 256", "temperature: float = 0.0", "n: int | None = None", "Raises BadInput"):
        assert word in shown
    assert "generate(" in pydoc.plain(pydoc.render_doc(outpace.Model))
