"""``outpace train``: the target answers prompts, and a head learns from what it said. Ends with a folder for --head."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import outpace.cli.options as opt
from outpace.cli.output import err, out, print_json
from outpace.cli.session import Machine
from outpace.errors import BadInput

if TYPE_CHECKING:
    from outpace.heads.base import HeadConfig
    from outpace.models import Model
    from outpace.training.data import Collected
    from outpace.training.overlap import Overlap
    from outpace.training.prompts import Source
    from outpace.training.shards import Shards
    from outpace.training.trainer import Trainer

WORDS = 8192
"""Words that a head can draft, by default: reading the LM head is most of its cost."""
_TRAINING = "Training"
_DATA = "Data"
_SAY = 60.0  # seconds between two lines where nobody watches a bar


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
    options = _checked(name, size, rank, vocabulary, param, tokens, self_written, max_minutes, epochs, cache_bytes)
    if kind != name:
        err().print(f"[dim]{kind} drafts with the head of {name}: training that")
    _check_folder(output, resume)
    if self_written == 0.0 and not prompts:
        raise BadInput("--self-written 0 leaves no prompts; give --prompts FILE")
    from outpace.training.overlap import Overlap, bench_texts
    from outpace.training.prompts import source

    job = _Job(
        kind=name,
        method=method,
        output=output,
        data=data or output / "data",
        sources=[source(one, seed) for one in prompts or ()],
        excluded=Overlap(bench_texts(exclude or ())),
        tokens=tokens,
        self_written=self_written,
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
    from outpace.heads.base import kinds
    from outpace.method import drafting_with, methods

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
    self_written: float | None,
    max_minutes: float | None,
    epochs: float,
    cache_bytes: float | None,
) -> dict[str, Any]:
    """The head's own settings. Raises BadInput for what can be told to be wrong before a model is loaded."""
    from outpace.heads.base import TargetFacts, find_kind, plan

    head = find_kind(kind)
    for option, value, least in (("--tokens", tokens, 1), ("--rank", rank, 0), ("--vocabulary", vocabulary, 0)):
        if value is not None and value < least:
            raise BadInput(f"{option} must be at least {least}, not {value}")
    for option, amount in (("--max-minutes", max_minutes), ("--epochs", epochs)):
        if amount is not None and not amount > 0.0:
            raise BadInput(f"{option} must be above 0, not {amount:g}")
    if self_written is not None and not 0.0 <= self_written <= 1.0:
        raise BadInput(f"--self-written must be between 0 and 1, not {self_written:g}")
    if cache_bytes is not None and not 0.0 <= cache_bytes < float("inf"):
        raise BadInput(f"--cache-bytes must be a number of bytes, not {cache_bytes:g}")
    options = opt.settings_by_method(pairs, {kind: list(head.Options.model_fields)})[kind]
    stand_in = TargetFacts(name="", hidden_size=64, vocab_size=64, num_layers=1000, fingerprint=[])
    plan(head, stand_in, size=size, rank=rank, options=options)
    return options


def _check_folder(folder: Path, resume: bool) -> None:
    """Raise BadInput for a folder that cannot be written, or that holds what nobody asked to go on with."""
    from outpace.heads.checkpoint import WEIGHTS
    from outpace.training.trainer import STATE

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror or error}") from None
    if (folder / STATE).exists():
        if not resume:
            raise BadInput(f"{folder} holds a run already; go on with it (--resume), or give another folder")
    elif (folder / WEIGHTS).exists():
        raise BadInput(f"{folder} holds a head already; give another folder")


