"""A training from prompts to a head on disk.

head = outpace.train(outpace.load("smollm2"), "eagle3", "heads/eagle3", tokens=100_000)
outpace.generate(model, "Why is the sky blue?", method=head.method, head=head.folder)
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from outpace.core.errors import BadInput
from outpace.core.machine import describe
from outpace.heads import checkpoint
from outpace.heads.base import parameters, teacher_of
from outpace.heads.head_config import HeadConfig, TargetFacts
from outpace.heads.kinds import find_kind, kinds, plan
from outpace.methods.registry import drafting_with, methods
from outpace.model import Model
from outpace.prompts.overlap import Overlap
from outpace.prompts.questions import bench_texts
from outpace.prompts.sources import source
from outpace.training.data import Collected, Collector, layers_of_all_kinds, open_folder
from outpace.training.data_config import DataConfig
from outpace.training.dataset import Dataset
from outpace.training.memory import ran_out
from outpace.training.on_policy import with_on_policy
from outpace.training.run_state import STATE, read_state
from outpace.training.shards import Shards
from outpace.training.trainer import Schedule, Trainer

VOCABULARY = 8192
"""Tokens that a head can draft, by default: reading the LM head is most of a draft's cost."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a training is.

    ``stage``: "data" (``done`` and ``total`` count tokens of answers), "collected", "training" (``done`` of ``total``
    is the share of it), "evaluation", or "stopped" after Ctrl-C. ``doing``: more of it, in words.
    """

    stage: Literal["data", "collected", "training", "evaluation", "stopped"]
    done: int
    total: int
    doing: str


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head on disk. ``method``: one that drafts with it; ``provenance``: what its ``training.json`` says."""

    kind: str
    method: str
    folder: Path
    provenance: dict[str, Any]


Report = Callable[[TrainingProgress], object]


