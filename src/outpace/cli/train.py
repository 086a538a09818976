"""``outpace train``: the target answers prompts, and a head learns from what it said. Ends with a folder for --head."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

import outpace.cli.options as opt
from outpace.cli.output import err, out, print_json
from outpace.cli.session import Machine
from outpace.cli.train_job import Job
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.model import Model

WORDS = 8192
"""Words that a head can draft, by default: reading the LM head is most of its cost."""
_TRAINING = "Training"
_DATA = "Data"


def train(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What to train: eagle3, medusa, draft-lm, ...")],
    output: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the head is written.")],
    model: opt.ModelName = "smollm2",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            rich_help_panel=_DATA,
            help="JSON lines, a prompt a line, or a data set of the hub (NAME:CONFIG:SPLIT); may be repeated. "
            "Without one the model writes its users' turns itself.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", rich_help_panel=_DATA, help="Tokens of answers to train on.")
    ] = 1_000_000,
    self_written: Annotated[
        float | None,
        typer.Option(
            "--self-written",
            metavar="SHARE",
            rich_help_panel=_DATA,
            help="Share of prompts that the model writes itself; default: those that --prompts lack.",
        ),
    ] = None,
    readings: Annotated[
        float,
        typer.Option(
            "--passages",
            "--readings",
            metavar="SHARE",
            rich_help_panel=_DATA,
            help="Share of prompts about passages: summaries, questions on them. The passages are the model's answers.",
        ),
    ] = 0.2,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            "--exclude",
            metavar="FILE",
            rich_help_panel=_DATA,
            help="Prompts to be kept out of the data, as those of outpace bench are; may be repeated.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            rich_help_panel=_DATA,
            help="Where conversations are kept, for other heads too; default: data in --out.",
        ),
    ] = None,
    cache_bytes: Annotated[
        float | None,
        typer.Option(
            "--cache-bytes",
            metavar="N",
            rich_help_panel=_DATA,
            help="Disk for hidden states; beyond it they are computed again. Default: 20e9, half of what is free.",
        ),
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            "--max-minutes", metavar="M", rich_help_panel=_TRAINING, help="End training after M minutes of it."
        ),
    ] = None,
    epochs: Annotated[
        float, typer.Option("--epochs", metavar="X", rich_help_panel=_TRAINING, help="Passes over the data.")
    ] = 1.0,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=_TRAINING, help="Go on with the run in --out.")
    ] = False,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", rich_help_panel=_TRAINING, help="tiny, small, base or large.")
    ] = "base",
    vocabulary: Annotated[
        int | None,
        typer.Option(
            "--vocabulary",
            metavar="N",
            rich_help_panel=_TRAINING,
            help=f"Tokens that the head can draft; 0: all. Default: {WORDS}, all with --rank.",
        ),
    ] = None,
    rank: Annotated[
        int,
        typer.Option("--rank", metavar="R", rich_help_panel=_TRAINING, help="Of a low-rank LM head; 0: the target's."),
    ] = 0,
    param: opt.Param = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Train a head that drafts for a model, on the model's own answers. Ctrl-C keeps all, --resume goes on."""
    name, method = _kind_and_method(kind)
    options = _checked(name, size, rank, vocabulary, param, tokens, max_minutes, epochs, cache_bytes)
    _check_shares(self_written, readings, bool(prompts))
    if kind != name:
        err().print(f"[dim]{kind} drafts with the head of {name}: training that")
    _check_folder(output, resume)
    from outpace.prompts.overlap import Overlap
    from outpace.prompts.questions import bench_texts
    from outpace.prompts.sources import source

    job = Job(
        kind=name,
        method=method,
        output=output,
        data=data or output / "data",
        sources=[source(one, seed) for one in prompts or ()],
        excluded=Overlap(bench_texts(exclude or ())),
        tokens=tokens,
        self_written=self_written,
        readings=readings,
        cache_bytes=None if cache_bytes is None else int(cache_bytes),
        seconds=float("inf") if max_minutes is None else 60.0 * max_minutes,
        epochs=epochs,
        resume=resume,
        size=size,
        vocabulary=_words(vocabulary, rank),
        rank=rank,
        options=options,
        seed=seed,
    )
    machine = Machine(model, None, dtype, device, threads)
    machine.check()
    loaded, _ = machine.load()
    made = job.run(loaded)
    if json:
        print_json({"head": str(output), "method": job.method, **made})
    else:
        _show(job, loaded, made)


