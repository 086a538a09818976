"""``outpace bench``: methods side by side, on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outpace
from outpace.cli import options as opt
from outpace.cli.output import STDOUT, check_writable, err, out, print_json, to_json, write_whole
from outpace.cli.session import Machine, choose_methods, read_texts
from outpace.errors import BadInput

if TYPE_CHECKING:
    from outpace.bench.prompts import Prompt
    from outpace.bench.settings import BenchSettings
    from outpace.bench.settings import Progress as Step
    from outpace.cli.session import MethodChoice

_INTERRUPTED = 130


def bench(
    model: opt.ModelName = "smollm2",
    methods: Annotated[
        str, typer.Option("--methods", metavar="A,B,C", help="Methods to compare; plain decoding (none) always runs.")
    ] = "none,pld,sam",
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
    reference: opt.Reference = None,
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
    machine = Machine(model, draft_model, dtype, device, threads)
    machine.check()
    biases = opt.logit_bias(logit_bias)
    outputs = _Outputs(json, html)
    outputs.check()
    texts = read_texts(reference)
    try:
        from outpace.bench.prompts import load_prompts
        from outpace.bench.settings import BenchSettings
        from outpace.sampling import SamplingParams

        questions = load_prompts(prompts, limit)
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=biases,
            seed=seed,
        )
        names = [name.strip() for name in methods.split(",") if name.strip()]
        choice = choose_methods(["none", *names] if names else [], param, rule, params)
        settings = BenchSettings(
            max_new_tokens=max_new_tokens,
            params=params,
            batch_size=batch_size,
            ignore_eos=ignore_eos,
            references=texts,
            command=shlex.join(["outpace", *sys.argv[1:]]),
            extra={"method_settings": choice.settings, "rule": rule, "draft_model": draft_model},
        )
        result = _run(machine, choice, questions, settings)
    except KeyboardInterrupt:
        result = _nothing()
    outputs.write(result)
    if not result["complete"]:
        err().print("[yellow]interrupted[/]: the results are partial" if result["methods"] else "[yellow]interrupted")
        raise typer.Exit(_INTERRUPTED)


def _run(machine: Machine, choice: MethodChoice, prompts: list[Prompt], settings: BenchSettings) -> dict[str, Any]:
    """Load, build, run with a progress bar."""
    from outpace.bench.runner import run

    model, draft = machine.load()
    built = choice.build(model, draft)
    console = err()
    if not console.is_terminal:
        return run(model, built, prompts, settings)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(now: Step) -> None:
            progress.update(task, completed=now.done, total=now.total, description=f"{now.method} {now.category}")

        return run(model, built, prompts, settings, advance)


def _nothing() -> dict[str, Any]:
    """The results of a bench that was interrupted before it began."""
    empty: dict[str, Any] = {"version": outpace.__version__, "complete": False}
    return {**empty, "machine": {}, "model": {}, "settings": {}, "methods": []}


class _Outputs:
    """Where the results go: the table to the terminal, JSON and HTML to files."""

    def __init__(self, json: str | None, html: Path | None) -> None:
        self._to_stdout = json == STDOUT
        self._json = None if json is None or self._to_stdout else Path(json)
        self._html = html

    def check(self) -> None:
        """Raise BadInput now for what could not be written later."""
        for path in (self._json, self._html):
            if path is not None:
                check_writable(path)
        if self._json is not None and self._json == self._html:
            raise BadInput(f"--json and --html both name {self._html}")

    def write(self, result: dict[str, Any]) -> None:
        """Everything that was asked for; JSON first, for it is what a script waits for."""
        if self._to_stdout:
            print_json(result)
        elif self._json is not None:
            write_whole(self._json, lambda path: _write_text(path, to_json(result) + "\n"))
        if not result["methods"]:
            return
        if self._html is not None:
            from outpace.bench.html import write_html

            write_whole(self._html, lambda path: write_html(result, path))
        self._table(result, err() if self._to_stdout else out())

    def _table(self, result: dict[str, Any], console: Console) -> None:
        from outpace.bench.report import print_table

        print_table(result, console)
        for what, path in (("JSON", self._json), ("report", self._html)):
            if path is not None:
                err().print(f"[dim]{what}: {path}", soft_wrap=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