def train(
    model: Model | Callable[[], Model],
    kind: str,
    output: str | Path,
    *,
    prompts: Sequence[str | Path] | None = None,
    tokens: int = 1_000_000,
    self_written: float | None = None,
    passages: float = 0.2,
    exclude: Sequence[str | Path] | None = None,
    data: str | Path | None = None,
    cache_bytes: float | None = None,
    max_minutes: float | None = None,
    epochs: float = 1.0,
    resume: bool = False,
    size: str = "base",
    vocabulary: int | None = None,
    rank: int = 0,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_progress: Report = lambda _: None,
) -> TrainedHead:
    """Train a head that drafts for a model, on the model's own answers to prompts.

    ``model``: or what loads it, called after everything else has been checked. ``kind``: of head, or a method that
    drafts with one. ``output``: the folder to write. ``prompts``: files of JSON lines or data sets of the hub; what
    they lack the model writes itself. ``tokens``: of answers to train on. ``self_written``: share of prompts that the
    model writes; ``passages``: share of prompts about passages. ``exclude``: files of prompts to keep out of the data.
    ``data``: the folder of conversations, "data" in ``output`` by default. ``cache_bytes``: disk for hidden states.
    ``max_minutes`` and ``epochs``: whichever ends first. ``size``: tiny, small, base or large. ``vocabulary``: tokens
    that the head can draft, 0 for all; None takes 8,192, or all with ``rank``, that of a low-rank LM head. ``options``:
    the kind's own settings. ``on_progress`` is called all along and may raise KeyboardInterrupt.

    A KeyboardInterrupt, from Ctrl-C as well, keeps data and run and is raised again; ``resume=True`` goes on. Raises
    BadInput for options out of range, files that cannot be read, a folder that holds something else, and memory or disk
    that ran out.
    """
    head_kind, method = kind_and_method(kind)
    folder, settings = Path(output), dict(options or {})
    if vocabulary is None:
        vocabulary = 0 if rank else VOCABULARY
    _check_amounts(tokens, rank, vocabulary, max_minutes, epochs, cache_bytes)
    stand_in = TargetFacts(name="", hidden_size=64, vocab_size=64, num_layers=1000, fingerprint=[])
    plan(find_kind(head_kind), stand_in, size=size, rank=rank, options=settings)
    _check_shares(self_written, passages, bool(prompts))
    _check_folder(folder, resume)
    wanted = DataConfig(
        tokens=tokens,
        sources=[source(str(one), seed) for one in prompts or ()],
        self_written=self_written,
        passages=passages,
        cache_bytes=None if cache_bytes is None else int(cache_bytes),
        seed=seed,
    )
    excluded = Overlap(bench_texts([Path(one) for one in exclude or ()]))
    schedule = Schedule(epochs=epochs, seconds=float("inf") if max_minutes is None else 60.0 * max_minutes, seed=seed)

    if not isinstance(model, Model):
        model = model()
    facts = checkpoint.facts(model.target, model.name)
    config = plan(find_kind(head_kind), facts, size=size, vocabulary=vocabulary, rank=rank, options=settings)
    layers = sorted({*config.aux_hidden_state_layers, *layers_of_all_kinds(model.target)})
    shards = open_folder(folder / "data" if data is None else Path(data), model.target, model.name, layers)
    collected = _collect(Collector(model, shards, wanted, excluded), shards, wanted, on_progress)
    try:
        trainer = _trainer(model, config, shards, folder, schedule, resume=resume)
        _run(trainer, folder, on_progress)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise BadInput(
            "memory ran out in training; what was saved is kept: free some, or give a smaller --size, and go on with "
            "--resume"
        ) from error
    command = _command(
        head_kind,
        {
            "model": Path(model.name).name,
            "tokens": tokens,
            "prompts": [one.name for one in wanted.sources],
            "self-written": self_written,
            "passages": passages,
            "max-minutes": max_minutes,
            "epochs": epochs,
            "size": size,
            "vocabulary": vocabulary,
            "rank": rank or None,
            "param": [f"{key}={value}" for key, value in settings.items()],
            "seed": seed,
        },
    )
    on_progress(TrainingProgress("evaluation", 0, 1, "held-out conversations"))
    about = {"command": command, "data": collected.public(), "seed": seed, "parameters": parameters(trainer.head)}
    return TrainedHead(head_kind, method, folder, _written(trainer, folder, about))


def kind_and_method(named: str) -> tuple[str, str]:
    """The kind of head that was named, itself or by a method that drafts with it; and a method to use it with."""
    if named not in kinds():
        for info in methods():
            if info.head is not None and named in (info.name, *info.aliases):
                return info.head, info.name
    return named, (drafting_with(named) or [named])[0]


def _check_amounts(
    tokens: int, rank: int, vocabulary: int, max_minutes: float | None, epochs: float, cache_bytes: float | None
) -> None:
    for option, value, least in (("--tokens", tokens, 1), ("--rank", rank, 0), ("--vocabulary", vocabulary, 0)):
        if value < least:
            raise BadInput(f"{option} must be at least {least}, not {value}")
    for option, amount in (("--max-minutes", max_minutes), ("--epochs", epochs)):
        if amount is not None and not amount > 0.0:
            raise BadInput(f"{option} must be above 0, not {amount:g}")
    if cache_bytes is not None and not 0.0 <= cache_bytes < float("inf"):
        raise BadInput(f"--cache-bytes must be a number of bytes, not {cache_bytes:g}")


def _check_shares(self_written: float | None, passages: float, prompts: bool) -> None:
    if self_written is not None and not 0.0 <= self_written <= 1.0:
        raise BadInput(f"--self-written must be between 0 and 1, not {self_written:g}")
    if not 0.0 <= passages < 1.0:
        raise BadInput(f"--passages must be at least 0 and below 1, not {passages:g}: passages come from other answers")
    if self_written == 0.0 and not prompts:
        raise BadInput("--self-written 0 leaves no prompts; give --prompts FILE")


