"""A training from data to a head on disk, as ``outpace train`` runs it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from outpace.cli.bars import bar
from outpace.cli.interrupt import deferred
from outpace.cli.output import err
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.heads.head_config import HeadConfig
    from outpace.model import Model
    from outpace.prompts.overlap import Overlap
    from outpace.prompts.sources import Source
    from outpace.training.data import Collected
    from outpace.training.shards import Shards
    from outpace.training.trainer import Trainer


@dataclass(slots=True)
class Job:
    """A training, checked and not yet begun."""

    kind: str
    method: str
    output: Path
    data: Path
    sources: list[Source]
    excluded: Overlap
    tokens: int
    self_written: float | None
    readings: float
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
        from outpace.heads.checkpoint import facts
        from outpace.heads.kinds import find_kind, plan
        from outpace.training.data import layers_of_all_kinds, open_folder

        config = plan(
            find_kind(self.kind),
            facts(model.target, model.name),
            size=self.size,
            vocabulary=self.vocabulary,
            rank=self.rank,
            options=self.options,
        )
        layers = sorted({*config.aux_hidden_state_layers, *layers_of_all_kinds(model.target)})
        shards = open_folder(self.data, model.target, model.name, layers)
        collected = self._collect(model, shards)
        return self._train(model, config, shards, collected)

    def _collect(self, model: Model, shards: Shards) -> Collected:
        from outpace.training.data import Collector
        from outpace.training.data_config import DataConfig

        wish = DataConfig(
            tokens=self.tokens,
            sources=self.sources,
            self_written=self.self_written,
            passages=self.readings,
            cache_bytes=self.cache_bytes,
            seed=self.seed,
        )
        collector = Collector(model, shards, wish, self.excluded)
        with bar("tokens answered") as shown:

            def watch(now: Collected) -> None:
                shown.move(now.tokens, self.tokens, now.doing)

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

        from outpace.heads.base import parameters, teacher_of
        from outpace.heads.checkpoint import new_head
        from outpace.training.dataset import Dataset
        from outpace.training.memory import ran_out
        from outpace.training.on_policy import with_on_policy
        from outpace.training.run_state import read_state
        from outpace.training.trainer import Schedule, Trainer

        target, where = model.target, torch.device(model.info.get("device", "cpu"))
        dataset = Dataset(shards, sorted({*config.aux_hidden_state_layers, target.num_layers}), target=target)
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
        with bar(f"training {self.kind}") as shown, deferred() as interrupt:

            def watch(now: Any, share: float) -> None:
                figures = ", ".join(f"{name} {value:.3f}" for name, value in list(now.figures.items())[:3])
                shown.move(round(1000 * share), 1000, f"step {now.step:,}, {figures}")
                if interrupt.pressed:  # between two steps, where everything is of a piece
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

        from outpace.core.machine import describe
        from outpace.heads.checkpoint import save

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
        words += ["--passages", f"{self.readings:g}"]
        if self.seconds != float("inf"):
            words += ["--max-minutes", f"{self.seconds / 60:g}"]
        words += ["--epochs", f"{self.epochs:g}", "--size", self.size, "--vocabulary", str(self.vocabulary)]
        if self.rank:
            words += ["--rank", str(self.rank)]
        for key, value in self.options.items():
            words += ["--param", f"{key}={value}"]
        return shlex.join([*words, "--seed", str(self.seed)])
