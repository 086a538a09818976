"""``outpace methods``: what can draft, and the settings of each."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outpace.cli import options as opt
from outpace.cli.output import err, fact_table, out, print_json

if TYPE_CHECKING:
    from outpace.methods.registry import MethodInfo


def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this method and its settings.")] = None,
    json: opt.Json = False,
) -> None:
    """List all methods, or show one with its settings."""
    from outpace.methods.registry import find, methods as registered

    infos = registered() if name is None else [find(name)]
    if json:
        print_json([info.public() for info in infos])
    elif name is None:
        _list(infos)
    else:
        _show(infos[0])


def _list(infos: list[MethodInfo]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for family, members in groupby(infos, key=lambda info: info.family):
        if table.row_count:
            table.add_row()
        table.add_row(Text(family, style="bold"))
        for info in members:
            marks = [*([] if info.lossless else ["lossy"]), *([f"needs {_needs(info)}"] if info.needs else [])]
            mark = f" [yellow]({', '.join(marks)})[/]" if marks else ""
            table.add_row(f"  {info.name}", escape(info.summary) + mark)
    out().print(table)
    err().print(
        "\n[dim]All methods keep the output distribution of autoregressive decoding, except those marked lossy. Draft "
        "models and heads are shipped for some models. When to use a method, and its settings: outpace methods NAME. "
        "METHOD#NAME uses the draft model or head of that name (--draft-model NAME=MODEL, --head NAME=DIR)."
    )


def _needs(info: MethodInfo) -> str:
    return " and ".join(f"a {need}" for need in info.needs)


def _needs_and_shipped(info: MethodInfo) -> str:
    """What a method needs, and the models for which that is shipped."""
    from outpace.heads.shipped import shipped_for
    from outpace.methods.named_weights import DRAFT_LM

    said = []
    for need in info.needs:
        kind = info.head if need == "head" else DRAFT_LM if need == "draft model" else None
        models = ", ".join(shipped_for().get(kind or "", ()))
        said.append(f"a {need}" + (f" (shipped for {models})" if models else ""))
    return " and ".join(said)


def _show(info: MethodInfo) -> None:
    console = out()
    console.print(f"[bold cyan]{info.name}[/]  {escape(info.summary)}")
    facts = (
        ("when to use", info.when_to_use),
        ("needs", _needs_and_shipped(info) or "nothing but the model"),
        ("aliases", ", ".join(info.aliases)),
        ("family", info.family),
        ("paper", info.paper),
        ("lossless", "yes" if info.lossless else "no"),
        ("needs training", "yes" if info.trained else "no"),
    )
    console.print(fact_table((label, escape(value)) for label, value in facts if value))
    fields = info.settings.model_fields
    if not fields:
        console.print("\nNo settings.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("--param", "default", "meaning"):
        table.add_column(heading, no_wrap=heading != "meaning")
    for key, field in fields.items():
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
        table.add_row(f"[cyan]{key}[/]", escape(default), escape(field.description or ""))
    console.print()
    console.print(table)
