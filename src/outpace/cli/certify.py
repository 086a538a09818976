"""``outpace certify``: is a method or a server's speculation lossless, does a rule keep its bound?

Exit code 0: yes; 1: no; 2: inconclusive.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import outpace
from outpace.certify import LEVELS, TOYS, check_method, check_options, check_params, check_rule
from outpace.certify.certificate import Certificate
from outpace.cli import options as opt
from outpace.cli.certify_endpoint import EngineOptions, certify_endpoint
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.output import out, print_json
from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput
from outpace.core.progress import stage

NOT_LOSSLESS, INCONCLUSIVE = 1, 2
_UNITS = {"exact": "cells", "statistical": "tokens", "greedy": "prompts", "bound": "settings"}


@grouped(limit=14, temperature=None)
def certify(
    method: Annotated[
        str | None, typer.Argument(metavar="METHOD", help="The method to certify; see: outpace methods.")
    ] = None,
    *,
    machine: Machine,
    level: Annotated[
        str,
        option(
            value="LEVEL",
            text="exact (on small built-in targets), statistical or greedy (on --model); bound: whether the rule keeps "
            "what it promises (on small built-in targets).",
        ),
    ] = "exact",
    samples: Annotated[int, option(value="N", text="Number of tokens (statistical) or runs (exact) to sample.")] = 5000,
    alpha: Annotated[float, option(value="A", text="Probability of rejecting a lossless method.")] = 0.01,
    prompts: opt.PromptFile,
    cells: Annotated[
        int | None,
        option(
            value="N",
            text="Test only N cells of the exact matrix, selected by --seed; bound: with each choice of settings.",
        ),
    ] = None,
    drafting: Drafting,
    sampling: opt.Sampling,
    engine: EngineOptions,
    json: opt.Json = False,
) -> None:
    """Test whether a method is lossless, that is, keeps the model's output distribution; or whether a server's is.

    Without sampling options: all settings of the exact matrix, temperature 1 (statistical) or 0 (greedy). A server
    (--endpoint): temperature 1, and greedy answers.
    """
    engine.check(method)
    check_options(level, samples, alpha, cells)
    if engine.server:
        if level != "exact" or cells is not None or (engine.endpoint is not None and drafting != Drafting()):
            raise BadInput(
                "--level, --cells and the options of drafting belong to METHOD; a server has its own settings"
            )
        found = certify_endpoint(engine, method, machine, drafting, prompts, sampling, samples, alpha, json=json)
        if found.lossless is False or found.inconclusive:
            raise typer.Exit(NOT_LOSSLESS if found.lossless is False else INCONCLUSIVE)
        return
    assert method is not None
    judge = drafting.judge()
    greedy = judge is not None and judge.greedy_only and level in TOYS
    usual = 0.0 if greedy else LEVELS[level]
    params = sampling.params() if sampling.temperature is not None else sampling.params(temperature=usual)
    given = params if sampling.given else None
    check_params(level, given)
    check_rule(level, judge)
    chosen = drafting.settings([method], params)
    opt.check_threads(machine.threads)
    loaded: dict[str, Any] = {}
    if level not in TOYS:
        texts = [prompt.turns[0] for prompt in prompts.read_unconstrained("certify")]
        for rule in drafting.rules(chosen):
            check_rule(level, rule)
        check_method(method, level)
        machine.check()
        drafting.check()
        loaded = {"model": machine.load(), "prompts": texts, **drafting.load(machine)}
    else:
        loaded = {"controller": drafting.choice()}
        if machine.threads is None:
            import torch

            torch.set_num_threads(1)  # toy targets are too small to share: a second thread only waits for the first
    with stage("certification", unit=_UNITS[level]) as at:
        certificate = outpace.certify(
            method,
            level=level,
            params=given,
            samples=samples,
            alpha=alpha,
            seed=sampling.seed or 0,
            settings=chosen.popitem()[1],
            rule=judge,
            cells=cells,
            on_progress=lambda done, total, doing: at.move(done, total, "" if doing == level else doing),
            **loaded,
        )
    if json:
        print_json(certificate.public())
    else:
        _show(certificate)
    if certificate.passed is not True:
        raise typer.Exit(NOT_LOSSLESS if certificate.passed is False else INCONCLUSIVE)


def _show(certificate: Certificate) -> None:
    console = out()
    if certificate.bounds:
        _show_bounds(certificate)
        return
    if certificate.level == "population":
        stated = "[green]as stated[/]" if certificate.passed else "[bold red]not as stated[/]"
        console.print(f"[bold cyan]{certificate.method}[/]  {stated}  (population level)", soft_wrap=True)
        console.print(f"  {certificate.verdict}")
        return
    mark = {True: "[green]lossless[/]", False: "[bold red]not lossless[/]", None: "[yellow]inconclusive[/]"}
    sampling = f", {certificate.sampling}" if certificate.sampling else ""
    level = f"{certificate.level} level{sampling}"
    console.print(f"[bold cyan]{certificate.method}[/]  {mark[certificate.lossless]}  ({level})", soft_wrap=True)
    console.print(f"  {certificate.verdict}")
    if certificate.detectable_bias is not None:
        console.print(
            f"  [dim]a bias of {certificate.detectable_bias:.3g} would have been detected with 90 % probability"
        )
    if certificate.first_difference is not None:
        console.print(f"  [dim]first difference: {certificate.first_difference}")
    failed = [check for check in certificate.checks if check.passed is False]
    for check in failed[:5]:
        size = "" if check.max_abs_error is None else f"  off by {check.max_abs_error:.2g}"
        console.print(f"  [red]failed[/] {check.name}{size}", style="dim")


def _show_bounds(certificate: Certificate) -> None:
    console = out()
    holds = certificate.passed
    mark = "[green]no bound broken[/]" if holds else "[bold red]bound broken[/]"
    console.print(f"[bold cyan]{certificate.method}[/]  {mark}  (bound level)", soft_wrap=True)
    console.print(f"  {escape(certificate.verdict)}")
    table = Table(box=None, header_style="bold")
    for heading in ("rule", "bound", "holds", "largest", "of its limit", "outputs (TV)"):
        table.add_column(heading)
    for one in certificate.bounds:
        words = {True: "yes", False: "no", None: "-"}[one.holds]
        table.add_row(
            escape(one.rule),
            escape("none" if one.measure is None else f"{one.measure} <= {one.limit}"),
            "lossless" if one.lossless else words,
            "-" if one.largest is None else f"{one.largest:.3g}",
            ", ".join(f"{share:.0%}" for share in one.nearest) or "-",
            f"{one.total_variation:.3g}",
        )
    console.print(table)
    for one in certificate.bounds:
        if one.note:
            console.print(f"  [dim]{escape(one.rule)}: {escape(one.note)}", soft_wrap=True)
