"""Machines: what the steps of a server take, by a roofline, or by the costs that outpace has measured here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

from outpace.core.errors import BadInput
from outpace.engine.round_overhead import DRAFTED, RoundOverhead
from outpace.engine.scheduler import Limits, Scheduler
from outpace.simulate.hardware import MEASURED
from outpace.simulate.roofline import Roofline, RooflineCosts, Work
from outpace.simulate.served_rounds import ServedRounds
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
    def chunk(self, rows: list[int], contexts: list[int]) -> list[float]:
        """Reading ``rows[i]`` rows of a prompt of which ``contexts[i]`` have been read."""

    @abstractmethod
    def round(self, rows: list[int], contexts: list[int]) -> list[float]:
        """A round: ``rows[i]`` rows of a request with ``contexts[i]`` tokens in the K/V, without the draft."""

    def between(self, batch: int) -> float:
        """Seconds from the end of a round of ``batch`` requests until the next one may begin."""
        return 0.0

    @abstractmethod
    def public(self) -> dict[str, Any]:
        """What it is, for the result."""


class RooflineMachine(Machine):
    """By a roofline."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.costs = RooflineCosts(roofline)
        self.kv_bytes_per_token = roofline.kv_bytes_per_token
        self.kv_capacity = roofline.kv_capacity
        self.stages = roofline.parallel.pipeline
        power = roofline.hardware.watts
        self.watts = None if power is None else power * roofline.parallel.devices

    def beside(self, draft: Roofline, weight_bytes: float) -> RooflineMachine:
        """The same machine with a draft model's weights and K/V in its memory. Raises BadInput if they do not fit."""
        found = RooflineMachine(self.roofline)
        assert found.kv_capacity is not None
        if weight_bytes >= found.kv_capacity:
            raise BadInput(
                f"draft model {draft.shape.name} with weights of {draft.bits} bits takes {weight_bytes / 1e9:.1f} GB; "
                f"beside {self.roofline.shape.name} {found.kv_capacity / 1e9:.1f} GB are left. Give more devices, "
                "fewer --draft-bits or a smaller draft model"
            )
        found.kv_capacity -= int(weight_bytes)
        found.kv_bytes_per_token += draft.shape.kv_bytes(draft.kv_bits)
        return found

    def chunk(self, rows: list[int], contexts: list[int]) -> list[float]:
        return self.roofline.stages(Work.of_chunk(rows, contexts))

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


class LengthsOnly:
    """A target of which a scheduler asks costs and lengths alone. K/V is whatever has ``rows``."""

    def __init__(self, machine: Machine) -> None:
        self.costs, self._each = machine.costs, machine.kv_bytes_per_token

    def kv_bytes(self, kv: Any, rows: int = 0) -> int:
        return self._each * (rows if kv is None else kv.rows + rows)

    def length(self, kv: Any) -> int:
        return 0 if kv is None else int(kv.rows)


def rows_beside(machine: Machine) -> int:
    """Rows of prompts that a server on it reads beside a round."""
    return Scheduler(cast(Any, LengthsOnly(machine)), Limits()).rows_beside()


class MeasuredMachine(Machine):
    """This machine: forwards of several sequences as its cost table has them (:mod:`outpace.targets.costs`), measured
    where it has none yet, what rounds take beside them (``overhead``), and what a server adds (``served``)."""

    def __init__(
        self,
        costs: Costs,
        kv_bytes_per_token: int,
        kv_capacity: int | None = None,
        overhead: RoundOverhead | None = None,
        served: ServedRounds | None = None,
    ) -> None:
        self.costs, self.kv_bytes_per_token, self.kv_capacity = costs, kv_bytes_per_token, kv_capacity
        self.overhead = overhead or RoundOverhead(costs.overhead)
        self.served = served

    def alone(self, rows: list[int], contexts: list[int]) -> float:
        """A round outside of a server."""
        return self.overhead.seconds(self.costs, rows, contexts)

    def reading(self, rows: int, context: int = 0) -> float:
        """Reading ``rows`` tokens of a prompt outside of a server: a long forward, in nobody's way."""
        return self.costs.reading(rows, context)

    def chunk(self, rows: list[int], contexts: list[int]) -> list[float]:
        whole = sum(rows)
        alone = self.reading(whole, sum(own * context for own, context in zip(rows, contexts, strict=True)) // whole)
        return [alone if self.served is None else alone * self.served.reading]

    def round(self, rows: list[int], contexts: list[int]) -> list[float]:
        alone = self.alone(rows, contexts)
        return [alone if self.served is None else self.served.seconds(alone, len(rows))]

    def between(self, batch: int) -> float:
        return 0.0 if self.served is None else self.served.between(batch)

    def beside(self, rows: int) -> float:
        """Reading ``rows`` tokens of a prompt outside of a server, in the chunks that its scheduler reads beside
        rounds."""
        chunk = rows_beside(self)
        return sum(self.reading(min(chunk, rows - at), at) for at in range(0, rows, chunk))

    def public(self) -> dict[str, Any]:
        one = self.overhead
        measured = [
            "seconds of forwards by rows, sequences and contexts, and of reading prompts: the cost table",
            f"rounds outside of a server: {one.slow:.2f} times their forward ({one.busy:.2f} times with {DRAFTED} "
            f"draft tokens a request), {1e3 * one.fixed:.2f} ms, {1e3 * one.each:.2f} ms for each request and "
            f"{1e3 * one.row:.3f} ms for each draft token",
        ]
        fitted = [] if self.served is None else [self.served.words]
        return {"hardware": {"name": MEASURED}, "measured": measured, "fitted": fitted}
