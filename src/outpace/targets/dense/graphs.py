"""Forwards of fixed shape that are captured once and replayed: the bookkeeping, and the capture on CUDA.

:func:`cuda_capture` has **not yet been run on a GPU**. Everything else here runs in the tests, with a capture that
records operations on the CPU and replays them on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.core.lru import Lru
from outpace.targets.dense.lanes import Lane

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LIMIT = 32  # graphs kept; each holds the memory of one forward's intermediate results


class Captured(Protocol):
    """A recorded forward: ``replay`` runs it again on the memory that it was recorded with and fills ``output``."""

    output: Tensor

    def replay(self) -> None:
        """Run again."""
        ...


Capture = Callable[[Callable[[], Tensor]], Captured]


@dataclass(slots=True)
class _CudaGraph:
    graph: Any
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()


def cuda_capture(work: Callable[[], Tensor]) -> Captured:
    """Capture ``work`` in a CUDA graph. Not yet run on a GPU.

    Run once on a side stream first, where libraries may still allocate. A graph has a memory pool of its own: in a
    shared one, replaying one graph would overwrite what another left.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return _CudaGraph(graph, output)


@dataclass(slots=True)
class Step:
    """A forward of fixed shape over one K/V buffer: its input buffers and, from the second use on, its graph.

    ``turns``: rotations of the rows, looked up outside the graph, so that the table may grow.
    """

    lane: Lane
    turns: Tensor
    uses: int = 0
    captured: Captured | None = None
    refused: bool = False


@dataclass(slots=True)
class Counts:
    """How forwards ran. ``refused``: captures that failed; such a step runs eagerly from then on."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0
    refused: int = 0


class Graphs:
    """Steps by (buffer, bucket); beyond ``limit`` the one that was not used for longest leaves.

    ``capture`` None: nothing is captured, every step runs eagerly.
    """

    def __init__(self, capture: Capture | None, limit: int = LIMIT) -> None:
        self.counts = Counts()
        self._capture = capture
        self._steps: Lru[tuple[object, int], Step] = Lru(limit)

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, buffer: object, bucket: int, make: Callable[[], Step]) -> Step:
        """The step over a buffer and a bucket, made where there is none."""
        key = (buffer, bucket)
        found = self._steps.get(key)
        if found is None:
            found = make()
            self._steps.put(key, found)
        return found

    def run(self, step: Step, work: Callable[[], Tensor], rows: int) -> Tensor:
        """``work`` on the contents of the step's buffers: replayed, captured on the second use, or as it is.

        The first ``rows`` rows of the result, which are the caller's own whatever is replayed next.
        """
        step.uses += 1
        if step.captured is None and self._capture is not None and step.uses > 1 and not step.refused:
            try:
                step.captured = self._capture(work)
                self.counts.captured += 1
            except RuntimeError:
                step.refused = True
                self.counts.refused += 1
        if step.captured is None:
            self.counts.eager += 1
            return work()[:rows]
        step.captured.replay()  # capturing has not run it
        self.counts.replayed += 1
        return step.captured.output[:rows].clone()

    def forget(self, buffer: object) -> None:
        """The buffer goes, and its graphs with it."""
        for key in self._steps.recent():
            if key[0] is buffer:
                self._steps.drop(key)
