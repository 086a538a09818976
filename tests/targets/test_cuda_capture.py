"""The capture on CUDA: which calls it makes, on a stand-in for torch.cuda."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.tree import TokenTree
from outpace.targets.base import Sequence
from outpace.targets.dense import graph_target
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.graphs import CudaCapture, Work, capture_on
from outpace.targets.dense.transformers_weights import read_decoder_spec
from recorder import record
from target_suite import opened, tiny_model


def replaying(**options: Any) -> GraphTarget:
    return GraphTarget(read_decoder_spec(tiny_model("llama")), **({"capture": record} | options))


def scored(target: GraphTarget, sequence: Sequence, tree: TokenTree | None = None) -> Tensor:
    return target.score([(sequence, tree or TokenTree())])[0].logits


class FakeCuda:
    """Notes calls in order. ``current``: the current stream's name; ``fails``: whether a capture breaks off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.current, self.fails = "main", False
        self.numbers = iter(range(100))
        tiny_model("llama")  # imports what reads torch.cuda for its annotations
        fakes: dict[str, Any] = {"CUDAGraph": self.new_graph, "graph": self.graph, "stream": self.stream}
        fakes |= {"Stream": lambda device: FakeStream(self, "side"), "current_stream": self.current_stream}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def current_stream(self, device: Any) -> FakeStream:
        return FakeStream(self, self.current)

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self, next(self.numbers))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph, pool: Any, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        self.said.append(f"capture {graph.number} on {stream.name}, pool {pool}, {capture_error_mode}")
        yield
        if self.fails:
            self.current = "side"  # as torch leaves it where the end of a capture raises
            raise RuntimeError("operation failed due to a previous error during capture")


@dataclass
class FakeStream:
    cuda: FakeCuda
    name: str
    device: str = "cuda:0"

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.said.append(f"{self.name} waits for {other.name}")


@dataclass(eq=False)
class FakeGraph:
    cuda: FakeCuda
    number: int

    def pool(self) -> str:
        return f"of {self.number}"

    def replay(self) -> None:
        self.cuda.said.append(f"replay {self.number}")


def test_a_capture_on_cuda_warms_up_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def work() -> tuple[Tensor, ...]:
        cuda.said.append(f"work on {cuda.current}")
        return (torch.ones(1),)

    capture = CudaCapture(torch.device("cuda:0"))
    capture(work).replay()
    assert cuda.said == [
        "side waits for main",
        "work on side",
        "capture 0 on side, pool None, thread_local",
        "work on side",
        "main waits for side",
        "replay 0",
    ]
    assert cuda.current == "main"


def test_graphs_share_the_pool_of_one_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda:0"))

    def pool() -> str:
        return next(line for line in reversed(cuda.said) if line.startswith("capture")).split("pool ")[1]

    work: Work = lambda: (torch.ones(1),)  # noqa: E731
    first = capture(work)
    second = capture(work)
    assert pool() == "of 0, thread_local"
    del first
    gc.collect()
    third = capture(work)
    assert pool() == "of 1, thread_local"
    del second, third
    gc.collect()
    capture(work)
    assert pool() == "None, thread_local"


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.fails = True
    target = replaying(capture=CudaCapture(torch.device("cuda:0")))
    sequence = opened(target, [1, 2, 3])
    found = [scored(target, sequence) for _ in range(3)]
    assert cuda.current == "main"
    assert cuda.said[-1] == "main waits for side"  # where the warm-up has written K/V
    assert (target.counts.refused, target.counts.replayed) == (1, 0)
    assert "previous error" in target.counts.why
    assert torch.equal(found[0], found[2])
    cuda.fails = False
    scored(target, sequence, TokenTree.chain([1]))
    scored(target, sequence, TokenTree.chain([1]))
    assert (
        "pool None" in [line for line in cuda.said if line.startswith("capture")][-1]
    )  # a graph that was not finished has no pool


def test_only_cuda_captures_unless_something_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    assert isinstance(capture_on(torch.device("cuda", 1)), CudaCapture)
    assert capture_on(torch.device("cpu")) is None
    monkeypatch.setattr(graph_target, "capture_on", lambda device: record)
    target = replaying(capture=None)
    sequence = opened(target, [1, 2, 3])
    for _ in range(2):
        scored(target, sequence)
    assert target.counts.replayed == 1
