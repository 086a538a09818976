"""The trainer: one loop for every kind of head, on the CPU or a GPU, that a kill at any moment cannot hurt.

Matrices learn by Muon (Jordan et al. 2024), which orthogonalises their updates and needs about half the steps of AdamW
at these sizes (LOG.md); vectors by AdamW, and matrices too where torch is older than Muon. Weights are float32,
products bfloat16. The state of a run lies beside the head in ``trainer.pt``: weights, optimiser, position in the data,
best so far, and the head's words. A second run with the same folder goes on from it, at the next batch. A step whose
loss or gradients are not finite changes nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outpace.core.errors import BadInput
from outpace.core.files import appearing
from outpace.heads.base import Batch, Head, Teacher
from outpace.models.quiet import one_line
from outpace.training.memory import give_back

STATE = "trainer.pt"
VAIN = 3
"""Steps in a row without a finite loss after which training gives up."""
TIDY = 10.0
"""Seconds after which freed memory is given back."""
WARM = 0.03
"""Share of the run in which the learning rate rises."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast. ``seconds``: of training, over all runs; the rate falls towards whatever ends first.

    ``matrix_rate``: None for what the kind of head wants.
    """

    epochs: float = 1.0
    seconds: float = math.inf
    matrix_rate: float | None = None
    vector_rate: float = 1e-3
    save_every: float = 120.0
    evaluate_every: float = 300.0
    patience: int = 3
    """Evaluations without improvement after which training ends."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.epochs > 0:
            raise BadInput("training needs some time and some data: minutes and epochs must be above 0")


