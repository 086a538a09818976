"""``outpace eval-head``: what a trained head is worth, by decoding with its target."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import outpace.cli.options as opt
from outpace.cli.output import advancing, err, out, print_json
from outpace.cli.session import Machine
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.bench.settings import BenchSettings
    from outpace.prompts.prompt import Prompt

_INTERRUPTED = 130
_DEPTHS = 6
"""Positions that the table shows; JSON has all."""


def eval_head(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A trained head: the --out of outpace train.")],
    model: opt.ModelName = "smollm2",
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Questions as for outpace bench. [dim]\\[default: embedded][/]"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="Use N prompts, taken from all categories in turn.")
    ] = None,
    max_new_tokens: opt.MaxNewTokens = 64,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", metavar="NAME", help="Draft with this method. [dim]\\[default: all that take the head][/]"
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Measure the untrained head and a bigram table beside it.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Conversations that the table is fitted on. [dim]\\[default: the answers to the very prompts][/]",
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the measured figures with the head, in its training.json.")
    ] = False,
    param: opt.Param = None,
    temperature: opt.Temperature = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Measure a head: accepted length by position and by task, draft time, speed-up."""
    opt.check_length(max_new_tokens)
    if data is not None and not baselines:
        raise BadInput("--data is for the bigram table of --baselines; give both")
    machine = Machine(model, None, dtype, device, threads)
    from outpace.bench.settings import BenchSettings
    from outpace.core.sampling import SamplingParams
    from outpace.heads.head_folder import open_head
    from outpace.prompts.questions import load_prompts

    open_head(folder)  # what is no head is said before a model is loaded for it
    machine.check()
    questions = load_prompts(prompts, limit)
    settings = BenchSettings(
        max_new_tokens=max_new_tokens,
        params=SamplingParams(temperature=temperature, seed=seed),
        command=shlex.join(["outpace", *sys.argv[1:]]),
    )
    found = _measured(machine, folder, questions, settings, method, param, baselines, data)
    if record and found["complete"]:
        from outpace.bench.head_evaluation import record as keep

        keep(folder, found)
    if json:
        print_json(found)
    else:
        _show(found, out())
    if not found["complete"]:
        err().print("[yellow]interrupted[/]: the figures are of the prompts that were finished")
        raise typer.Exit(_INTERRUPTED)


def _measured(
    machine: Machine,
    folder: Path,
    prompts: list[Prompt],
    settings: BenchSettings,
    method: str | None,
    param: list[str] | None,
    baselines: bool,
    data: Path | None,
) -> dict[str, Any]:
    """Load, build, decode."""
    from outpace.bench.bigram import Bigrams
    from outpace.bench.head_evaluation import evaluate, head_facts
    from outpace.bench.head_subjects import bigram_subjects, head_subjects, own_answers, untrained_subjects
    from outpace.bench.head_subjects import choose_methods as fitting
    from outpace.bench.results import plain_figures
    from outpace.cli.session import choose_methods
    from outpace.heads.head_folder import open_head
    from outpace.heads.untrained import as_training_begins

    model, _ = machine.load()
    head = open_head(folder).load(model.target)
    names = fitting(head.config.kind, method)
    chosen = choose_methods(names, param, None, settings.params).settings
    subjects = head_subjects(model, head, chosen)
    fitted = None
    if baselines:
        before = as_training_begins(head, model.target, settings.params.seed)
        subjects += untrained_subjects(model, before, chosen)
        if data is not None:
            table, fitted = Bigrams.of(data, model.target.vocab_size), str(data)
        else:
            table, fitted = own_answers(model, prompts, settings.max_new_tokens), "the answers to these prompts"
        nodes = [int(one["max_nodes"]) for one in chosen.values() if "max_nodes" in one]  # as many as the head's
        subjects += bigram_subjects(model, table, *nodes[:1])
    with advancing() as advance:
        result = evaluate(model, subjects, prompts, settings, advance)
    result["settings"] |= {"methods": names, "method_settings": plain_figures(chosen), "bigrams_of": fitted}
    return {**result, "head": plain_figures(head_facts(folder, head))}


def _show(found: dict[str, Any], console: Console) -> None:
    head = found["head"]
    console.print(
        f"[bold cyan]{escape(head['kind'])}[/]  {head['parameters']:,} weights, {head['bytes'] / 1e6:.1f} MB, "
        f"{head['vocabulary']:,} words, for {escape(head['target'])}; {found['settings']['prompts']} prompts"
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


_NOTES = {
    "tree, chain": "as many draft tokens as pay; of 60 and of 6: that many in every round, whether they pay or not",
    "tok/fwd": "tokens committed per forward of the target, by decoding; plain decoding has 1",
    "accepted at depth": "share of all rounds in which a draft token at this depth was accepted",
}


def _row(row: dict[str, Any]) -> list[str]:
    from outpace.bench.figure_text import number, percent, times

    shares = [f"{percent(share).removesuffix(' %')}" for share in row["per_position_acceptance"][:_DEPTHS]]
    bounds = row["speedup_ci95"]
    return [
        _named(row),
        number(row["mean_acceptance_length"], 2),
        " ".join(shares) + (" %" if shares else "–"),
        number(row["draft_ms"], 2),
        number(row["decode_tokens_per_second"]),
        times(row["speedup"]) + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds and row["shape"] else ""),
    ]


def _named(row: dict[str, Any]) -> str:
    return f"{row['drafter']} {row['shape'] or ''}".strip()


def _by_category(rows: list[dict[str, Any]], categories: list[str]) -> Table:
    """Tokens per forward by task."""
    from outpace.bench.figure_text import number

    table = Table(box=None, pad_edge=False)
    table.add_column("tok/fwd by task", no_wrap=True)
    for category in categories:
        table.add_column(category, justify="right")
    for row in rows:
        parts = [row["by_category"].get(category, {}).get("mean_acceptance_length") for category in categories]
        table.add_row(_named(row), *(number(part, 2) for part in parts))
    return table
