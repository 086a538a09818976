"""Forwards of fixed shape that are captured once and replayed: the bookkeeping, and the capture on CUDA.

:class:`CudaCapture` has **not yet been run on a GPU**; the tests check which calls it makes. Everything else here runs
in the tests, with a capture that records operations on the CPU and replays them on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from outpace.core.lru import Lru
from outpace.targets.dense.lanes import FixedLanes

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LIMIT = 32  # graphs kept; each holds its results, and of intermediate results they share one pool

Work = Callable[[], tuple[Tensor, ...]]


class Captured(Protocol):
    """A recorded forward: ``replay`` runs it again on the memory that it was recorded with and fills ``output``."""

    output: tuple[Tensor, ...]

    def replay(self) -> None:
        """Run again."""
        ...


Capture = Callable[[Work], Captured]


@dataclass(slots=True)
class _CudaGraph:
    graph: Any
    output: tuple[Tensor, ...]

    def replay(self) -> None:
        self.graph.replay()


class CudaCapture:
    """Captures work on one device in CUDA graphs. Not yet run on a GPU.

    Work runs once on the capture's stream first, where libraries may still allocate (cuBLAS its workspace for this
    stream). All graphs use one stream and one memory pool: replays run one after another, and each one's results are
    copied before the next, so they can share memory for intermediate results.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, work: Work) -> Captured:
        """Raises RuntimeError where ``work`` cannot be captured."""
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        living = next(iter(self._graphs), None)  # a pool lasts as long as one of its graphs
        pool = None if living is None else living.pool()
        try:
            with torch.cuda.stream(self._stream):  # restores the stream also where the end of a failed capture raises
                work()
                # Threads that have nothing to do with this forward may allocate meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    output = work()
        finally:
            before.wait_stream(self._stream)
        self._graphs.add(graph)
        return _CudaGraph(graph, output)


def capture_on(device: torch.device) -> Capture | None:
    """What captures on a device; None where nothing does."""
    return CudaCapture(device) if device.type == "cuda" else None


class StepKey(NamedTuple):
    """What a step is made for: K/V buffers in order, rows for each, and the layers whose hidden states it returns."""

    buffers: tuple[object, ...]
    bucket: int
    wanted: tuple[int, ...] = ()


@dataclass(slots=True)
class Step:
    """A forward of fixed shape: its input buffers and, from the second use on, its graph.

    ``turns``: rotations of the rows, looked up outside the graph, so that the table may grow.
    """

    inputs: FixedLanes
    turns: Tensor
    uses: int = 0
    captured: Captured | None = None
    refused: bool = False


@dataclass(slots=True)
class Counts:
    """How forwards ran. ``refused``: captures that failed, the last one for the reason ``why``; such a step runs
    eagerly from then on."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0
    refused: int = 0
    why: str = ""


class Graphs:
    """Steps by key; beyond ``limit`` the one that was not used for longest leaves.

    ``capture`` None: nothing is captured, every step runs eagerly.
    """

    def __init__(self, capture: Capture | None, limit: int = LIMIT) -> None:
        self.counts = Counts()
        self._capture = capture
        self._steps: Lru[StepKey, Step] = Lru(limit)

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, key: StepKey, make: Callable[[], Step]) -> Step:
        """The step for a key, made where there is none."""
        found = self._steps.get(key)
        if found is None:
            found = make()
            self._steps.put(key, found)
        return found

    def run(self, step: Step, work: Work, rows: Seq[slice]) -> tuple[Tensor, ...]:
        """``work`` on the contents of the step's buffers: replayed, captured on the second use, or as it is.

        These rows of each result, end to end; they are the caller's own, and no later replay changes them.
        """
        step.uses += 1
        if step.captured is None and self._capture is not None and step.uses > 1 and not step.refused:
            try:
                step.captured = self._capture(work)
                self.counts.captured += 1
            except RuntimeError as error:
                step.refused = True
                self.counts.refused += 1
                self.counts.why = str(error)
        if step.captured is None:
            self.counts.eager += 1
            found = work()
        else:
            step.captured.replay()  # capturing has not run it
            self.counts.replayed += 1
            found = step.captured.output
        return tuple(torch.cat([result[one] for one in rows]) for result in found)

    def forget(self, buffer: object) -> None:
        """The buffer goes, and its graphs with it."""
        for key in self._steps.recent():
            if any(one is buffer for one in key.buffers):
                self._steps.drop(key)
