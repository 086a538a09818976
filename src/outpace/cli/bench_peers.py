"""``outpace bench-peers``: outpace beside other libraries, on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import options as opt
from outpace.cli.output import Outputs, advancing, err
from outpace.cli.session import Machine, choose_methods
from outpace.core.errors import BadInput
from outpace.core.machine import usable_cpus

_INTERRUPTED = 130


def bench_peers(
    model: opt.ModelName = "smollm2",
    methods: Annotated[
        str,
        typer.Option("--methods", metavar="A,B", help="outpace's methods; autoregressive decoding (none) always runs."),
    ] = "none,sam,auto",
    peers: Annotated[
        str | None,
        typer.Option("--peers", metavar="X,Y", help="Libraries to compare with. [dim]\\[default: installed][/]"),
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(
            "--dtypes",
            metavar="D,E",
            help="outpace's precisions. [dim]\\[default: bfloat16, and int4 for GGUF, else int8][/]",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="Spec-Bench questions, JSONL or plain text. [dim]\\[default: embedded][/]"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="Use N prompts, taken from all categories in turn.")
    ] = None,
    max_new_tokens: opt.MaxNewTokens = 64,
    draft_model: opt.DraftModel = None,
    head: opt.Head = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is standard output.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained report with charts.")
    ] = None,
    vllm_python: Annotated[
        str | None,
        typer.Option(
            "--vllm-python",
            metavar="PATH",
            help="An interpreter that has vLLM. [dim]\\[default: .peers/vllm/bin/python][/]",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds a library may take to load, or for one answer.")
    ] = 900.0,
    threads: opt.Threads = None,
) -> None:
    """Compare with other libraries: same prompts and threads, greedy, each in a process of its own, in turn."""
    opt.check_length(max_new_tokens)
    if timeout <= 0:
        raise BadInput(f"--timeout must be above 0 seconds, not {timeout:g}")
    if draft_model and len(draft_model) > 1:
        raise BadInput(f"one draft model is compared with at a time, not {len(draft_model)}: leave out all but one")
    Machine(model, draft_model, threads=threads, heads=head).check()
    outputs = Outputs(json, html)
    outputs.check()
    try:
        from outpace.bench.peers.comparison import ComparisonSettings, prepare
        from outpace.bench.peers.libraries import choose
        from outpace.core.sampling import SamplingParams
        from outpace.prompts.questions import load_prompts

        chosen = tuple(choose(_names(peers)))
        questions = load_prompts(prompts, limit)
        names = choose_methods(["none", *(_names(methods) or ())], None, None, SamplingParams()).names
        wanted = _names(dtypes)
        settings = ComparisonSettings(
            model=model,
            peers=chosen,
            methods=tuple(names),
            dtypes=None if wanted is None else tuple(wanted),
            draft_model=draft_model[0] if draft_model else None,
            heads=tuple(str(folder.absolute()) for folder in head or ()),
            vllm_python=vllm_python,
            max_new_tokens=max_new_tokens,
            threads=threads or usable_cpus(),
            timeout=timeout,
            command=shlex.join(["outpace", *sys.argv[1:]]),
        )
        comparison = prepare(settings, questions)
        for note in comparison.notes:
            err().print(f"[yellow]note[/] {note}")
        for one in comparison.plan.skipped:
            err().print(f"[yellow]skipped[/] {one['name']}: {one['why']}; to install: {one['install']}", soft_wrap=True)
        with advancing() as advance:
            report = comparison.run(advance)
    except KeyboardInterrupt:
        from outpace.bench.peers.peers_report import PeersReport

        report = PeersReport.empty()
    outputs.write(
        report.result,
        lambda _, console: report.print(console),
        lambda _, to: report.write_html(to),
        empty=not report.rows,
    )
    if not report.complete:
        err().print("[yellow]interrupted[/]: the results are partial" if report.rows else "[yellow]interrupted")
        raise typer.Exit(_INTERRUPTED)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
