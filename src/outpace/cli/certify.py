"""``outpace certify``: is a method lossless? Exit code 0 yes, 1 no, 2 could not tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import outpace.cli.options as opt
from outpace.cli.output import err, out, print_json
from outpace.cli.session import Machine

if TYPE_CHECKING:
    from outpace.certify.certificate import Certificate

NOT_LOSSLESS, INCONCLUSIVE = 1, 2


def certify(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="The method to certify; see: outpace methods.")],
    model: opt.ModelName = "smollm2",
    level: Annotated[
        str, typer.Option("--level", metavar="LEVEL", help="exact (toy targets), statistical or greedy (--model).")
    ] = "exact",
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Tokens (statistical) or runs to draw.")
    ] = 5000,
    alpha: Annotated[float, typer.Option("--alpha", metavar="A", help="Chance of refusing a lossless method.")] = 0.01,
    prompts: Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts for --model.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="Prompts to take (statistical, greedy), spread over the tasks.")
    ] = 14,
    cells: Annotated[
        int | None, typer.Option("--cells", metavar="N", help="Only N cells of the exact matrix, picked by --seed.")
    ] = None,
    param: opt.Param = None,
    rule: opt.Rule = None,
    draft_model: opt.DraftModel = None,
    head: opt.Head = None,
    datastore: opt.Datastore = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Say whether a method leaves the output distribution untouched."""
    from outpace.certify import check_options
    from outpace.cli.session import choose_methods
    from outpace.core.sampling import SamplingParams

    check_options(level, samples, alpha, cells)
    params = SamplingParams(temperature=0.0 if level == "greedy" else 1.0)
    choice = choose_methods([method], param, rule, params)
    settings = next(iter(choice.settings.values()))
    machine = Machine(model, draft_model, dtype, device, threads, datastore, head)
    opt.check_threads(threads)
    with _progress(quiet=json) as progress:
        task = progress.add_task("", total=None)

        def tell(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        arguments: dict[str, Any] = {"settings": settings, "rule": rule, "cells": cells, "on_progress": tell}
        if level != "exact":
            arguments |= _loaded(machine, prompts, limit)
        elif threads is None:
            _one_thread()
        from outpace.certify import certify as run

        certificate = run(method, level=level, samples=samples, alpha=alpha, seed=seed, **arguments)
    if json:
        print_json(certificate.public())
    else:
        _show(certificate)
    if certificate.lossless is not True:
        raise typer.Exit(NOT_LOSSLESS if certificate.lossless is False else INCONCLUSIVE)


def _loaded(machine: Machine, prompts: Path | None, limit: int) -> dict[str, Any]:
    from outpace.prompts.questions import load_prompts

    texts = [prompt.turns[0] for prompt in load_prompts(prompts, limit)]
    machine.check()
    model, draft_models = machine.load()
    return {
        "model": model,
        "draft_model": draft_models,
        "datastore": machine.datastore,
        "head": machine.heads,
        "prompts": texts,
    }


def _one_thread() -> None:
    """Toy targets are too small to share: a second thread only waits for the first."""
    import torch

    torch.set_num_threads(1)


def _progress(*, quiet: bool) -> Progress:
    console = err()
    return Progress(
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.description}"),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def _show(certificate: Certificate) -> None:
    console = out()
    mark = {True: "[green]lossless[/]", False: "[bold red]not lossless[/]", None: "[yellow]inconclusive[/]"}
    console.print(f"[bold cyan]{certificate.method}[/]  {mark[certificate.lossless]}  ({certificate.level} level)")
    console.print(f"  {certificate.verdict}")
    if certificate.detectable_bias is not None:
        console.print(f"  [dim]a bias of {certificate.detectable_bias:.3g} would have been found nine times in ten")
    if certificate.first_difference is not None:
        console.print(f"  [dim]first difference: {certificate.first_difference}")
    failed = [check for check in certificate.checks if check.passed is False]
    for check in failed[:5]:
        size = "" if check.max_abs_error is None else f"  off by {check.max_abs_error:.2g}"
        console.print(f"  [red]failed[/] {check.name}{size}", style="dim")
