"""``outpace rules``: what can judge drafts, what each rule promises, and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outpace.cli import options as opt
from outpace.cli.output import err, fact_table, out, print_json

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule


def rules(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this rule and its settings.")] = None,
    json: opt.Json = False,
) -> None:
    """List all acceptance rules, or show one with its settings."""
    from outpace.acceptance.registry import all_rules, find_rule, public

    found = all_rules() if name is None else [type(find_rule(name))]
    if json:
        print_json([public(rule) for rule in found])
    elif name is None:
        _list(found)
    else:
        _show(public(found[0]), found[0]().bound)


def _list(found: list[type[AcceptanceRule]]) -> None:
    from outpace.acceptance.registry import summary

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for lossless, title in ((True, "lossless"), (False, "lossy")):
        if table.row_count:
            table.add_row()
        table.add_row(Text(title, style="bold"))
        for rule in found:
            if rule.lossless == lossless:
                table.add_row(f"  {rule.name}", escape(summary(rule)))
    out().print(table)
    err().print(
        "\n[dim]Lossless rules keep the output distribution of autoregressive decoding. Lossy ones are used only where "
        "--rule, or a label such as pld@top-beta, names them; what a rule promises, and its settings: outpace rules "
        "NAME. To test a promise: outpace certify METHOD --rule NAME --level bound."
    )


def _show(rule: dict[str, Any], bound: object) -> None:
    console = out()
    console.print(f"[bold cyan]{rule['name']}[/]  {escape(rule['summary'])}")
    greedy = rule["bound"] and rule["bound"]["at_temperature_0"]
    facts = (
        ("aliases", ", ".join(rule["aliases"])),
        ("paper", rule["paper"]),
        ("lossless", "yes" if rule["lossless"] else "no"),
        ("bound", "none" if bound is None else str(bound)),
        ("at temperature 0", {None: "", "0": "greedy decoding"}.get(greedy, f"excess NLL <= {greedy}")),
    )
    console.print(fact_table((label, escape(value)) for label, value in facts if value))
    if not rule["settings"]:
        console.print("\nNo settings.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("--rule-param", "default", "range", "meaning"):
        table.add_column(heading, no_wrap=heading != "meaning")
    for one in rule["settings"]:
        table.add_row(
            f"[cyan]{one['name']}[/]", escape(str(one["default"])), escape(_range(one)), escape(one["description"])
        )
    console.print()
    console.print(table)


def _range(setting: dict[str, Any]) -> str:
    """The values that a setting takes."""
    if "enum" in setting:
        return ", ".join(setting["enum"])
    if setting["type"] == "boolean":
        return "true, false"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {setting[key]:g}" for key, sign in signs.items() if key in setting)
