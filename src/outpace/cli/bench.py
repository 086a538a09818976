"""``outpace bench``: methods side by side, on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import options as opt
from outpace.cli.output import Outputs, advancing, err
from outpace.cli.session import Machine, choose_methods, read_texts
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.bench.bench_report import BenchReport
    from outpace.cli.session import MethodChoice

_INTERRUPTED = 130


def bench(
    model: opt.ModelName = "smollm2",
    methods: Annotated[
        str,
        typer.Option(
            "--methods", metavar="A,B,C", help="Methods to compare; autoregressive decoding (none) always runs."
        ),
    ] = "none,pld,sam,auto",
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
    ignore_eos: opt.IgnoreEos = False,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", metavar="N", help="Requests decoded together.")] = 1,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is standard output.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained report with charts.")
    ] = None,
    param: opt.Param = None,
    rule: opt.Rule = None,
    draft_model: opt.DraftModel = None,
    head: opt.Head = None,
    datastore: opt.Datastore = None,
    reference: opt.Reference = None,
    namespace: opt.Namespace = None,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Compare methods: same model, same prompts, runs interleaved, answers checked."""
    opt.check_length(max_new_tokens)
    if batch_size < 1:
        raise BadInput(f"--batch-size must be at least 1, not {batch_size}")
    machine = Machine(model, draft_model, dtype, device, threads, datastore, head)
    machine.check()
    biases = opt.logit_bias(logit_bias)
    outputs = Outputs(json, html)
    outputs.check()
    texts = read_texts(reference)
    try:
        from outpace.core.sampling import SamplingParams
        from outpace.prompts.questions import load_prompts

        questions = load_prompts(prompts, limit)
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": biases,
            "seed": seed,
        }
        names = [name.strip() for name in methods.split(",") if name.strip()]
        choice = choose_methods(["none", *names] if names else [], param, rule, SamplingParams(**sampling))
        report = _run(
            machine,
            choice,
            prompts=questions,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            ignore_eos=ignore_eos,
            references=texts,
            namespace=namespace or "",
            command=shlex.join(["outpace", *sys.argv[1:]]),
            **sampling,
        )
    except KeyboardInterrupt:
        from outpace.bench.bench_report import BenchReport

        report = BenchReport.empty()
    outputs.write(
        report.result,
        lambda _, console: report.print(console),
        lambda _, to: report.write_html(to),
        empty=not report.rows,
    )
    if not report.complete:
        err().print("[yellow]interrupted[/]: the results are partial" if report.rows else "[yellow]interrupted")
        raise typer.Exit(_INTERRUPTED)


def _run(machine: Machine, choice: MethodChoice, **options: Any) -> BenchReport:
    """Load, build, run with a progress bar."""
    from outpace.bench.benchmark import bench as measure

    model, drafts = machine.load()
    with advancing() as advance:
        return measure(
            model,
            choice.settings,
            rule=choice.rule,
            draft_model=drafts,
            datastore=machine.datastore,
            head=machine.heads or (),
            on_progress=advance,
            **options,
        )
