"""``outpace export-head``, ``import-head``, ``validate-head``: heads to and from other engines, and their checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import outpace
from outpace.cli import options as opt
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.output import fact_table, out, print_json
from outpace.cli.session import Machine
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.certify.validate_head import Report

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a head, in the layout of outpace or of another engine.")
]
NewFolder = Annotated[Path, option("--out", "-o", value="DIR", text="Folder to create.")]


@grouped()
def export_head(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|KIND",
            help="Folder of a head, in the layout of outpace or of another engine, or the kind of one that is shipped "
            "for the model, such as eagle3.",
        ),
    ],
    output: NewFolder,
    layout: Annotated[
        str, option(value="NAME", text="Layout to write: speculators (vLLM), eagle, medusa, or hf (transformers).")
    ],
    machine: Machine,
    verifier: Annotated[
        str | None,
        option(value="NAME", text="Name of the model in the exported files. [dim]\\[default: its hub id][/]"),
    ] = None,
    json: opt.Json = False,
) -> None:
    """Convert a head to another engine's layout, including the weights that it shares with its model."""
    from outpace.heads.exchange import published

    machine.check()
    head = outpace.export_head(machine.load, folder, output, layout, verifier=verifier)
    model = verifier or published(machine.model)
    _written(output, {"kind": head.kind, "layout": layout, "model": model}, json)


@grouped()
def import_head(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a head in another engine's layout.")],
    output: NewFolder,
    machine: Machine,
    json: opt.Json = False,
) -> None:
    """Convert a head from another engine's layout to that of outpace."""
    machine.check()
    head = outpace.import_head(machine.load, folder, output)
    _written(output, {"kind": head.kind, "layout": "outpace", "model": machine.model}, json)


@grouped()
def validate_head(
    folder: Folder,
    machine: Machine,
    max_new_tokens: Annotated[int, option(value="N", text="Number of tokens to decode with it.")] = 32,
    json: opt.Json = False,
) -> None:
    """Check a head: keys, shapes, vocabulary, layers, fingerprint, and an answer decoded with it."""
    opt.check_length(max_new_tokens)
    if not folder.is_dir():
        raise BadInput(f"there is no head at '{folder}': no such folder")
    machine.check()
    from outpace.certify.validate_head import validate

    report = validate(folder, machine.load(), tokens=max_new_tokens)
    if json:
        print_json(report.public())
    else:
        _show(report)
    wrong = [one for one in report.checks if one.ok is False]
    if wrong:
        raise BadInput(f"{wrong[0].name}: {wrong[0].message}")


def _written(folder: Path, facts: dict[str, Any], json: bool) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if json:
        print_json({"path": str(folder), **facts, "files": files})
        return
    rows = [("head", f"[bold cyan]{escape(str(folder))}[/]"), *((key, escape(str(facts[key]))) for key in facts)]
    rows += [("file", f"{escape(name)}  {size / 1e6:,.2f} MB") for name, size in files.items()]
    out().print(fact_table(rows))


def _show(report: Report) -> None:
    console = out()
    title = f"{report.kind or 'head'} in layout {report.layout or 'unknown'}"
    console.print(f"[bold cyan]{escape(report.folder)}[/]  {escape(title)}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    mark = {True: "[green]ok[/]", False: "[bold red]wrong[/]", None: "[dim]-[/]"}
    for one in report.checks:
        table.add_row(mark[one.ok], one.name, escape(one.message))
    console.print(table)
