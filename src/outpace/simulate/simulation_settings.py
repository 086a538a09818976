"""What is simulated beside the trace and the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outpace.core.errors import BadInput
from outpace.simulate.roofline import Parallel
from outpace.simulate.simulation import HOURS

FREE, HEAD = "free", "head"
"""Names of ``draft_model`` beside shapes: drafts that take no time, and a head of one layer."""
REQUESTS, USERS = 200_000, 50_000
"""At most, since each request is held in memory: about as many as the bound on forwards lets end."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is simulated beside the trace and the machine.

    ``model``: a shape; None: that of the trace's model. ``transfer``: it may be another model than the trace's, which
    is then assumed to accept as much. ``bits`` and ``kv_bits``: of weights and K/V; ``draft_bits``: of the draft model,
    None: those of the target. ``methods``: of the trace; (): all. ``draft_length``: chains of that many tokens, with
    the trace's acceptance rates, in place of its rounds; ``rates``: in place of the trace's. ``draft_model``: what
    drafts of a network cost: a shape, "head" or "free"; None: what is in the trace on the measured machine, unknown on
    others, where lookups cost nothing. ``users`` or ``rate``: the load, in place of the trace's; ``requests``: how
    many, None: those of the trace, and at least four for each user. ``max_batch``: None: the trace's largest batch, or
    all users.
    """

    model: str | None = None
    transfer: bool = False
    bits: int = 16
    kv_bits: int = 16
    draft_bits: int | None = None
    parallel: Parallel = field(default_factory=Parallel)
    efficiency: float = 1.0
    overhead_ms: float = 0.0
    methods: tuple[str, ...] = ()
    draft_length: int | None = None
    rates: tuple[float, ...] = ()
    draft_model: str | None = None
    users: int | None = None
    pause: float = 0.0
    rate: float | None = None
    requests: int | None = None
    max_batch: int | None = None
    prefix_cache: bool = True
    hours: float = HOURS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.users is not None and self.rate is not None:
            raise BadInput("--users and --rate are two loads; give one of them")
        if self.pause and self.users is None:
            raise BadInput("--pause is for --users, who wait for their answers")
        if self.kv_bits not in (8, 16):
            raise BadInput(f"K/V has 16 or 8 bits, not {self.kv_bits}")
        for name in ("requests", "users", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        for name, most in (("requests", REQUESTS), ("users", USERS)):
            if (getattr(self, name) or 0) > most:
                raise BadInput(f"--{name} must be at most {most:,}, not {getattr(self, name):,}")
        if not 0 < self.hours < math.inf:
            raise BadInput(f"--hours must be above 0, not {self.hours:g}")
        if not 0 <= self.overhead_ms < math.inf:
            raise BadInput(f"--overhead-ms must be at least 0, not {self.overhead_ms:g}")
        if self.rates and self.draft_length is None:
            raise BadInput("--acceptance needs --draft-length, the length of the chains that it is for")
