"""A training from prompts to a head on disk.

head = outpace.train(outpace.load("smollm2"), "eagle3", "heads/eagle3", tokens=100_000)
outpace.generate(model, "Why is the sky blue?", method=head.method, head=head.folder)
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from outpace.core.errors import BadInput
from outpace.core.machine import describe
from outpace.core.names import normalised
from outpace.heads import checkpoint
from outpace.heads.base import parameters, teacher_of
from outpace.heads.head_config import HeadConfig, TargetFacts
from outpace.heads.kinds import find_kind, kinds, plan
from outpace.methods.registry import drafting_with, methods
from outpace.model import Model
from outpace.prompts.overlap import Overlap
from outpace.prompts.questions import bench_texts
from outpace.prompts.sources import source
from outpace.training.collection import TOKENS, collect
from outpace.training.data import Collector, layers_of_all_kinds, open_folder
from outpace.training.data_config import DataConfig
from outpace.training.dataset import Dataset
from outpace.training.job_checks import check_amounts, check_folder, check_shares
from outpace.training.memory import ran_out
from outpace.training.on_policy import with_on_policy
from outpace.training.run_state import read_state, seconds_spent
from outpace.training.schedule import Schedule
from outpace.training.shards import Shards
from outpace.training.time_plan import TimePlan, TrainingSpeed
from outpace.training.trainer import Trainer
from outpace.training.training_progress import Report, TrainingProgress
from outpace.training.trial import try_head

_MEASURING = 0.02
"""Of the time that there is: a step of training that takes longer is not repeated to measure its speed."""
VOCABULARY = 8192
"""Tokens that a head can draft, by default: reading the LM head is most of a draft's cost."""


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head on disk. ``method``: one that drafts with it; ``provenance``: what its ``training.json`` says.

    ``provenance["trial"]["gains"]``: whether the target accepts enough of what it drafts to be worth using.
    """

    kind: str
    method: str
    folder: Path
    provenance: dict[str, Any]


def train(
    model: Model | Callable[[], Model],
    kind: str,
    output: str | Path,
    *,
    prompts: Sequence[str | Path] | None = None,
    tokens: int | None = None,
    self_written: float | None = None,
    passages: float = 0.2,
    exclude: Sequence[str | Path] | None = None,
    data: str | Path | None = None,
    cache_bytes: float | None = None,
    max_minutes: float | None = None,
    epochs: float | None = None,
    resume: bool = False,
    size: str = "base",
    vocabulary: int | None = None,
    rank: int = 0,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_progress: Report = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainedHead:
    """Train a head that drafts for a model, on the model's own answers to prompts.

    ``model``: or what loads it, called after everything else has been checked. ``kind``: of head, or a method that
    drafts with one. ``output``: the folder to write. ``prompts``: files of JSON lines or data sets of the hub; what
    they lack the model writes itself. ``tokens``: of answers to train on; None takes a million, or with ``max_minutes``
    as many as there is time for. ``self_written``: share of prompts that the model writes; ``passages``: share of
    prompts about passages. ``exclude``: files of prompts to keep out of the data. ``data``: the folder of
    conversations, "data" in ``output`` by default. ``cache_bytes``: disk for hidden states.
    ``max_minutes``: of data and training together, over all runs; what was trained until then is the head. ``epochs``:
    passes over the data; None is one, or where ``max_minutes`` decides the amount of data as many as there is time for.
    ``size``: tiny, small, base or large. ``vocabulary``: tokens that the head can draft, 0 for all; None takes 8,192,
    or all with ``rank``, that of a low-rank LM head. ``options``: the kind's own settings. ``on_progress`` is called
    all along and may raise KeyboardInterrupt. ``clock``: seconds.

    A KeyboardInterrupt, from Ctrl-C as well, keeps data and run and is raised again; ``resume=True`` goes on. Raises
    BadInput for options out of range, files that cannot be read, a folder that holds something else, and memory or disk
    that ran out.
    """
    head_kind, method = kind_and_method(kind)
    folder, settings = Path(output), dict(options or {})
    if vocabulary is None:
        vocabulary = 0 if rank else VOCABULARY
    check_amounts(tokens, rank, vocabulary, max_minutes, epochs, cache_bytes)
    stand_in = TargetFacts(name="", hidden_size=64, vocab_size=64, num_layers=1000, fingerprint=[])
    plan(find_kind(head_kind), stand_in, size=size, rank=rank, options=settings)
    check_shares(self_written, passages, bool(prompts))
    check_folder(folder, resume)
    spent = seconds_spent(folder) if resume else 0.0
    bound = TimePlan(math.inf if max_minutes is None else 60.0 * max_minutes, clock, spent)
    wanted = DataConfig(
        tokens=TOKENS if tokens is None else tokens,
        sources=[source(str(one), seed) for one in prompts or ()],
        self_written=self_written,
        passages=passages,
        cache_bytes=None if cache_bytes is None else int(cache_bytes),
        seed=seed,
        plan=bound,
    )
    excluded = Overlap(bench_texts([Path(one) for one in exclude or ()]))
    passes = epochs or (math.inf if tokens is None and bound.bounded else 1.0)

    if not isinstance(model, Model):
        model = model()
    facts = checkpoint.facts(model.target, model.name)
    config = plan(find_kind(head_kind), facts, size=size, vocabulary=vocabulary, rank=rank, options=settings)
    layers = sorted({*config.aux_hidden_state_layers, *layers_of_all_kinds(model.target)})
    shards = open_folder(folder / "data" if data is None else Path(data), model.target, model.name, layers)
    run = _Run(model, config, shards, folder, bound, passes, seed)
    collected = collect(Collector(model, shards, wanted, excluded), shards, tokens, bound, run.speed, on_progress)
    try:
        trainer = run.trainer(resume=resume)
        _train(trainer, folder, on_progress)
        on_progress(TrainingProgress("evaluation", 0, 1, "held-out conversations"))
        trial = try_head(model, trainer.head, method, shards)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise BadInput(
            "memory ran out in training; the saved state is kept: free some memory, or give a smaller --size, and "
            "continue with --resume"
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
    about = {"command": command, "data": collected.public(), "seed": seed, "parameters": parameters(trainer.head)}
    about["trial"] = trial.public()
    return TrainedHead(head_kind, method, folder, _written(trainer, folder, about))


def kind_and_method(named: str) -> tuple[str, str]:
    """The kind of head that was named, itself or by a method that drafts with it; and a method to use it with."""
    kind = next((one for one in kinds() if normalised(one) == normalised(named)), None)
    if kind is None:
        for info in methods():
            if info.head is not None and normalised(named) in map(normalised, (info.name, *info.aliases)):
                return info.head, info.name
        kind = named
    return kind, (drafting_with(kind) or [kind])[0]


@dataclass(frozen=True, slots=True)
class _Run:
    """What the trainers of one training are made of."""

    model: Model
    config: HeadConfig
    shards: Shards
    folder: Path
    bound: TimePlan
    epochs: float
    seed: int

    def speed(self) -> TrainingSpeed:
        """How fast a head of this kind learns, on what has been collected."""
        return self._made(None).speed(patience=_MEASURING * self.bound.seconds)

    def trainer(self, *, resume: bool) -> Trainer:
        """A new head, or the run in the folder, and what it learns from; it ends when the plan's time is over."""
        state = read_state(self.folder) if resume else None
        trainer = self._made(state)
        if resume:
            trainer.resume()
        progress = trainer.progress
        if self.bound.bounded:  # where nothing is left, a new head gets one step and an old one none
            seconds = max(progress.seconds + self.bound.left, 1e-3)
            trainer.schedule = replace(trainer.schedule, seconds=seconds)
        progress.other_seconds = self.bound.spent - progress.seconds
        return trainer

    def _made(self, state: Mapping[str, Any] | None) -> Trainer:
        model, config, target = self.model, self.config, self.model.target
        where = torch.device(model.info.get("device", "cpu"))
        dataset = Dataset(self.shards, sorted({*config.aux_hidden_state_layers, target.num_layers}), target=target)
        if state is not None and "words" in state:  # data may have grown since: the head keeps its vocabulary
            ids = state["words"].cpu()
        else:
            ids = dataset.words(config.vocabulary, target.vocab_size, sorted(model.eos_ids))
        head = checkpoint.new_head(config, target, ids, self.seed)
        teacher = teacher_of(target, head, where)
        head.initialise(target, teacher)
        learned_from = with_on_policy(dataset, head, teacher, target, model.eos_ids)
        schedule = Schedule(epochs=self.epochs, seed=self.seed)
        return Trainer(head, teacher, learned_from, self.folder, schedule, where, self.bound.clock)


def _train(trainer: Trainer, folder: Path, report: Report) -> None:
    """The training. After Ctrl-C its state is saved."""

    def tell(stage: Literal["training", "stopped"], doing: str) -> None:
        step, share = trainer.progress.step, trainer.share
        # Before the first step nothing is known of their number.
        report(TrainingProgress(stage, step, max(step, round(step / share)) if share else 0, doing, "steps"))

    def watch(now: Any, _: float) -> None:
        tell("training", ", ".join(f"{name} {value:.3f}" for name, value in list(now.figures.items())[:3]))

    tell("training", "first step")
    try:
        trainer.run(watch)
    except KeyboardInterrupt:
        trainer.save()
        tell("stopped", str(folder))
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
            f"the head cannot be written to {folder} ({error}); the run is kept: free some space, and continue with "
            "--resume"
        ) from error
    return made


def _command(kind: str, flags: Mapping[str, Any]) -> str:
    """The command that trains such a head; None leaves a flag out, a list repeats it."""
    words = ["outpace", "train", kind]
    for flag, value in flags.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{flag}", f"{one:g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)
