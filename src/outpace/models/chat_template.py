"""Rendering a model's chat template as transformers renders it, without importing transformers.

A template is a program that comes with the model. It runs in jinja2's sandbox, sees only plain data, and may use what
transformers offers: ``raise_exception``, ``strftime_now``, loop controls, ``{% generation %}`` blocks, and a ``tojson``
that escapes no HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which callers pass a message's reasoning; templates read the first, some the second."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of a conversation that ends where the assistant's answer begins.

    ``variables``: further names that the template sees, such as ``bos_token``; ``tools``: functions that the model may
    call, as OpenAI's API describes them. Raises whatever the template raises.
    """
    return _compiled(template).render(
        messages=[_message(one) for one in messages],
        tools=_plain(tools),
        documents=None,
        add_generation_prompt=True,
        **variables,
    )


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _PublicNamespace,
    }
    return environment.from_string(template)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates see it: plain data, without empty fields, its reasoning under each of its names."""
    shown = {str(key): _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((shown[name] for name in _REASONING if name in shown), None)
    return shown if reasoning is None else {"thinking": reasoning, **shown, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of JSON's types: what has methods of its own could let a template out of the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(one) for one in value) if type(value) in (list, tuple) else [*map(_plain, value)]
    return f"<{type(value).__name__}>"


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's part for training; here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict(...)`` in a template, without the type itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PublicNamespace(Namespace):
    """``namespace(...)`` in a template, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may call a field "self"
        this, *given = args
        fields = dict(*given, **kwargs)
        for name in fields:
            _check_name(name)
        Namespace.__init__(this, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: its name begins with an underscore")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
