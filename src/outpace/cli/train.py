"""``outpace train``: the target answers prompts, and a head learns from the answers. Ends with a folder for --head."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterable
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
from outpace.cli.session import Drafting, Machine
from outpace.cli.trained_gate import show_gate
from outpace.core.names import normalised
from outpace.core.progress import Stage, stage

if TYPE_CHECKING:
    from outpace.training.job import TrainedHead
    from outpace.training.training_progress import TrainingProgress

_TRAINING, _DATA = "Training", "Data"
_STAGES = {"data": "answering prompts", "training": "training", "evaluation": "evaluation"}
"""Names of the stages that are shown while they last."""
_ENDED_BY = (signal.SIGINT, signal.SIGTERM)
"""Signals after which the run is kept: torchrun sends SIGTERM to the others when a process has died."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What is learned from, for how long, and how large a head: parameters of ``outpace.train`` of the same names."""

    prompts: Annotated[
        list[str] | None,
        option(
            value="FILE",
            panel=_DATA,
            text="Prompts: JSON lines, or a data set of the hub (NAME:CONFIG:SPLIT). May be repeated. "
            "[dim]\\[default: the model writes the prompts itself][/]",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        option(
            value="N",
            panel=_DATA,
            text="Answer tokens to train on. [dim]\\[default: 1000000; with --max-minutes, as many as fit][/]",
        ),
    ] = None
    self_written: Annotated[
        float | None,
        option(
            value="SHARE",
            panel=_DATA,
            text="Share of prompts that the model writes. [dim]\\[default: what --prompts lacks][/]",
        ),
    ] = None
    passages: Annotated[
        float,
        option(
            "--passages",
            "--readings",
            value="SHARE",
            panel=_DATA,
            text="Share of prompts about a passage, such as summaries; passages are earlier answers.",
        ),
    ] = 0.2
    texts: Annotated[
        list[str] | None,
        option(
            value="FILE",
            panel=_DATA,
            text="Passages for these prompts: JSON lines with 'text' and 'language'. May be repeated. "
            "[dim]\\[default: earlier answers][/]",
        ),
    ] = None
    turns: Annotated[int, option(value="N", panel=_DATA, text="Turns of a conversation, at most; some have fewer.")] = 2
    prompt_tokens: Annotated[
        int, option(value="N", panel=_DATA, text="Tokens of a prompt, earlier turns included, at most.")
    ] = 1536
    answer_tokens: Annotated[int, option(value="N", panel=_DATA, text="Tokens of an answer, at most.")] = 512
    exclude: Annotated[
        list[Path] | None,
        option(
            value="FILE",
            panel=_DATA,
            text="Prompts to exclude, in addition to those of outpace bench. May be repeated.",
        ),
    ] = None
    data: Annotated[
        Path | None,
        option(
            value="DIR", panel=_DATA, text="Folder of conversations; heads can share it. [dim]\\[default: in --out][/]"
        ),
    ] = None
    states: Annotated[
        str | None,
        option(
            value="DIR|URL",
            panel=_DATA,
            text="Folder of hidden states that another engine wrote (speculators), in place of collected data; or the "
            "address of a vLLM server that answers and gives hidden states.",
        ),
    ] = None
    cache_bytes: Annotated[
        float | None,
        option(
            value="N",
            panel=_DATA,
            text="Disk space for hidden states. [dim]\\[default: 20e9, or half of what is free][/]",
        ),
    ] = None
    state_bits: Annotated[int, option(value="N", panel=_DATA, text="Bits per number of hidden states: 16 or 8.")] = 16
    max_minutes: Annotated[
        float | None,
        option(
            value="M", panel=_TRAINING, text="Time limit for data and training together; data takes at most half of it."
        ),
    ] = None
    epochs: Annotated[
        float | None,
        option(
            value="X",
            panel=_TRAINING,
            text="Passes over the data. [dim]\\[default: 1; with --max-minutes but not --tokens, as many as fit][/]",
        ),
    ] = None
    resume: Annotated[bool, opt.resume_option(_TRAINING)] = False
    init: Annotated[
        str | None,
        option(
            "--from",
            value="HEAD",
            panel=_TRAINING,
            text="Head to begin from: its folder, or the kind of a shipped one. [dim]\\[default: new weights][/]",
        ),
    ] = None
    rate: Annotated[
        float | None,
        option(
            "--rate",
            value="X",
            panel=_TRAINING,
            text="Largest learning rate of matrices; lower with --from. [dim]\\[default: the kind's own, 0.02][/]",
        ),
    ] = None
    size: Annotated[
        str | None,
        option(
            value="SIZE",
            panel=_TRAINING,
            text="Size of the head: tiny, small, base or large. [dim]\\[default: base; with --from, as it is][/]",
        ),
    ] = None
    vocabulary: Annotated[
        int | None,
        option(
            value="N",
            panel=_TRAINING,
            text="Number of tokens that it can draft; 0: all. [dim]\\[default: 8192; with --rank, all][/]",
        ),
    ] = None
    rank: Annotated[
        int, option(value="R", panel=_TRAINING, text="Rank of a low-rank LM head; 0: the target's LM head.")
    ] = 0
    row_tokens: Annotated[
        int, option(value="N", panel=_TRAINING, text="Tokens of a row; longer conversations are cut into several.")
    ] = 2048
    batch_tokens: Annotated[int, option(value="N", panel=_TRAINING, text="Tokens of a batch, about.")] = 2048
    pack: Annotated[
        bool,
        option(
            "--pack/--no-pack",
            panel=_TRAINING,
            text="Pack conversations end to end, for kinds of heads that can learn from them so.",
        ),
    ] = True
    accumulate: Annotated[int, option(value="N", panel=_TRAINING, text="Batches in a step of the optimizer.")] = 1
    prefetch: Annotated[
        int, option(value="N", panel=_TRAINING, text="Batches that are read ahead in another thread.")
    ] = 0
    shard: Annotated[
        bool,
        option(
            "--shard",
            panel=_TRAINING,
            text="Several processes share out the optimizer's state, for heads that do not fit on one device.",
        ),
    ] = False
    evaluate_tokens: Annotated[
        int,
        option(value="N", panel=_TRAINING, text="Held-out answer tokens on which the loss is watched; 0: all of them."),
    ] = 20_000


@grouped()
def train(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="Kind of head, or a method that uses one: eagle3, medusa, draft-lm, ...; or of gate: sprinter, "
            "pad, bild, ...",
        ),
    ],
    output: Annotated[Path, option("--out", "-o", value="DIR", text="Folder for the trained head or gate.")],
    machine: Machine,
    training: TrainingOptions,
    draft_model: opt.DraftModel = None,
    param: opt.Param = None,
    json: opt.Json = False,
    seed: opt.Seed = 0,
) -> None:
    """Train a head that drafts for a model, on its own answers, or a gate. Ctrl-C keeps a head's run for --resume."""
    name, fields = _kind_and_settings(kind)
    options = opt.settings_by_method(param, {name: {field: field for field in fields}})[name]
    machine.check()
    drafting = Drafting(draft_model=draft_model)
    drafting.check()
    if normalised(kind) != normalised(name):
        err().print(f"[dim]{kind} drafts with a head of kind {name}: training one")
    with _Watch() as watch:
        try:
            made = outpace.train(
                machine.load,
                kind,
                output,
                **asdict(training),
                draft_model=(lambda: drafting.load(machine)["draft_model"]) if draft_model else None,
                options=options,
                seed=seed,
                on_progress=watch,
            )
        except KeyboardInterrupt:
            raise watch.interrupted() from None
    if os.environ.get("RANK", "0") != "0":
        return  # the first of several processes says it
    gated = "thresholds" in made.provenance
    if json:
        what = "gate" if gated else "head"
        print_json({what: str(output), "method": made.method, **made.provenance})
    elif gated:
        show_gate(made, machine.model)
    else:
        _show(made, machine.model)


