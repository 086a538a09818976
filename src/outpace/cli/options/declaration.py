"""How an option is declared: its flags, what stands for its value in the help, its group and its text."""

from __future__ import annotations

from typing import Any

import typer

DRAFTING, SAMPLING, GRAMMAR, MACHINE = "Drafting", "Sampling", "Grammar", "Machine"
"""Groups of options in the help."""


def option(*flags: str, value: str | None = None, panel: str | None = None, text: str) -> Any:
    """An option's declaration. ``value``: what stands for its value in the help; flags have none. ``panel``: group."""
    return typer.Option(*flags, metavar=value or "", rich_help_panel=panel, help=text)
