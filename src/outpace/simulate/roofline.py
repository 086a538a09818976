"""The roofline: what forwards take on hardware that is known by its peak and its bandwidth (Williams et al. 2009).

A forward is a sum of parts that run one after the other: projections and MLPs, attention, the LM head. Each takes the
longer of its operations at the peak and its bytes at the bandwidth. Weights are read once, K/V once for each sequence;
of a mixture of experts those experts are read that the rows are expected to use
(:meth:`~outpace.simulate.model_shape.ModelShape.touched_experts`). Tensor parallelism (Shoeybi et al. 2019, arXiv
1909.08053) divides every part among the devices and adds two all-reduces a layer; pipeline parallelism (Huang et al.
2019, arXiv 1811.06965) divides the layers into stages, between which rows are sent.

Nothing is fitted: kernels that reach a share of the peaks only are told by ``efficiency``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outpace.core.errors import BadInput
from outpace.simulate.hardware import Hardware
from outpace.simulate.model_shape import ModelShape
from outpace.targets.costs import Costs, Scorer

STATE_BYTES = 2
"""Of a number of a hidden state, as devices send it to one another."""
_RESERVED = 0.1
"""Of a device's memory, for activations and all else that is neither weights nor K/V."""


class Work(NamedTuple):
    """What one forward computes. ``rows``: tokens; ``kv_tokens``: tokens whose K/V is read, each sequence's once;
    ``pairs``: of a row and a token that it attends to; ``logits``: rows that the LM head runs for."""

    rows: int
    kv_tokens: int
    pairs: float
    logits: int

    @classmethod
    def of_round(cls, rows: list[int], contexts: list[int]) -> Work:
        """A round: ``rows[i]`` rows of a chain after ``contexts[i]`` tokens in the K/V."""
        pairs = sum(own * context + own * (own + 1) / 2 for own, context in zip(rows, contexts, strict=True))
        return cls(sum(rows), sum(contexts), pairs, sum(rows))

    @classmethod
    def of_chunk(cls, rows: list[int], contexts: list[int]) -> Work:
        """``rows[i]`` rows of a prompt after ``contexts[i]`` tokens. A prompt's logits are not computed."""
        return cls.of_round(rows, contexts)._replace(logits=0)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a model is divided among devices: ``tensor`` of them share each stage, of which there are ``pipeline``."""

    tensor: int = 1
    pipeline: int = 1

    def check(self, shape: ModelShape) -> None:
        """Raise BadInput for parts that the model cannot be divided into."""
        for name, value in (("--tensor-parallel", self.tensor), ("--pipeline-parallel", self.pipeline)):
            if value < 1:
                raise BadInput(f"{name} must be at least 1, not {value}")
        if shape.heads % self.tensor:
            raise BadInput(f"--tensor-parallel {self.tensor} does not divide the {shape.heads} heads of {shape.name}")
        if self.pipeline > shape.layers:
            raise BadInput(f"--pipeline-parallel {self.pipeline}: {shape.name} has {shape.layers} layers")

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    def stage_layers(self, layers: int) -> list[int]:
        """Layers of each stage; the first ones take what is left over."""
        each, more = divmod(layers, self.pipeline)
        return [each + (stage < more) for stage in range(self.pipeline)]


@dataclass(frozen=True, slots=True)
class Roofline:
    """``shape`` with weights of ``bits`` (32, 16, 8 or 4) and K/V of ``kv_bits`` on devices of one kind.

    ``efficiency``: the share of the peak and of the bandwidth that kernels reach. ``overhead``: seconds of the host in
    every round.
    """

    shape: ModelShape
    hardware: Hardware
    bits: int = 16
    kv_bits: int = 16
    parallel: Parallel = Parallel()
    efficiency: float = 1.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16, 32):
            raise BadInput(f"weights have 32, 16, 8 or 4 bits, not {self.bits}")
        if not 0 < self.efficiency <= 1:
            raise BadInput(f"the efficiency must be above 0 and at most 1, not {self.efficiency:g}")
        self.parallel.check(self.shape)

    @property
    def weight_bytes(self) -> float:
        """Of the whole model."""
        return self.shape.parameters * self.bits / 8

    @property
    def kv_capacity(self) -> int:
        """Bytes of K/V that all devices hold beside the weights. Raises BadInput where these alone do not fit."""
        usable = self.parallel.devices * self.hardware.memory * (1.0 - _RESERVED)
        if self.weight_bytes >= usable:
            raise BadInput(
                f"{self.shape.name} with weights of {self.bits} bits takes {self.weight_bytes / 1e9:.0f} GB; "
                f"{self.parallel.devices} x {self.hardware.name} have {usable / 1e9:.0f} GB for weights and K/V. Give "
                "more devices (--tensor-parallel, --pipeline-parallel) or fewer --bits"
            )
        return int(usable - self.weight_bytes)

    @property
    def kv_copies(self) -> float:
        """How often the K/V is held: each device of a stage has a whole K/V head at least."""
        return max(1.0, self.parallel.tensor / self.shape.kv_heads)

    @property
    def kv_bytes_per_token(self) -> int:
        """On all devices."""
        return int(self.shape.kv_bytes(self.kv_bits) * self.kv_copies)

    def stages(self, work: Work) -> list[float]:
        """Seconds of each stage of a forward, what it sends on included."""
        found = [self._layers(work, count) for count in self.parallel.stage_layers(self.shape.layers)]
        if len(found) > 1:
            sent = work.rows * self.shape.hidden * STATE_BYTES / self.hardware.link + self.hardware.link_seconds
            found = [one + sent for one in found[:-1]] + found[-1:]
        if work.logits:
            weights = self.shape.head_weights / self.parallel.tensor
            found[-1] += self._part(2.0 * work.logits * weights, weights * self.bits / 8)
        return found

    def forward(self, work: Work) -> float:
        """Seconds from its first layer to its last."""
        return sum(self.stages(work))

    def _layers(self, work: Work, count: int) -> float:
        """``count`` layers."""
        shape, tensor = self.shape, self.parallel.tensor
        always = shape.attention_weights + shape.shared_weights
        read = always + shape.touched_experts(work.rows) * shape.expert_weights
        used = always + shape.active_experts * shape.expert_weights
        linear = self._part(2.0 * work.rows * used / tensor, read * self.bits / 8 / tensor)
        kv_read = work.kv_tokens * 2.0 * shape.kv_heads * shape.head_size * self.kv_bits / 8
        own_kv = kv_read * self.kv_copies / tensor
        attention = self._part(4.0 * work.pairs * shape.heads * shape.head_size / tensor, own_kv, bits=16)
        return count * (linear + attention + 2 * self._all_reduce(work.rows))

    def _part(self, operations: float, read: float, bits: int | None = None) -> float:
        peak = self.hardware.peak_at(self.bits if bits is None else bits)
        return max(operations / peak, read / self.hardware.bandwidth) / self.efficiency

    def _all_reduce(self, rows: int) -> float:
        """A ring: every device sends 2 (n - 1) / n of the rows' states. One start of a message."""
        devices = self.parallel.tensor
        if devices == 1:
            return 0.0
        sent = 2.0 * (devices - 1) / devices * rows * self.shape.hidden * STATE_BYTES
        return sent / self.hardware.link + self.hardware.link_seconds


class RooflineCosts(Costs):
    """A roofline as the costs that predictor and scheduler read. Their contexts are those of one sequence."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline

    def seconds(self, rows: int, context: int = 0) -> float:
        """Of ``rows`` sequences, a row each."""
        rows = max(1, rows)
        return self.round(rows, 0, context)

    def forward(self, rows: Sequence[int], contexts: Sequence[int]) -> float:
        return self.roofline.forward(Work.of_round(list(rows), list(contexts))) + self.roofline.overhead

    def round(self, batch: int, count: int, context: int) -> float:
        """Seconds of a round of ``batch`` requests with ``count`` draft tokens for each, without its draft."""
        own = 1 + count
        pairs = batch * (own * context + own * (own + 1) / 2)
        work = Work(batch * own, batch * context, pairs, batch * own)
        return self.roofline.forward(work) + self.roofline.overhead

    def relative(self, count: int, batch: int = 1, context: int = 0) -> float:
        return self.round(batch, count, context) / self.round(batch, 0, context)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        raise ValueError(f"a roofline measures nothing, and so not '{name}'")

    def beside(self, model: Scorer, name: str) -> Costs:
        raise ValueError("a roofline is of one model; make another for the model beside it")