def _check_folder(folder: Path, resume: bool) -> None:
    """Raise BadInput for a folder that cannot be written, or that holds what nobody asked to go on with."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror or error}") from None
    if (folder / STATE).exists():
        if not resume:
            raise BadInput(f"{folder} holds a run already; go on with it (--resume), or give another folder")
    elif (folder / checkpoint.WEIGHTS).exists():
        raise BadInput(f"{folder} holds a head already; give another folder")


def _collect(collector: Collector, shards: Shards, wanted: DataConfig, report: Report) -> Collected:
    """The data. After Ctrl-C what is on disk is kept, and the same call goes on."""

    def watch(now: Collected) -> None:
        report(TrainingProgress("data", now.tokens, wanted.tokens, now.doing))

    try:
        collected = collector.run(watch)
    except KeyboardInterrupt:
        kept = shards.answer_tokens()
        found = f"{kept:,} tokens of answers are kept in {shards.folder}"
        report(TrainingProgress("stopped", kept, wanted.tokens, found))
        raise
    removed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(collected.removed.items()))
    found = f"{collected.tokens:,} tokens of {collected.prompts:,} answers in {shards.folder}"
    found += f"; prompts left out: {removed}" if removed else ""
    report(TrainingProgress("collected", collected.tokens, wanted.tokens, found))
    return collected


def _trainer(
    model: Model, config: HeadConfig, shards: Shards, folder: Path, schedule: Schedule, *, resume: bool
) -> Trainer:
    """A new head, or the run in ``folder``, and what it learns from."""
    target, where = model.target, torch.device(model.info.get("device", "cpu"))
    dataset = Dataset(shards, sorted({*config.aux_hidden_state_layers, target.num_layers}), target=target)
    state = read_state(folder) if resume else None
    if state is not None and "words" in state:  # data may have grown since: the head keeps its vocabulary
        ids = state["words"].cpu()
    else:
        ids = dataset.words(config.vocabulary, target.vocab_size, sorted(model.eos_ids))
    head = checkpoint.new_head(config, target, ids, schedule.seed)
    teacher = teacher_of(target, head, where)
    head.initialise(target, teacher)
    learned_from = with_on_policy(dataset, head, teacher, target, model.eos_ids)
    trainer = Trainer(head, teacher, learned_from, folder, schedule, where)
    if resume:
        trainer.resume()
    return trainer


def _run(trainer: Trainer, folder: Path, report: Report) -> None:
    """The training. After Ctrl-C its state is saved."""

    def watch(now: Any, share: float) -> None:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in list(now.figures.items())[:3])
        report(TrainingProgress("training", round(1000 * share), 1000, f"step {now.step:,}, {figures}"))

    report(TrainingProgress("training", 0, 1000, "the first step"))
    try:
        trainer.run(watch)
    except KeyboardInterrupt:
        trainer.save()
        done = f"{trainer.progress.step:,} steps are kept in {folder}"
        report(TrainingProgress("stopped", round(1000 * trainer.share), 1000, done))
        raise


def _written(trainer: Trainer, folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the head on the held-out split, and write it. Returns its provenance."""
    progress = trainer.progress
    made = {
        **about,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "skipped_steps": progress.skipped,
        "held_out": {name: round(value, 5) for name, value in trainer.evaluate().items()},
        "history": [[step, round(loss, 5)] for step, loss in progress.history],
        "machine": describe(),
    }
    try:
        checkpoint.save(trainer.head, folder, made)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"the head cannot be written to {folder} ({error}); the run is kept: make room, and give --resume"
        ) from error
    return made


def _command(kind: str, flags: Mapping[str, Any]) -> str:
    """The command that trains such a head; None leaves a flag out, a list repeats it."""
    words = ["outpace", "train", kind]
    for flag, value in flags.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{flag}", f"{one:g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)