def _kind_and_settings(kind: str) -> tuple[str, Iterable[str]]:
    """The kind of head or gate that was named, and the settings of its training. Raises BadInput for neither."""
    from outpace.heads.kinds import find_kind
    from outpace.training.gates.registry import find_gate
    from outpace.training.job import kind_and_method

    if (gate := find_gate(kind)) is not None:
        return gate.name, gate.options.model_fields
    name, _ = kind_and_method(kind)
    return name, find_kind(name).Options.model_fields


class _Watch:
    """Shows the stages of a training. Ctrl-C is raised between two steps, never within one."""

    def __init__(self) -> None:
        self._stage, self._open, self._shown = "", ExitStack(), ExitStack()
        self._at: Stage | None = None
        self._stopped: TrainingProgress | None = None

    def __enter__(self) -> _Watch:
        self._interrupt = self._open.enter_context(deferred(ready=lambda: self._stage == "training", signals=_ENDED_BY))
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
    measured = f"held-out loss {figures['loss']:.3f}" if figures else "no held-out data"
    console.print(
        f"[bold cyan]{made.kind}[/]  {about['parameters'] / 1e6:.1f} M parameters, {about['steps']:,} steps in "
        f"{about['seconds'] / 60:.1f} minutes, {measured}"
    )
    console.print(f"  head: {escape(folder)}", soft_wrap=True)
    trial = about["trial"]
    accepted = f"{trial['accepted']:.2f} of {trial['draft_tokens']} draft tokens accepted per round"
    tried = f"{accepted} on {trial['prompts']} prompts"
    if not trial["gains"]:
        console.print(
            f"  [yellow]no speed-up yet[/]: {tried}; train on more data (--tokens, --max-minutes, --prompts)",
            soft_wrap=True,
        )
        return
    console.print(f"  {tried}", soft_wrap=True)
    name = "" if model == "smollm2" else f"--model {shlex.quote(model)} "
    command = f"outpace generate '...' {name}--method {made.method} --head {shlex.quote(folder)}"
    console.print(f"  [dim]to use it: {escape(command)}", soft_wrap=True)
