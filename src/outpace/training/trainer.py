"""The trainer: one loop for every kind of head, on the CPU or a GPU, that can be stopped and resumed at any moment.

Weights are trained in float32 and multiplied in bfloat16 (:mod:`outpace.training.optimiser`), or in float32 on
processors that are slow in bfloat16. The state of a run lies
beside the head in ``trainer.pt``: weights, optimiser, position in the data, best weights so far, and the head's draft
vocabulary. A second run with the same folder goes on from it, at the next batch. A step whose loss or gradients are not
finite changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.errors import BadInput
from outpace.heads.base import Batch, Head, Teacher
from outpace.models.placement import training_dtype
from outpace.models.quiet import explained
from outpace.training.dataset import TrainingData
from outpace.training.mean_losses import ROUNDS, mean_losses, seeded
from outpace.training.memory import give_back
from outpace.training.optimiser import ALONE, Optimiser
from outpace.training.processes import LostProcess, Processes
from outpace.training.run_state import STATE, read_state, settings_of, write_state
from outpace.training.schedule import Progress, Schedule
from outpace.training.sharded_optimiser import ShardedOptimiser
from outpace.training.time_plan import TrainingSpeed

VAIN = 3
"""Steps in a row without a finite loss after which training gives up."""
TIDY = 10.0
"""Seconds between two times at which freed memory is returned to the system."""


Watch = Callable[[Progress, float], None]
"""Called after every step with the progress and the share of the run that is done."""


class Trainer:
    """Trains one head on ``device``. ``run`` returns when the data, the time or the patience is used up.

    ``folder``: where the state of the run is kept. ``clock``: seconds. ``processes``: those that train together.
    ``source``: the folder of states that another engine wrote, where conversations come from one. ``began``: the
    fingerprint of the weights that the head begins with, where it was trained before.
    """

    def __init__(
        self,
        head: Head,
        teacher: Teacher,
        data: TrainingData,
        folder: Path,
        schedule: Schedule,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        processes: Processes = ALONE,
        source: str = "",
        began: str = "",
    ) -> None:
        self.processes, self.source, self.began = processes, source, began
        self.head, self.teacher, self.data, self.folder = head.to(device), teacher, data, folder
        self.schedule, self.device, self.clock = schedule, device, clock
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        trained = dict(self._trained())
        lm_head = set(self.head.draft_vocabulary.parameters())
        matrices = [one for one in trained.values() if one.dim() == 2 and one not in lm_head]
        others = [one for one in trained.values() if one.dim() != 2 or one in lm_head]
        rate = head.matrix_rate if schedule.matrix_rate is None else schedule.matrix_rate
        kind = ShardedOptimiser if schedule.shard and processes.count > 1 else Optimiser
        self.optimiser = kind(list(trained.values()), matrices, others, rate, schedule.vector_rate, processes)
        self.dtype = training_dtype(device)
        self.head.to(self.dtype)
        self._answers = data.answer_tokens()
        self._total = max(1.0, schedule.epochs * self._answers)
        self._vain = 0
        self._evaluated = -1
        self._gathered = self._asked = 0
        self._losses_finite = True

    @property
    def share(self) -> float:
        """How much of the run is done, in [0, 1]."""
        return min(1.0, max(self.progress.tokens / self._total, self.progress.seconds / self.schedule.seconds))

    def run(self, watch: Watch = lambda *_: None) -> Progress:
        """Train to the end, saving on the way; the head has the best weights afterwards.

        Raises BadInput where there is nothing to train on, the loss is not finite or the disk is full.
        """
        began = saved = evaluated = tidied = self.clock()
        spent = self.progress.seconds
        for batch in () if self.processes.agreed(self.finished) else self._batches():
            self._step(batch)
            self.progress.batch += 1
            self.progress.seconds = spent + self.clock() - began
            if self._gathered:  # in the middle of a step
                continue
            watch(self.progress, self.share)
            if self.processes.agreed(self.clock() - evaluated > self.schedule.evaluate_every):
                self.evaluate()
                evaluated = self.clock()
            if self.processes.agreed(self.clock() - saved > self.schedule.save_every):
                self.save()
                saved = self.clock()
            if self.clock() - tidied > TIDY:
                give_back()
                tidied = self.clock()
            if self.processes.agreed(self.finished):
                break
        if self._evaluated != self.progress.step:
            self.evaluate()
        self.save()
        if self.best:
            self.head.load_state_dict(self.best, strict=False)
        return self.progress

    def speed(self, steps: int = 3, patience: float = math.inf) -> TrainingSpeed:
        """How fast it trains, what makes its batches ready included. The run is of no other use afterwards.

        A first step does not count, unless it takes more than ``patience`` seconds: then it is all.
        """
        together = self.schedule.accumulate
        self.schedule = replace(self.schedule, accumulate=1)
        coming, batches, waited = self.data.train(self.schedule.seed), list[Batch](), list[float]()
        while len(batches) < steps:
            began = self.clock()
            batch = next(coming, None)
            if batch is None:
                break
            batches.append(batch)
            waited.append(self.clock() - began if batches[1:] else 0.0)  # the first waits until many have been read
        if not batches:
            raise BadInput("there is nothing to train on: no conversation outside the held-out split")
        for counted, spent in ((batches[:1], 0.0), (batches[1:] or batches, sum(waited))):
            began, before = self.clock(), self.progress.tokens
            for batch in counted:
                self._step(batch)
            tokens, seconds = self.progress.tokens - before, max(spent + self.clock() - began, 1e-9)
            if seconds > patience:
                break
        seconds += tokens * self.data.reading
        return TrainingSpeed(tokens / seconds, together * tokens / len(counted))

    @property
    def finished(self) -> bool:
        """Whether the data, the time or the patience is used up."""
        return self.share >= 1.0 or self.progress.worse >= self.schedule.patience

    def _batches(self) -> Iterator[Batch]:
        """This process's batches: each process has every so many of a pass, and all have as many."""
        count = self.processes.count
        while True:
            seen = False
            had = self.progress.batch * count  # by an earlier run
            epoch = self.schedule.seed + self.progress.epoch
            for batch in self.processes.deal(self.data.train(epoch, had, self.processes.has)):
                seen = True
                yield batch
            if not seen and not had:
                raise BadInput(
                    "there is nothing to train on: no conversation outside the held-out split"
                    if count == 1
                    else f"there are fewer batches in a pass than the {count} processes; train on more data"
                )
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def _step(self, batch: Batch) -> None:
        """Gather the gradients of a batch; with those of as many as the schedule wants, take a step."""
        wanted, processes = self.schedule.accumulate, self.processes
        self.head.train()
        # Which of all batches of the step it is, whoever has it.
        which = self._gathered * processes.count + processes.rank
        with self._chance(self.progress.step + 1 + (which << 40)):
            found = self._losses(batch)
            torch.autograd.backward(found["loss"])
        self.optimiser.gather(1.0 / wanted)
        self._losses_finite &= bool(torch.isfinite(found["loss"]))
        self._asked += int(batch.answer.sum())
        self._gathered += 1
        keep = 0.95 if self.progress.step >= 20 else 0.5
        figures = {name: float(value.detach()) for name, value in found.items() if name != ROUNDS}
        if self._gathered == wanted:
            try:
                share, asked = processes.of_first(self.share), processes.total(self._asked)
                taken = self.optimiser.step(share, finite=self._losses_finite)
            except LostProcess:  # this batch is not trained on: whoever saves is to say so
                self._gathered -= 1
                raise
            self._gathered, self._asked, self._losses_finite = 0, 0, True
            self.progress.step += 1
            self.progress.tokens += asked
            if not taken:
                self._skip()
                return
            self._vain = 0
        if all(math.isfinite(value) for value in figures.values()):
            for name, value in figures.items():
                self.progress.figures[name] = keep * self.progress.figures.get(name, value) + (1.0 - keep) * value

    def _skip(self) -> None:
        """Count a step without a finite loss. Raises BadInput after ``VAIN`` in a row."""
        self.progress.skipped += 1
        self._vain += 1
        if self._vain >= VAIN:
            raise BadInput(
                f"the loss was not a finite number {VAIN} steps in a row (up to step {self.progress.step}); what was "
                "saved before is kept: check the head's settings (--param) and the data"
            )

    def _chance(self, number: int) -> AbstractContextManager[None]:
        return seeded(self.schedule.seed, number, self.device)

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.head.losses(batch.to(self.device, self.dtype), self.teacher)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.head.named_parameters() if weight.requires_grad]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean losses by name on what the loss is watched on, a mean over tokens; empty where nothing is held out.

        Keeps the weights when they are the best so far.
        """
        means = self._held_out()
        if not means:
            return {}
        self._evaluated = self.progress.step
        self.progress.history.append((self.progress.step, means["loss"]))
        if means["loss"] < self.progress.best:
            self.progress.best = means["loss"]
            self.best = {name: value.detach().clone() for name, value in self._trained()}
        if means["loss"] < self.progress.lowest:
            self.progress.lowest, self.progress.worse = means["loss"], 0
        elif self.share >= self.schedule.patient_until:
            self.progress.worse += 1
        return means

    def keep_start(self) -> None:
        """Keep the weights as they are, which were trained before, until others have a lower held-out loss."""
        self.evaluate()
        self.progress.lowest = math.inf  # a rate that rises again raises the loss at first

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Mean losses by name over the whole held-out split, of the weights as they are; empty where there is none."""
        return self._means(self.data.all_held_out())

    def _held_out(self) -> dict[str, float]:
        """The same on what the loss is watched on."""
        return self._means(self.data.held_out())

    def _means(self, batches: Iterator[Batch]) -> dict[str, float]:
        return mean_losses(self.head, batches, self._losses, self._chance)

    def save(self, *, alone: bool = False) -> None:
        """Write the run's state, whole or not at all. Raises BadInput where it cannot be written.

        Batches of a step that has not been taken are trained on again. Of several processes the first one writes.
        ``alone``: the others may not be there; where they have parts of the state, what was saved before is kept.
        """
        shared_out = isinstance(self.optimiser, ShardedOptimiser)
        if (shared_out and alone) or (not shared_out and not self.processes.first):
            return
        values, moments = self.optimiser.values(), self.optimiser.state()
        if not self.processes.first:
            return
        progress = {name: getattr(self.progress, name) for name in Progress.__slots__}
        progress["batch"] = max(0, self.progress.batch - self._gathered) * self.processes.count  # of all of them
        state: dict[str, Any] = {
            "head": {name: value for (name, _), value in zip(self._trained(), values, strict=True)},
            "best": self.best,
            "optimisers": moments,
            "progress": progress,
            "config": settings_of(self.head.config),
            "words": self.head.draft_vocabulary.d2t,
            "length": self._length(),
        }
        write_state(self.folder, state)

    def resume(self) -> bool:
        """Go on from the folder's state. False where there is none; raises BadInput for one of another head."""
        state = read_state(self.folder)
        if state is None:
            return False
        with explained(f"{self.folder / STATE} is damaged", "delete it to start over"):
            before = self._take_over(state)
            planned = self.schedule.length(self._answers)
            if {name: before.get(name, value) for name, value in planned.items()} != planned:  # patience begins anew
                self.progress.lowest, self.progress.worse = math.inf, 0
            changed = before.get("answers") != self._answers
            watched = before.get("watched", self.schedule.watched) != self.schedule.watched
            if changed and before.get("source", self.source) != self.source:
                raise BadInput(
                    f"{self.folder} holds a run on the conversations of {before['source'] or 'another source'}; to "
                    f"train its head on others, give another --out, and --from {self.folder}"
                )
            if changed or before.get("cut", self.data.cut) != self.data.cut:  # a pass has other batches now
                self.progress.batch = 0
        if self.best and (changed or watched):
            self._measure_best()
        self.optimiser.round()
        self._evaluated = self.progress.history[-1][0] if self.progress.history else -1
        return True

    def _take_over(self, state: dict[str, Any]) -> dict[str, Any]:
        """Weights, moments and progress of an earlier run, checked. Returns how long that run was to be."""
        where, settings = self.folder / STATE, settings_of(self.head.config)
        if {name: value for name, value in state["config"].items() if name != "target"} != settings:
            raise BadInput(f"{where} is of a run with other settings; give the same ones, or another folder")
        if "words" in state and not torch.equal(state["words"].cpu(), self.head.draft_vocabulary.d2t.cpu()):
            raise BadInput(f"{where} is of a head with other words; give its data, or another folder")
        names = [name for name, _ in self._trained()]
        if state["best"] and set(state["best"]) != set(names):
            raise ValueError("its best weights are not those of the head")
        self.optimiser.restore([state["head"][name] for name in names], state["optimisers"])
        self.best = {name: value.to(self.device) for name, value in state["best"].items()}
        self.progress = Progress(**state["progress"])
        self.progress.batch //= self.processes.count
        return dict(state.get("length", {}))

    def _length(self) -> dict[str, Any]:
        """What decides when the run ends, which batches a pass has, and what the run is."""
        own = {"cut": self.data.cut, "source": self.source, "seed": self.schedule.seed, "began": self.began}
        return {**self.schedule.length(self._answers), **own}

    @torch.no_grad()
    def _measure_best(self) -> None:
        """Measure the best weights on the held-out split as it is now: losses on an earlier one do not compare."""
        self.head.load_state_dict(self.best, strict=False)
        self.progress.best = self._held_out().get("loss", math.inf)
