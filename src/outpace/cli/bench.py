"""``outpace bench``: methods side by side, on this machine.

Exit code 1: a row failed, with all prompts or with some; everything else is reported.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import outpace
from outpace.cli import options as opt
from outpace.cli.bars import advancing
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.output import Outputs, check_writable, typed
from outpace.cli.session import Drafting, Machine, read_texts
from outpace.core.errors import BadInput

FAILED = 1


@grouped()
def bench(
    machine: Machine,
    methods: Annotated[
        str,
        option(
            value="A,B,C",
            text="Methods to compare, as METHOD or METHOD#LABEL, followed by @RULE(KEY=VALUE,...) for another "
            "acceptance rule; none (autoregressive) always runs.",
        ),
    ] = "none,pld,sam,auto",
    sweep: Annotated[
        list[str] | None,
        option(
            value="KEY=V1,V2,...",
            panel=opt.DRAFTING,
            text="Run a method once for each value of a setting (METHOD.KEY=V1,V2,...; KEY alone: every method "
            "or rule that has it). May be repeated: every combination is a row.",
        ),
    ] = None,
    quality: Annotated[
        bool,
        option(
            "--quality",
            text="Measure how far the answers diverge from the model's own, and score those to prompts with 'answer', "
            "or 'entry_point' and 'test'.",
        ),
    ] = False,
    *,
    questions: opt.PromptFile,
    max_new_tokens: opt.MaxNewTokens = 64,
    ignore_eos: opt.IgnoreEos = False,
    batch_size: Annotated[
        int,
        option(
            "--batch-size",
            "-b",
            value="N",
            text="Number of requests decoded at once. When one ends, the next prompt joins.",
        ),
    ] = 1,
    trace: opt.TraceFile = None,
    trace_texts: opt.TraceTexts = False,
    outputs: Outputs,
    drafting: Drafting,
    reference: opt.Reference = None,
    namespace: opt.Namespace = None,
    sampling: opt.Sampling,
    constrained: opt.Constrained,
) -> None:
    """Compare methods on this machine: same model and prompts, interleaved runs, answers checked."""
    opt.check_length(max_new_tokens)
    if batch_size < 1:
        raise BadInput(f"--batch-size must be at least 1, not {batch_size}")
    machine.check()
    drafting.check()
    outputs.check()
    opt.check_trace(trace, trace_texts)
    if trace is not None:
        check_writable(trace)
    texts = read_texts(reference)
    try:
        prompts, params = questions.read(), sampling.params(constraint_weighting=constrained.weighting)
        if quality:
            from outpace.bench.quality.task_scores import check_tasks

            check_tasks(prompts)
        grammar, limits = constrained.read(), constrained.limits
        names = opt.names(methods)
        settings = drafting.settings(["none", *names] if names else [], params, bench=True)
        if sweep:
            from outpace.bench.sweep import swept

            settings = swept(settings, opt.sweeps(sweep))
            drafting.check_rules(settings, params)
        loaded = machine.load()
        needs = drafting.load(machine, bench=True)
        with advancing("benchmark") as advance:
            report = outpace.bench(
                loaded,
                settings,
                prompts,
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                ignore_eos=ignore_eos,
                references=texts,
                namespace=namespace or "",
                rule=drafting.judge(),
                params=params,
                quality=quality,
                grammar=grammar,
                grammar_limits=limits,
                command=typed(),
                trace=trace,
                trace_texts=trace_texts,
                on_progress=advance,
                **needs,
            )
    except KeyboardInterrupt:
        from outpace.bench.bench_report import BenchReport

        report = BenchReport.empty()
    outputs.write(report)
    if report.failures:
        print("error:", " ".join(report.failures.split()), file=sys.stderr)
        raise typer.Exit(FAILED)
