"""The command-line reference, generated from the typer application: every command with its arguments and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

import typer

from outpace.cli import app

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    return markdown.replace(MARK, "\n\n".join(map(_section, commands()))) if MARK in markdown else markdown


def commands() -> Iterator[tuple[str, Any]]:
    """(``outpace NAME``, the command) of every command and subcommand, in the order of ``outpace --help``."""

    def below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", {})
        if path != "outpace":
            yield path, command
        for name, child in children.items():
            yield from below(f"{path} {name}", child)

    return below("outpace", typer.main.get_command(app))


def _section(entry: tuple[str, Any]) -> str:
    path, command = entry
    level = "##" if path.count(" ") == 1 else "###"
    parts = [f"{level} {path.removeprefix('outpace ')}", _prose(command.help or "")]
    if getattr(command, "commands", None):
        return "\n\n".join(parts)  # a group: its commands have the options
    parameters = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option"]
    usage = " ".join([path, *(_value(one) for one in arguments), "[OPTIONS]" * bool(options)])
    parts.append(f"```\n{usage.strip()}\n```")
    if arguments:
        parts.append(_listing("Arguments", [_entry(one) for one in arguments]))
    panels: dict[str, list[str]] = {}
    for one in options:
        panels.setdefault(getattr(one, "rich_help_panel", None) or "Options", []).append(_entry(one))
    parts += [_listing(title, entries) for title, entries in panels.items()]
    return "\n\n".join(parts)


def _value(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    name = str(parameter.metavar or parameter.name.upper())
    optional = parameter.param_type_name == "argument" and not parameter.required
    return f"[{name}]" if optional else name


def _listing(title: str, entries: list[str]) -> str:
    return f'<p class="group">{escape(title)}</p>\n<dl class="options">{"".join(entries)}</dl>'


def _entry(parameter: Any) -> str:
    metavar = _value(parameter)
    if parameter.param_type_name == "argument":
        names, value = f"<code>{escape(metavar)}</code>", ""
    else:
        spelled = [*parameter.opts, *parameter.secondary_opts]
        names = ", ".join(f"<code>{escape(name)}</code>" for name in spelled)
        value = f"<var>{escape(metavar)}</var>" if metavar else ""
    text = _inline(getattr(parameter, "help", None) or "")
    return f"<dt>{names}{value}</dt><dd>{text}{_default(parameter)}</dd>"


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", True)
    default = shown if isinstance(shown, str) else parameter.default
    if parameter.required:
        return ' <span class="default">Required.</span>'
    if default is None or callable(default) or default is False or default in ((), [], "") or shown is False:
        return ""
    if isinstance(shown, str):
        return f' <span class="default">Default: {escape(shown)}.</span>'
    return f' <span class="default">Default: <code>{escape(str(default))}</code>.</span>'


def _prose(text: str) -> str:
    """A command's help as Markdown, without rich's markup; ``\\b`` is how click keeps line breaks."""
    return re.sub(r"\[/?(?:bold|dim|cyan|green|yellow|red|i|b)?[^\]\n]{0,12}\](?!\()", _keep, text.replace("\b", ""))


def _keep(found: re.Match[str]) -> str:
    tag = found[0].strip("[]/ ")
    return "" if tag in ("", "bold", "dim", "cyan", "green", "yellow", "red", "i", "b") else found[0]


def _inline(text: str) -> str:
    return escape(_prose(text).replace("\\[", "["))
