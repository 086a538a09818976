"""A training from conversations to a head on disk: what its trainer is made of, its course, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from outpace.core.errors import BadInput
from outpace.core.machine import describe
from outpace.heads import checkpoint
from outpace.heads.base import teacher_of
from outpace.heads.head_config import HeadConfig
from outpace.heads.kinds import find_kind
from outpace.model import Model
from outpace.training.data_config import BatchConfig
from outpace.training.dataset import Conversations, Dataset
from outpace.training.given_states import GivenStates
from outpace.training.on_policy import with_on_policy
from outpace.training.processes import LostProcess, Processes
from outpace.training.run_state import read_state
from outpace.training.schedule import VECTOR_RATE, Schedule
from outpace.training.starting_head import StartingHead
from outpace.training.state_server import StateServer
from outpace.training.time_plan import TimePlan, TrainingSpeed
from outpace.training.trainer import Trainer
from outpace.training.training_progress import Report, TrainingProgress

_MEASURING = 0.02
"""Of the time that there is: a step of training that takes longer is not repeated to measure its speed."""
_EVALUATIONS = 60
"""Evaluations in a run that time bounds, at most; shorter runs have one every ``Schedule.evaluate_every`` seconds."""
_PATIENT_UNTIL = 0.9
"""Share of a run before which a loss that does not fall ends nothing: the rate is then 4 % of its largest."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the trainers of one training are made of."""

    model: Model
    config: HeadConfig
    shards: Conversations
    folder: Path
    bound: TimePlan
    epochs: float
    seed: int
    batches: BatchConfig
    processes: Processes
    server: StateServer | None = None
    """What answers and gives hidden states in the target's place."""
    start: StartingHead | None = None
    """What the head begins as; None: new weights."""
    rate: float | None = None
    """Largest learning rate of matrices; None: that of the kind of head. Those of other weights follow it."""

    def speed(self) -> TrainingSpeed:
        """How fast a head of this kind learns, on what has been collected."""
        return self._made(None, Processes()).speed(patience=_MEASURING * self.bound.seconds)

    def trainer(self, *, resume: bool) -> Trainer:
        """A new head, or the run in the folder, and what it learns from; it ends when the plan's time is over."""
        state = read_state(self.folder) if resume else None
        trainer = self._made(state, self.processes)
        if not (resume and trainer.resume()) and self.start is not None:
            trainer.keep_start()
        progress = trainer.progress
        if self.bound.bounded:  # where nothing is left, a new head gets one step and an old one none
            seconds = max(progress.seconds + self.bound.left, 1e-3)
            apart = max(trainer.schedule.evaluate_every, seconds / _EVALUATIONS)
            trainer.schedule = replace(trainer.schedule, seconds=seconds, evaluate_every=apart)
        progress.other_seconds = self.bound.spent - progress.seconds
        return trainer

    def _made(self, state: Mapping[str, Any] | None, processes: Processes) -> Trainer:
        model, config, target, batches = self.model, self.config, self.model.target, self.batches
        where = torch.device(model.info.get("device", "cpu"))
        dataset = Dataset(
            self.shards,
            sorted({*config.aux_hidden_state_layers, target.num_layers}),
            window=batches.row_tokens,
            tokens=batches.batch_tokens,
            pack=batches.pack and find_kind(config.kind).packs,
            sample=batches.evaluate_tokens,
            prefetch=batches.prefetch,
            target=target,
            served=None if self.server is None else self.server.states_of,
        )
        if state is not None and "words" in state:  # data may have grown since: the head keeps its vocabulary
            ids, own = state["words"].cpu(), "draft_vocabulary.rows" in state["head"]
        elif self.start is not None:
            ids = self.start.words(config.vocabulary, dataset, target.vocab_size)
            own = self.start.head.draft_vocabulary.own
        else:
            ids, own = dataset.words(config.vocabulary, target.vocab_size, sorted(model.eos_ids)), False
        head = checkpoint.new_head(config, target, ids, self.seed, own=own)
        teacher = teacher_of(target, head, where)
        head.initialise(target, teacher)
        if self.start is not None:
            self.start.lend(head)
        learned_from = with_on_policy(dataset, head, teacher, target, model.eos_ids)
        schedule = Schedule(
            epochs=self.epochs,
            matrix_rate=self.rate,
            vector_rate=VECTOR_RATE * (1.0 if self.rate is None else self.rate / head.matrix_rate),
            patient_until=_PATIENT_UNTIL,
            accumulate=batches.accumulate,
            shard=batches.shard,
            seed=self.seed,
            watched=batches.evaluate_tokens,
            asked_seconds=self.bound.seconds,
        )
        clock, source = self.bound.clock, self.shards.folder.name if isinstance(self.shards, GivenStates) else ""
        began = "" if self.start is None else self.start.weights
        return Trainer(head, teacher, learned_from, self.folder, schedule, where, clock, processes, source, began)


def train_to_the_end(trainer: Trainer, folder: Path, report: Report) -> None:
    """The training. After Ctrl-C, and where another process has died, its state is saved, unless it is shared out."""

    def tell(stage: Literal["training", "stopped"], doing: str) -> None:
        step, share = trainer.progress.step, trainer.share
        # Before the first step nothing is known of their number.
        report(TrainingProgress(stage, step, max(step, round(step / share)) if share else 0, doing, "steps"))

    def watch(now: Any, _: float) -> None:
        tell("training", ", ".join(f"{name} {value:.3f}" for name, value in list(now.figures.items())[:3]))

    tell("training", "first step")
    try:
        trainer.run(watch)
    except LostProcess:
        trainer.save(alone=True)
        raise
    except KeyboardInterrupt:
        trainer.save(alone=True)
        tell("stopped", str(folder))
        raise


def written(trainer: Trainer, folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the head on the whole held-out split, and write it. Returns its provenance."""
    progress = trainer.progress
    made = {
        **about,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "skipped_steps": progress.skipped,
        "held_out": {name: round(value, 5) for name, value in trainer.measure().items()},
        "history": [[step, round(loss, 5)] for step, loss in progress.history],
        "machine": describe(),
    }
    trainer.head.config = trainer.head.measured(trainer.data.all_held_out(), trainer.teacher)
    try:
        checkpoint.save(trainer.head, folder, made)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"the head cannot be written to {folder} ({error}); the run is kept: free some space, and continue with "
            "--resume"
        ) from error
    return made