@dataclass(slots=True)
class _Job:
    """A training, checked and not yet begun."""

    kind: str
    method: str
    output: Path
    data: Path
    sources: list[Source]
    excluded: Overlap
    tokens: int
    self_written: float | None
    cache_bytes: int | None
    seconds: float
    epochs: float
    resume: bool
    size: str
    vocabulary: int
    rank: int
    options: dict[str, Any]
    seed: int
    head_parameters: int = field(default=0)

    def run(self, model: Model) -> dict[str, Any]:
        """Data, training, the head on disk. Returns its provenance."""
        from outpace.heads.base import find_kind, plan
        from outpace.heads.checkpoint import facts
        from outpace.training.data import layers_of_all_kinds, open_folder

        config = plan(
            find_kind(self.kind),
            facts(model.target, model.name),
            size=self.size,
            vocabulary=self.vocabulary,
            rank=self.rank,
            options=self.options,
        )
        layers = sorted({*config.taps, *layers_of_all_kinds(model.target)})
        shards = open_folder(self.data, model.target, model.name, layers)
        collected = self._collect(model, shards)
        return self._train(model, config, shards, collected)

    def _collect(self, model: Model, shards: Shards) -> Collected:
        from outpace.training.data import Collector, Wish

        wish = Wish(
            tokens=self.tokens,
            sources=self.sources,
            self_written=self.self_written,
            cache_bytes=self.cache_bytes,
            seed=self.seed,
        )
        collector = Collector(model, shards, wish, self.excluded)
        with _bar("tokens answered") as bar:

            def watch(now: Collected) -> None:
                bar.move(now.tokens, self.tokens, now.doing)

            try:
                collected = collector.run(watch)
            except KeyboardInterrupt:
                err().print(
                    f"[dim]stopped; {shards.answer_tokens():,} tokens of answers are kept in {escape(str(self.data))}; "
                    "the same command goes on",
                    soft_wrap=True,
                )
                raise
        said = ", ".join(f"{count:,} {reason}" for reason, count in sorted(collected.removed.items()))
        err().print(
            f"[dim]data: {collected.tokens:,} tokens of {collected.prompts:,} answers in {escape(str(self.data))}"
            + (f"; prompts left out: {said}" if said else ""),
            soft_wrap=True,
        )
        return collected

    def _train(self, model: Model, config: HeadConfig, shards: Shards, collected: Collected) -> dict[str, Any]:
        import torch

        from outpace.heads.base import parameters
        from outpace.heads.checkpoint import new_head
        from outpace.training.dataset import Dataset
        from outpace.training.memory import ran_out
        from outpace.training.on_policy import with_on_policy
        from outpace.training.trainer import Schedule, Trainer, read_state, teacher_of

        target, where = model.target, torch.device(model.info.get("device", "cpu"))
        dataset = Dataset(shards, sorted({*config.taps, target.num_layers}), target=target)
        state = read_state(self.output) if self.resume else None
        if state is not None and "words" in state:  # data may have grown since: the head keeps its words
            ids = state["words"].cpu()
        else:
            ids = dataset.words(config.vocabulary, target.vocab_size, sorted(model.eos_ids))
        head = new_head(config, target, ids, self.seed)
        teacher = teacher_of(target, head, where)
        head.initialise(target, teacher)
        schedule = Schedule(epochs=self.epochs, seconds=self.seconds, seed=self.seed)
        learned_from = with_on_policy(dataset, head, teacher, target, model.eos_ids)
        trainer = Trainer(head, teacher, learned_from, self.output, schedule, where)
        if self.resume:
            trainer.resume()
        self.head_parameters = parameters(head)
        try:
            self._run(trainer)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            raise BadInput(
                "memory ran out in training; what was saved is kept: free some, or give a smaller --size, and go on "
                "with --resume"
            ) from error
        return self._written(model, trainer, collected)

    def _run(self, trainer: Trainer) -> None:
        with _bar(f"training {self.kind}") as bar, _interruptible() as interrupt:

            def watch(now: Any, share: float) -> None:
                figures = ", ".join(f"{name} {value:.3f}" for name, value in list(now.figures.items())[:3])
                bar.move(round(1000 * share), 1000, f"step {now.step:,}, {figures}")
                if interrupt.is_set():  # between two steps, where everything is of a piece
                    raise KeyboardInterrupt

            try:
                trainer.run(watch)
            except KeyboardInterrupt:
                trainer.save()
                err().print(
                    f"[dim]stopped after {trainer.progress.step:,} steps, kept in {escape(str(self.output))}; the same "
                    "command with --resume goes on",
                    soft_wrap=True,
                )
                raise

    def _written(self, model: Model, trainer: Trainer, collected: Collected) -> dict[str, Any]:
        """Measure the head on the held-out split, and write it."""
        from safetensors import SafetensorError

        from outpace.heads.checkpoint import save
        from outpace.machine import describe

        progress = trainer.progress
        history = [[step, round(loss, 5)] for step, loss in progress.history]
        made = {
            "command": self.command(model.name),
            "data": collected.public(),
            "seed": self.seed,
            "parameters": self.head_parameters,
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 1),
            "skipped_steps": progress.skipped,
            "held_out": {name: round(value, 5) for name, value in trainer.evaluate().items()},
            "history": history,
            "machine": describe(),
        }
        try:
            save(trainer.head, self.output, made)
        except (OSError, SafetensorError) as error:
            raise BadInput(
                f"the head cannot be written to {self.output} ({error}); the run is kept: make room, and give --resume"
            ) from error
        return made

    def command(self, model: str) -> str:
        """The command that trains such a head, with what is not the default; files by their names."""
        words = ["outpace", "train", self.kind, "--model", Path(model).name, "--tokens", str(self.tokens)]
        for one in self.sources:
            words += ["--prompts", one.name]
        if self.self_written is not None:
            words += ["--self-written", f"{self.self_written:g}"]
        if self.seconds != float("inf"):
            words += ["--max-minutes", f"{self.seconds / 60:g}"]
        words += ["--epochs", f"{self.epochs:g}", "--size", self.size, "--vocabulary", str(self.vocabulary)]
        if self.rank:
            words += ["--rank", str(self.rank)]
        for key, value in self.options.items():
            words += ["--param", f"{key}={value}"]
        return shlex.join([*words, "--seed", str(self.seed)])


def _show(job: _Job, model: Model, made: dict[str, Any]) -> None:
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


class _Bar:
    """A bar on a terminal; elsewhere a line a minute, for whoever reads the log of a long run."""

    def __init__(self, what: str, progress: Progress, task: TaskID, *, watched: bool) -> None:
        self._what, self._progress, self._task, self._watched = what, progress, task, watched
        self._said = time.monotonic()

    def move(self, done: int, total: int, doing: str) -> None:
        """What is done by now, of what."""
        if self._watched:
            self._progress.update(self._task, completed=done, total=total, description=f"{self._what}: {doing}")
        elif time.monotonic() - self._said >= _SAY:
            self._said = time.monotonic()
            print(f"{self._what}: {100 * done / max(1, total):.0f}%, {doing}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[_Bar]:
    console = err()
    columns = (BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("[dim]{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(what, progress, progress.add_task(what, total=None), watched=console.is_terminal)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step can end; pressed again it raises."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
