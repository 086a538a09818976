"""``outpace eval-head``: accepted lengths and speed-up of a trained head, by decoding with its target."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import outpace
from outpace.bench.figure_text import bounds, number, percent, times
from outpace.bench.verdict import head_verdict
from outpace.cli import options as opt
from outpace.cli.bars import advancing
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import Interrupted
from outpace.cli.options import option
from outpace.cli.output import out, print_json, typed
from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput

_DEPTHS = 6
"""Positions that the table shows; JSON has all."""


@grouped()
def eval_head(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="HEAD",
            help="Folder of a trained head, or the kind of one that is shipped for the model: eagle3, ...",
        ),
    ],
    machine: Machine,
    *,
    prompts: opt.PromptFile,
    max_new_tokens: opt.MaxNewTokens = 64,
    method: Annotated[
        str | None, option(value="NAME", text="Use only this method. [dim]\\[default: all that use such a head][/]")
    ] = None,
    baselines: Annotated[
        bool, option("--baselines", text="Also measure the untrained head and a bigram table.")
    ] = False,
    data: Annotated[
        Path | None,
        option(
            value="FOLDER",
            text="Conversations to fit the bigram table on. [dim]\\[default: answers to the same prompts][/]",
        ),
    ] = None,
    record: Annotated[bool, option("--record", text="Store the figures in the head's training.json.")] = False,
    param: opt.Param = None,
    sampling: opt.Sampling,
    json: opt.Json = False,
) -> None:
    """Measure a head: accepted length by position and by task, draft time, speed-up."""
    opt.check_length(max_new_tokens)
    if data is not None and not baselines:
        raise BadInput("--data is for the bigram table of --baselines; give --baselines too")
    if record and not folder.is_dir():
        raise BadInput("--record writes into the head's folder; name that folder")
    from outpace.bench.head_subjects import choose_methods
    from outpace.heads.shipped import find_head

    machine.check()
    params, questions = sampling.params(), prompts.read()
    load = cache(machine.load)
    head = find_head(folder, load, machine.model)
    names = choose_methods(head.kind, method)
    with advancing("evaluation") as advance:
        found = outpace.evaluate_head(
            load,
            head.files.path,
            questions,
            methods=Drafting(param).settings(names, params),
            max_new_tokens=max_new_tokens,
            params=params,
            baselines=baselines,
            data=data,
            record=record,
            command=typed(),
            on_progress=advance,
        )
    if json:
        print_json(found)
    else:
        _show(found, out())
    if not found["complete"]:
        raise Interrupted.partial(found["drafters"][0]["prompts"], found["settings"]["prompts"])


def _show(found: dict[str, Any], console: Console) -> None:
    head = found["head"]
    console.print(
        f"[bold cyan]{escape(head['kind'])}[/]  {head['parameters']:,} weights, {head['bytes'] / 1e6:.1f} MB, "
        f"{head['vocabulary']:,} draft tokens, for {escape(head['target'])}; {found['settings']['prompts']} prompts"
    )
    rows = found["drafters"]
    table = Table(box=None, pad_edge=False)
    names = ("drafter", "tok/fwd", "accepted at depth 1, 2, ...", "draft ms", "tok/s", "speed-up")
    for name in names:
        table.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_row(row))
    console.print(table)
    for row in rows:
        if row["error"]:
            console.print(f"[red]{row['drafter']} failed[/]: {escape(row['error'])}", soft_wrap=True)
    categories = list(rows[0]["by_category"])
    if len(categories) > 1:
        console.print(_by_category(rows, categories))
    for key, said in _NOTES.items():
        console.print(f"[dim]{key}: {said}", soft_wrap=True)
    console.print(escape(head_verdict(found)), style="bold", soft_wrap=True)


_NOTES = {
    "tree, chain": "number of draft tokens chosen by measured costs; tree of 60, chain of 6: fixed",
    "tok/fwd": "tokens committed per forward of the target; autoregressive decoding has 1",
    "accepted at depth": "share of rounds in which the draft token at this depth was accepted",
}


def _row(row: dict[str, Any]) -> list[str]:
    shares = [f"{percent(share).removesuffix(' %')}" for share in row["per_position_acceptance"][:_DEPTHS]]
    return [
        _named(row),
        number(row["mean_acceptance_length"], 2),
        " ".join(shares) + (" %" if shares else "–"),
        number(row["draft_ms"], 2),
        number(row["decode_tokens_per_second"]),
        f"{times(row['speedup'])} {bounds(row['speedup_ci95']) if row['shape'] else ''}".rstrip(),
    ]


def _named(row: dict[str, Any]) -> str:
    return f"{row['drafter']} {row['shape'] or ''}".strip()


def _by_category(rows: list[dict[str, Any]], categories: list[str]) -> Table:
    """Tokens per forward by task."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tok/fwd by task", no_wrap=True)
    for category in categories:
        table.add_column(category, justify="right")
    for row in rows:
        parts = [row["by_category"].get(category, {}).get("mean_acceptance_length") for category in categories]
        table.add_row(_named(row), *(number(part, 2) for part in parts))
    return table
