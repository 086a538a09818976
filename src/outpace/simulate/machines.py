"""Machines: what the steps of a server take, by a roofline, or by the costs that outpace has measured here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from outpace.controllers.predictor import Predictor
from outpace.simulate.hardware import MEASURED
from outpace.simulate.roofline import Roofline, RooflineCosts, Work
from outpace.targets.costs import Costs


class Machine(ABC):
    """A target on its devices. Times are lists with an entry for each stage of the pipeline, in seconds."""

    costs: Costs
    """For the scheduler, which chooses the rows of prompts that a step reads by them, and for the predictor."""
    kv_bytes_per_token: int
    kv_capacity: int | None
    """Bytes; None: no bound."""
    stages: int = 1
    watts: float | None = None
    """Of all devices together, at most."""

    @abstractmethod
    def chunk(self, rows: int, context: int) -> list[float]:
        """Reading ``rows`` rows of a prompt of which ``context`` have been read."""

    @abstractmethod
    def round(self, rows: list[int], contexts: list[int]) -> list[float]:
        """A round: ``rows[i]`` rows of a request with ``contexts[i]`` tokens in the K/V, without the draft."""

    @abstractmethod
    def public(self) -> dict[str, Any]:
        """What it is, for the result."""


class RooflineMachine(Machine):
    """By a roofline."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.costs = RooflineCosts(roofline)
        self.kv_bytes_per_token = roofline.shape.kv_bytes(roofline.kv_bits)
        self.kv_capacity = roofline.kv_capacity
        self.stages = roofline.parallel.pipeline
        power = roofline.hardware.watts
        self.watts = None if power is None else power * roofline.parallel.devices

    def chunk(self, rows: int, context: int) -> list[float]:
        return self.roofline.stages(Work.of_chunk(rows, context))

    def round(self, rows: list[int], contexts: list[int]) -> list[float]:
        first, *others = self.roofline.stages(Work.of_round(rows, contexts))
        return [first + self.roofline.overhead, *others]

    def public(self) -> dict[str, Any]:
        one = self.roofline
        return {
            "hardware": one.hardware.public(),
            "shape": one.shape.name,
            "parameters": one.shape.parameters,
            "bits": one.bits,
            "kv_bits": one.kv_bits,
            "tensor_parallel": one.parallel.tensor,
            "pipeline_parallel": one.parallel.pipeline,
            "efficiency": one.efficiency,
            "overhead_ms": 1e3 * one.overhead,
            "fitted": [],
        }


class MeasuredMachine(Machine):
    """This machine: a target's cost table (:mod:`outpace.targets.cost_table`), measured where it has no entry yet.

    The table has forwards of one sequence after another; rounds of several requests take longer for each additional
    row, which the predictor knows (:data:`~outpace.controllers.predictor.CROWDED`).
    """

    def __init__(self, costs: Costs, kv_bytes_per_token: int, kv_capacity: int | None = None) -> None:
        self.costs, self.kv_bytes_per_token, self.kv_capacity = costs, kv_bytes_per_token, kv_capacity
        self._predictor = Predictor(costs)

    def chunk(self, rows: int, context: int) -> list[float]:
        return [self.costs.seconds(rows, context)]

    def round(self, rows: list[int], contexts: list[int]) -> list[float]:
        batch = len(rows)
        return [self._predictor.round_seconds(sum(rows) - batch, batch, sum(contexts) // batch)]

    def public(self) -> dict[str, Any]:
        return {"hardware": {"name": MEASURED}, "fitted": ["seconds of forwards by rows and context: the cost table"]}
