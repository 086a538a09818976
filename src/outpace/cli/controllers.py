"""``outpace controllers``: what can decide how much is drafted, and the settings of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from outpace.cli import options as opt
from outpace.cli.output import err, fact_table, out, print_json

if TYPE_CHECKING:
    from outpace.controllers.named import NamedController


def controllers(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this controller and its settings.")] = None,
    json: opt.Json = False,
) -> None:
    """List all controllers, or show one with its settings."""
    from outpace.controllers.registry import controllers as registered, find_controller

    kinds = registered() if name is None else [find_controller(name)]
    if json:
        print_json([kind.public() for kind in kinds])
    elif name is None:
        _list(kinds)
    else:
        _show(kinds[0])


def _list(kinds: list[type[NamedController]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for kind in kinds:
        mark = " [yellow](bench only)[/]" if kind.bench_only else ""
        table.add_row(kind.name, escape(kind.summary) + mark)
    out().print(table)
    err().print(
        "\n[dim]A controller decides how much a method drafts, in place of the method's own (--controller NAME). None "
        "of them changes the output distribution. Which methods it fits, and its settings: outpace controllers NAME."
    )


def _show(kind: type[NamedController]) -> None:
    console = out()
    console.print(f"[bold cyan]{kind.name}[/]  {escape(kind.summary)}")
    facts = (("fits", kind.fits), ("aliases", ", ".join(kind.aliases)), ("paper", kind.paper))
    console.print(fact_table((label, escape(value)) for label, value in facts if value))
    fields = kind.Settings.model_fields
    if not fields:
        console.print("\nNo settings.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("--controller-param", "default", "meaning"):
        table.add_column(heading, no_wrap=heading != "meaning")
    for key, one in fields.items():
        default = str(one.get_default(call_default_factory=True))
        table.add_row(f"[cyan]{key}[/]", escape(default), escape(one.description or ""))
    console.print()
    console.print(table)
