"""A draft model on a device, its target in a cloud: goodput, cost and energy of every configuration (ConfigSpec: Li et
al. 2026, arXiv 2604.09722).

In each round the device drafts K tokens one after the other, sends them, the cloud verifies them in a batch with those
of other users, and the verdict comes back. With A(K) tokens of a draft expected to be accepted,

    goodput      (A + 1) / (draft(K) + network + verify(K))        tokens per second of a user, higher is better
    cost         (K + 1) / (A + 1)                                 rows verified per token, lower is better
    energy       watts * draft(K) / (A + 1)                        joules of the device per token, lower is better

``cost="seconds"`` counts what the cloud's devices work instead of rows: verify(K) / batch / (A + 1) device-seconds.
Times come from rooflines or from what was measured (:class:`~outpace.targets.cost_protocol.Costs`); A comes from the
caller, who measured it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outpace.controllers.predictor import Predictor
from outpace.core.errors import BadInput
from outpace.targets.cost_protocol import Costs

TOKEN_BYTES = 4
"""Of a draft token on the network, and of one of the verdict."""
OBJECTIVES = ("goodput", "cost", "energy")


class Figures(NamedTuple):
    """Of one configuration; of ``goodput`` more is better, of the others less."""

    goodput: float
    cost: float
    energy: float

    def better(self, other: Figures, objective: str) -> bool:
        mine, theirs = getattr(self, objective), getattr(other, objective)
        return bool(mine > theirs if objective == "goodput" else mine < theirs)

    def dominates(self, other: Figures) -> bool:
        """Whether it is at least as good in all objectives, and better in one."""
        worse = any(other.better(self, one) for one in OBJECTIVES)
        return not worse and any(self.better(other, one) for one in OBJECTIVES)


@dataclass(frozen=True, slots=True)
class Link:
    """Between device and cloud. ``round_trip`` in seconds; bytes per second in each direction."""

    round_trip: float = 0.03
    up: float = 1.25e6
    down: float = 1.25e6

    def seconds(self, drafted: int) -> float:
        """Of a round: the draft there, the verdict back."""
        return self.round_trip + drafted * TOKEN_BYTES / self.up + 2 * TOKEN_BYTES / self.down


@dataclass(frozen=True, slots=True)
class Configuration:
    """A draft model in one precision (``drafter``, ``bits``), and the draft length."""

    drafter: str
    bits: int
    length: int


class Device(NamedTuple):
    """What drafts: ``step``, seconds of a draft token with the context in its K/V; ``watts``, its power meanwhile."""

    step: float
    watts: float


class EdgeCloud:
    """A pair of device and cloud. ``cloud``: what the target's forwards take there, on ``devices`` together; ``batch``:
    users whose drafts it verifies together; ``context``: tokens in the K/V."""

    def __init__(
        self,
        cloud: Costs,
        link: Link | None = None,
        *,
        devices: int = 1,
        batch: int = 8,
        context: int = 512,
        cost: Literal["rows", "seconds"] = "rows",
    ) -> None:
        if batch < 1:
            raise BadInput(f"the cloud's batch must be at least 1, not {batch}")
        self.cloud, self.link, self.devices = cloud, link or Link(), devices
        self.batch, self.context, self.cost = batch, context, cost
        self._predictor = Predictor(cloud)
        self._verified: dict[int, float] = {}

    def figures(self, device: Device, length: int, accepted: float) -> Figures:
        """Of drafts of ``length`` tokens by ``device``, of which ``accepted`` are expected to be."""
        verify, drafting, tokens = self._verify(length), length * device.step, accepted + 1.0
        rows, seconds = (length + 1) / tokens, verify * self.devices / self.batch / tokens
        return Figures(
            tokens / (drafting + self.link.seconds(length) + verify),
            rows if self.cost == "rows" else seconds,
            device.watts * drafting / tokens,
        )

    def _verify(self, length: int) -> float:
        """Seconds; remembered, since measured ones are asked for thousands of times."""
        found = self._verified.get(length)
        if found is None:
            step = self.cloud.even(self.batch, self.batch, self.context)
            found = step * self._predictor.verification(length, self.batch, self.context)
            self._verified[length] = found
        return found


def pareto(found: Seq[Figures]) -> list[bool]:
    """For each, whether no other dominates it."""
    return [not any(other.dominates(one) for other in found) for one in found]


def best(found: Iterable[tuple[Configuration, Figures]], objective: str) -> Configuration:
    """The configuration that is best for one objective; of equals the first."""
    if objective not in OBJECTIVES:
        raise BadInput(f"objectives are {', '.join(OBJECTIVES)}, not '{objective}'")
    chosen: tuple[Configuration, Figures] | None = None
    for one in found:
        if chosen is None or one[1].better(chosen[1], objective):
            chosen = one
    if chosen is None:
        raise BadInput("there is no configuration to choose from")
    return chosen[0]
