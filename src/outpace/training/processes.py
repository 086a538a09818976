"""Several processes that train one head together, each on batches of its own (data parallelism).

Every process holds the whole head and its optimiser; gradients are averaged in float32 before each step, so that all
make the same one. ``torchrun --nproc-per-node N -m outpace train ...`` or ``accelerate launch`` starts them, on one
machine or several; accelerate connects them (gloo between CPUs, NCCL between GPUs). The first process collects the
data, decides when the training ends, and writes the head.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.models.quiet import one_line

T = TypeVar("T")
_PATIENCE = timedelta(days=7)
"""How long a process waits for the others: the first one may collect data for days."""


class LostProcess(BadInput):
    """Another process of the training has ended."""


class Processes:
    """The processes of a training: this one's ``rank`` among ``count``."""

    def __init__(self, accelerator: Any = None) -> None:
        """``accelerator``: accelerate's, that connects them; None: this process alone."""
        self._accelerator = accelerator
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self.count: int = 1 if accelerator is None else accelerator.num_processes

    @property
    def first(self) -> bool:
        """Whether this process is the one that decides and writes."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean of the processes' ``values``, elementwise. Raises LostProcess where a process has died."""
        if self._accelerator is None:
            return values
        with _explained():
            found: Tensor = self._accelerator.reduce(values.to(self._accelerator.device), reduction="mean")
        return found.to(values.device)

    def of_first(self, value: float) -> float:
        """The first process's ``value``. Raises LostProcess where a process has died."""
        if self._accelerator is None:
            return value
        given = torch.tensor([value if self.first else 0.0], dtype=torch.float64)
        return float(self.mean(given)) * self.count

    def agreed(self, wanted: bool) -> bool:
        """What the first process wants: clocks differ between them."""
        return bool(self.of_first(float(wanted)))

    def total(self, count: int) -> int:
        """The sum of the processes' counts. Raises LostProcess where a process has died."""
        return round(float(self.mean(torch.tensor([float(count)], dtype=torch.float64))) * self.count)

    def give(self, values: Tensor, rank: int) -> None:
        """Write ``values`` of the process ``rank`` into those of all others. Raises LostProcess where one has died."""
        if self._accelerator is not None:
            with _explained():  # as bytes: not every number can be sent between CPUs
                torch.distributed.broadcast(values.view(-1).view(torch.uint8), src=rank)

    def object_of(self, value: T, rank: int) -> T:
        """What ``value`` is in the process ``rank``. Raises LostProcess where one has died."""
        if self._accelerator is None:
            return value
        found = [value]
        with _explained():
            torch.distributed.broadcast_object_list(found, src=rank)
        return found[0]

    def has(self, number: int) -> bool:
        """Whether the item of this number is this process's."""
        return number % self.count == self.rank

    def deal(self, items: Iterator[T]) -> Iterator[T]:
        """This process's own of ``items``, which all have in the same order; all are given as many."""
        own: list[T] = []
        for number, item in enumerate(items):
            if self.has(number):
                own = [item]
            if number % self.count == self.count - 1:
                yield from own

    def wait(self) -> None:
        """Until all processes are here. Raises LostProcess where one has died."""
        if self._accelerator is not None:
            with _explained():
                self._accelerator.wait_for_everyone()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostProcess(
            f"another process of this training has ended ({one_line(error)}); what was saved is kept: start all of "
            "them again with --resume"
        ) from error


def take_own_gpu() -> None:
    """Of several processes on a machine with GPUs each computes on one of its own. Called before a model is loaded."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def started_together(device: str) -> Processes:
    """The processes that were started with this one, connected; this one alone where nothing started several.

    ``device``: "cpu", or that of the head.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Processes()
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    return Processes(Accelerator(cpu=device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)]))