def _kind_and_method(named: str) -> tuple[str, str]:
    """The kind of head that was named, itself or by a method that drafts with it; and a method to use it with."""
    from outpace.heads.kinds import kinds
    from outpace.methods.registry import drafting_with, methods

    if named not in kinds():
        for info in methods():
            if info.head is not None and named in (info.name, *info.aliases):
                return info.head, info.name
    return named, (drafting_with(named) or [named])[0]


def _words(vocabulary: int | None, rank: int) -> int:
    if vocabulary is None:
        return 0 if rank else WORDS
    return vocabulary


def _checked(
    kind: str,
    size: str,
    rank: int,
    vocabulary: int | None,
    pairs: Sequence[str] | None,
    tokens: int,
    max_minutes: float | None,
    epochs: float,
    cache_bytes: float | None,
) -> dict[str, Any]:
    """The head's own settings. Raises BadInput for what can be told to be wrong before a model is loaded."""
    from outpace.heads.head_config import TargetFacts
    from outpace.heads.kinds import find_kind, plan

    head = find_kind(kind)
    for option, value, least in (("--tokens", tokens, 1), ("--rank", rank, 0), ("--vocabulary", vocabulary, 0)):
        if value is not None and value < least:
            raise BadInput(f"{option} must be at least {least}, not {value}")
    for option, amount in (("--max-minutes", max_minutes), ("--epochs", epochs)):
        if amount is not None and not amount > 0.0:
            raise BadInput(f"{option} must be above 0, not {amount:g}")
    if cache_bytes is not None and not 0.0 <= cache_bytes < float("inf"):
        raise BadInput(f"--cache-bytes must be a number of bytes, not {cache_bytes:g}")
    options = opt.settings_by_method(pairs, {kind: list(head.Options.model_fields)})[kind]
    stand_in = TargetFacts(name="", hidden_size=64, vocab_size=64, num_layers=1000, fingerprint=[])
    plan(head, stand_in, size=size, rank=rank, options=options)
    return options


def _check_folder(folder: Path, resume: bool) -> None:
    """Raise BadInput for a folder that cannot be written, or that holds what nobody asked to go on with."""
    from outpace.heads.checkpoint import WEIGHTS
    from outpace.training.run_state import STATE

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror or error}") from None
    if (folder / STATE).exists():
        if not resume:
            raise BadInput(f"{folder} holds a run already; go on with it (--resume), or give another folder")
    elif (folder / WEIGHTS).exists():
        raise BadInput(f"{folder} holds a head already; give another folder")


def _show(job: Job, model: Model, made: dict[str, Any]) -> None:
    console = out()
    figures = made["held_out"]
    measured = f"held-out loss {figures['loss']:.3f}" if figures else "nothing was held out to measure it on"
    console.print(
        f"[bold cyan]{job.kind}[/]  {made['parameters'] / 1e6:.1f} M parameters, {made['steps']:,} steps in "
        f"{made['seconds'] / 60:.1f} minutes, {measured}"
    )
    console.print(f"  the head is in {escape(str(job.output))}", soft_wrap=True)
    name = "" if model.name == "smollm2" else f"--model {shlex.quote(model.name)} "
    command = f"outpace generate '...' {name}--method {job.method} --head {shlex.quote(str(job.output))}"
    console.print(f"  [dim]use it: {escape(command)}", soft_wrap=True)


def _check_shares(self_written: float | None, readings: float, prompts: bool) -> None:
    if self_written is not None and not 0.0 <= self_written <= 1.0:
        raise BadInput(f"--self-written must be between 0 and 1, not {self_written:g}")
    if not 0.0 <= readings < 1.0:
        raise BadInput(f"--passages must be at least 0 and below 1, not {readings:g}: passages come from other answers")
    if self_written == 0.0 and not prompts:
        raise BadInput("--self-written 0 leaves no prompts; give --prompts FILE")