@dataclass(slots=True)
class Progress:
    """Where a run is. ``seconds``: spent in training, over all runs; ``history``: (step, held-out loss).

    ``batch``: the next one of ``epoch``; ``skipped``: steps without a finite loss. ``best``: the lowest held-out loss,
    that of the weights that are kept; ``lowest``: the lowest since the run went on, which patience goes by: a rate that
    rises again lifts the loss at first.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    best: float = math.inf
    lowest: float = math.inf
    worse: int = 0
    skipped: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Data(Protocol):
    """What is learned from: a :class:`outpace.training.dataset.Dataset`, or what stands in for one."""

    def answer_tokens(self) -> int:
        """Tokens of answers in a pass."""
        ...

    def train(self, epoch: int) -> Iterator[Batch]:
        """One pass, the same for the same ``epoch``."""
        ...

    def held_out(self) -> Iterator[Batch]:
        """What is never trained on."""
        ...


Watch = Callable[[Progress, float], None]
"""Called after every step with the progress and the share of the run that is done."""


class Trainer:
    """Trains one head. ``run`` returns when the data, the time or the patience is spent."""

    def __init__(
        self, head: Head, teacher: Teacher, data: Data, folder: Path, schedule: Schedule, device: torch.device
    ) -> None:
        self.head, self.teacher, self.data, self.folder = head.to(device), teacher, data, folder
        self.schedule, self.device = schedule, device
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        trained = dict(self._trained())
        matrices = [one for name, one in trained.items() if one.dim() == 2 and not name.startswith("draft_vocabulary.")]
        others = [one for name, one in trained.items() if one.dim() != 2 or name.startswith("draft_vocabulary.")]
        # The network is bfloat16 throughout, and learns on float32 copies: small steps are not lost to rounding.
        self._copies = [(one, one.detach().float().clone().requires_grad_()) for one in trained.values()]
        masters = {id(one): copy for one, copy in self._copies}
        large, small = [masters[id(one)] for one in matrices], [masters[id(one)] for one in others]
        if not hasattr(torch.optim, "Muon"):
            large, small = [], [*large, *small]
        self.head.to(torch.bfloat16)
        self.optimisers: list[torch.optim.Optimizer] = []
        if large:
            rate = head.matrix_rate if schedule.matrix_rate is None else schedule.matrix_rate
            self.optimisers.append(torch.optim.Muon(large, lr=rate, weight_decay=0.01, momentum=0.95))
        if small:
            self.optimisers.append(
                torch.optim.AdamW(small, lr=schedule.vector_rate, betas=(0.9, 0.98), weight_decay=0.0)
            )
        self._rates = [group["lr"] for one in self.optimisers for group in one.param_groups]
        self._answers = data.answer_tokens()
        self._total = max(1, round(schedule.epochs * self._answers))
        self._vain = 0
        self._evaluated = -1

    @property
    def share(self) -> float:
        """How much of the run is done, in [0, 1]."""
        return min(1.0, max(self.progress.tokens / self._total, self.progress.seconds / self.schedule.seconds))

    def run(self, watch: Watch = lambda *_: None) -> Progress:
        """Train to the end, saving on the way; the head holds the best weights afterwards."""
        began = saved = evaluated = tidied = time.monotonic()
        spent = self.progress.seconds
        for batch in () if self.finished else self._batches():
            self._step(batch)
            self.progress.batch += 1
            self.progress.seconds = spent + time.monotonic() - began
            watch(self.progress, self.share)
            if time.monotonic() - evaluated > self.schedule.evaluate_every:
                self.evaluate()
                evaluated = time.monotonic()
            if time.monotonic() - saved > self.schedule.save_every:
                self.save()
                saved = time.monotonic()
            if time.monotonic() - tidied > TIDY:
                give_back()
                tidied = time.monotonic()
            if self.finished:
                break
        if self._evaluated != self.progress.step:
            self.evaluate()
        self.save()
        if self.best:
            self.head.load_state_dict(self.best, strict=False)
        return self.progress

    @property
    def finished(self) -> bool:
        """Whether the data, the time or the patience is spent."""
        return self.share >= 1.0 or self.progress.worse >= self.schedule.patience

    def _batches(self) -> Iterator[Batch]:
        while True:
            seen = False
            for number, batch in enumerate(self.data.train(self.schedule.seed + self.progress.epoch)):
                seen = True
                if number >= self.progress.batch:  # an earlier run had those before
                    yield batch
            if not seen:
                raise BadInput("there is nothing to train on: no conversation outside the held-out split")
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def _step(self, batch: Batch) -> None:
        share = self.share
        rate = min(1.0, share / WARM + 0.02) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))
        groups = [group for one in self.optimisers for group in one.param_groups]
        for group, base in zip(groups, self._rates, strict=True):
            group["lr"] = base * rate
        self.head.train()
        with self._chance(self.progress.step + 1):
            found = self._losses(batch)
            torch.autograd.backward(found["loss"])
        self.progress.step += 1
        self.progress.tokens += int(batch.answer.sum())
        for weight, copy in self._copies:
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        size = nn.utils.clip_grad_norm_([copy for _, copy in self._copies], 1.0)
        if not bool(torch.isfinite(found["loss"]) & torch.isfinite(size)):
            self._skip()
            return
        self._vain = 0
        for one in self.optimisers:
            one.step()
        self._follow()
        keep = 0.95 if self.progress.step > 20 else 0.5
        for name, value in found.items():
            before = self.progress.figures.get(name, float(value.detach()))
            self.progress.figures[name] = keep * before + (1.0 - keep) * float(value.detach())

    def _skip(self) -> None:
        """Forget a step whose loss is no number. Raises BadInput when several in a row were none."""
        for _, copy in self._copies:
            copy.grad = None
        self.progress.skipped += 1
        self._vain += 1
        if self._vain >= VAIN:
            raise BadInput(
                f"the loss was not a finite number {VAIN} steps in a row (up to step {self.progress.step}); what was "
                "saved before is kept: check the head's settings (--param) and the data"
            )

    @torch.no_grad()
    def _follow(self) -> None:
        """The network takes over what its copies have learned."""
        for weight, copy in self._copies:
            weight.copy_(copy)

    @contextlib.contextmanager
    def _chance(self, number: int) -> Iterator[None]:
        """What a head draws at random depends on the seed and the step alone, so a run that goes on draws the same."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed((self.schedule.seed * 1_000_003 + number) % 2**63)
            yield

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        moved = Batch(
            batch.tokens.to(self.device),
            {layer: rows.to(self.device, torch.bfloat16) for layer, rows in batch.states.items()},
            batch.real.to(self.device),
            batch.answer.to(self.device),
        )
        return self.head.losses(moved, self.teacher)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.head.named_parameters() if weight.requires_grad]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean figures over the held-out split; remembers the weights when they are the best so far."""
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
        else:
            self.progress.worse += 1
        return means

    def _held_out(self) -> dict[str, float]:
        """Mean figures of the weights as they are over the held-out split; none where nothing is held out."""
        self.head.eval()
        sums: dict[str, float] = {}
        weight = 0
        for number, batch in enumerate(self.data.held_out()):
            count = int(batch.answer.sum())
            with self._chance(-1 - number):
                losses = self._losses(batch)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + count * float(value)
            weight += count
        return {name: value / weight for name, value in sums.items()} if weight else {}

    def save(self) -> None:
        """The run's state, whole or not at all."""
        state: dict[str, Any] = {
            "head": {name: copy.detach() for (name, _), (_, copy) in zip(self._trained(), self._copies, strict=True)},
            "best": self.best,
            "optimisers": [one.state_dict() for one in self.optimisers],
            "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
            "config": self._settings(),
            "words": self.head.draft_vocabulary.d2t,
            "length": self._length(),
        }
        try:
            with appearing(self.folder / STATE) as unfinished:
                torch.save(state, unfinished)
        except (OSError, RuntimeError) as error:
            raise BadInput(
                f"{self.folder / STATE} cannot be written ({error}); the state saved before is kept: make room, and "
                "run again with --resume"
            ) from error

    def _settings(self) -> dict[str, Any]:
        """What must be the same when a run goes on. The target's own fingerprint is rounded, and checked elsewhere."""
        return self.head.config.model_dump(exclude={"target"})

    def _length(self) -> dict[str, float]:
        """What says when a run ends."""
        return {"epochs": self.schedule.epochs, "seconds": self.schedule.seconds, "answers": self._answers}

    def resume(self) -> bool:
        """Go on from the folder's state. False where there is none; raises BadInput for one of another head."""
        state = read_state(self.folder)
        if state is None:
            return False
        known = {name: value for name, value in state["config"].items() if name != "target"}
        if known != self._settings():
            raise BadInput(
                f"{self.folder / STATE} is of a run with other settings; give the same ones, or another folder"
            )
        if "words" in state and not torch.equal(state["words"].cpu(), self.head.draft_vocabulary.d2t.cpu()):
            raise BadInput(f"{self.folder / STATE} is of a head with other words; give its data, or another folder")
        with torch.no_grad():
            for (name, _), (_, copy) in zip(self._trained(), self._copies, strict=True):
                copy.copy_(state["head"][name])
        self.best = {name: value.to(self.device) for name, value in state["best"].items()}
        for one, kept in zip(self.optimisers, state["optimisers"], strict=True):
            one.load_state_dict(kept)
        self.progress = Progress(**state["progress"])
        before = state.get("length", {})
        if before != self._length():  # a longer run than the one that may have ended: patience begins anew
            self.progress.lowest, self.progress.worse = math.inf, 0
        if self.best and before.get("answers") != self._answers:
            self._measure_best()
        self._follow()
        self._evaluated = self.progress.history[-1][0] if self.progress.history else -1
        return True

    @torch.no_grad()
    def _measure_best(self) -> None:
        """Once the data has grown, and with it the held-out split, losses from before do not compare."""
        self.head.load_state_dict(self.best, strict=False)
        self.progress.best = self._held_out().get("loss", math.inf)


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state of the run in a folder; None where there is none. Raises BadInput for one that is damaged."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        missing = {"head", "best", "optimisers", "progress", "config"} - set(state)
    except Exception as error:
        raise BadInput(f"{path} is damaged ({one_line(error)}); delete it to begin anew") from error
    if missing:
        raise BadInput(f"{path} is damaged (it lacks {', '.join(sorted(missing))}); delete it to begin anew")
    return state
