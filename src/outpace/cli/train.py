"""``outpace train``: the target answers prompts, and a head learns from the answers. Ends with a folder for --head."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

import outpace
from outpace.cli import options as opt
from outpace.cli.bars import counted
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import Interrupted, deferred
from outpace.cli.options import option
from outpace.cli.output import err, out, print_json
from outpace.cli.session import Machine
from outpace.core.progress import Stage, stage

if TYPE_CHECKING:
    from outpace.training.job import TrainedHead
    from outpace.training.training_progress import TrainingProgress

_TRAINING, _DATA = "Training", "Data"
_STAGES = {"data": "answering prompts", "training": "training", "evaluation": "evaluation"}
"""Names of the stages that are shown while they last."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What is learned from, for how long, and how large a head: parameters of ``outpace.train`` of the same names."""

    prompts: Annotated[
        list[str] | None,
        option(
            value="FILE",
            panel=_DATA,
            text="JSON lines, a prompt a line, or a data set of the hub (NAME:CONFIG:SPLIT); may be repeated. Without "
            "one the model writes its users' turns itself.",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        option(
            value="N",
            panel=_DATA,
            text="Tokens of answers to train on. Default: 1000000, or with --max-minutes as many as there is time for.",
        ),
    ] = None
    self_written: Annotated[
        float | None,
        option(value="SHARE", panel=_DATA, text="Of prompts that the model writes; default: what --prompts lack."),
    ] = None
    passages: Annotated[
        float,
        option(
            "--passages",
            "--readings",
            value="SHARE",
            panel=_DATA,
            text="Of prompts about passages, as summaries; the passages are its answers.",
        ),
    ] = 0.2
    exclude: Annotated[
        list[Path] | None,
        option(value="FILE", panel=_DATA, text="Prompts to keep out, as those of outpace bench are; may be repeated."),
    ] = None
    data: Annotated[
        Path | None,
        option(value="DIR", panel=_DATA, text="Where conversations are kept, for other heads too; default: in --out."),
    ] = None
    cache_bytes: Annotated[
        float | None,
        option(value="N", panel=_DATA, text="Disk for hidden states; default: 20e9, or half of what is free."),
    ] = None
    max_minutes: Annotated[
        float | None,
        option(
            value="M",
            panel=_TRAINING,
            text="End data and training together after M minutes, half of them for data at most.",
        ),
    ] = None
    epochs: Annotated[
        float | None,
        option(
            value="X",
            panel=_TRAINING,
            text="Passes over the data. Default: 1; without --tokens as many as --max-minutes has time for.",
        ),
    ] = None
    resume: Annotated[bool, opt.resume_option(_TRAINING)] = False
    size: Annotated[str, option(value="SIZE", panel=_TRAINING, text="tiny, small, base or large.")] = "base"
    vocabulary: Annotated[
        int | None,
        option(value="N", panel=_TRAINING, text="Tokens it can draft; 0: all. Default: 8192, all with --rank."),
    ] = None
    rank: Annotated[int, option(value="R", panel=_TRAINING, text="Of a low-rank LM head; 0: the target's.")] = 0


@grouped()
def train(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What to train: eagle3, medusa, draft-lm, ...")],
    output: Annotated[Path, option("--out", "-o", value="DIR", text="Where the head is written.")],
    machine: Machine,
    training: TrainingOptions,
    param: opt.Param = None,
    json: opt.Json = False,
    seed: opt.Seed = 0,
) -> None:
    """Train a head that drafts for a model, on the model's own answers. Ctrl-C keeps the run; --resume continues it."""
    from outpace.heads.kinds import find_kind
    from outpace.training.job import kind_and_method

    name, _ = kind_and_method(kind)
    fields = find_kind(name).Options.model_fields
    options = opt.settings_by_method(param, {name: {field: field for field in fields}})[name]
    machine.check()
    if kind != name:
        err().print(f"[dim]{kind} drafts with the head of {name}: training that")
    with _Watch() as watch:
        try:
            made = outpace.train(
                machine.load, kind, output, **asdict(training), options=options, seed=seed, on_progress=watch
            )
        except KeyboardInterrupt:
            raise watch.interrupted() from None
    if json:
        print_json({"head": str(output), "method": made.method, **made.provenance})
    else:
        _show(made, machine.model)


class _Watch:
    """Shows the stages of a training. Ctrl-C is raised between two steps, never within one."""

    def __init__(self) -> None:
        self._stage, self._open, self._shown = "", ExitStack(), ExitStack()
        self._at: Stage | None = None
        self._stopped: TrainingProgress | None = None

    def __enter__(self) -> _Watch:
        self._interrupt = self._open.enter_context(deferred(ready=lambda: self._stage == "training"))
        self._open.enter_context(self._shown)
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def interrupted(self) -> Interrupted:
        """What to say after Ctrl-C."""
        if self._stopped is None:
            return Interrupted.nothing()
        done, total, unit = self._stopped.done, self._stopped.total, self._stopped.unit
        return Interrupted.kept(counted(done, total or None, unit), self._stopped.doing)

    def __call__(self, now: TrainingProgress) -> None:
        before, self._stage = self._stage, now.stage
        if now.stage != before:
            self._shown.close()
            name = _STAGES.get(now.stage)
            self._at = self._shown.enter_context(stage(name, unit=now.unit)) if name else None
        if self._at is not None:
            self._at.move(now.done, now.total or None, now.doing)
        elif now.stage in ("plan", "collected"):
            what = "expected" if now.stage == "plan" else "data"
            err().print(f"[dim]{what}: {escape(now.doing)}", soft_wrap=True)
        elif now.stage == "stopped":
            self._stopped = now
        if self._interrupt.pressed and now.stage == "training":
            raise KeyboardInterrupt


def _show(made: TrainedHead, model: str) -> None:
    console = out()
    about, folder = made.provenance, str(made.folder)
    figures = about["held_out"]
    measured = f"held-out loss {figures['loss']:.3f}" if figures else "nothing was held out to measure it on"
    console.print(
        f"[bold cyan]{made.kind}[/]  {about['parameters'] / 1e6:.1f} M parameters, {about['steps']:,} steps in "
        f"{about['seconds'] / 60:.1f} minutes, {measured}"
    )
    console.print(f"  the head is in {escape(folder)}", soft_wrap=True)
    trial = about["trial"]
    accepted = f"{trial['accepted']:.2f} of {trial['draft_tokens']} draft tokens accepted a round"
    tried = f"{accepted} on {trial['prompts']} prompts"
    if not trial["gains"]:
        console.print(
            f"  [yellow]it does not make decoding faster yet[/]: {tried}; train another on more data (--tokens, "
            "--max-minutes, --prompts)",
            soft_wrap=True,
        )
        return
    console.print(f"  {tried}", soft_wrap=True)
    name = "" if model == "smollm2" else f"--model {shlex.quote(model)} "
    command = f"outpace generate '...' {name}--method {made.method} --head {shlex.quote(folder)}"
    console.print(f"  [dim]use it: {escape(command)}", soft_wrap=True)
