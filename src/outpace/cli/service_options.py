"""What the models of a server are loaded with: a replica in another process loads the same as one server alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outpace.cli.session import Drafting, Hardware
from outpace.constraints.grammar import DEFAULT_LIMITS, GrammarLimits
from outpace.core.errors import BadInput
from outpace.core.future_validity import MAX_VALIDITY_NODES
from outpace.core.machine import free_memory

if TYPE_CHECKING:
    from outpace.model import Model
    from outpace.serving.service import Service
    from outpace.serving.tenants import Tenants

MAX_BATCH = 8
"""Requests decoded together, where no number is given."""
_KV_SHARE = 0.5
"""Of the memory that is free when the models have been loaded: for K/V, where no bound is given."""
_PREFIX_SHARE = 0.5
"""Of the bound on K/V: for cached beginnings of prompts, where no bound is given for them."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Models, how they draft, and their bounds. ``neighbors``: servers on this machine that share its free memory."""

    names: tuple[str, ...]
    hardware: Hardware
    drafting: Drafting
    settings: dict[str, dict[str, Any]]
    goodput: tuple[str, ...] = ()
    log_requests: bool = False
    log_texts: bool = False
    max_batch: int = MAX_BATCH
    max_queue: int = 256
    kv_bytes: int | None = None
    prefix_cache_bytes: int | None = None
    time_limit: float | None = None
    grammar_limits: GrammarLimits = DEFAULT_LIMITS
    max_validity_nodes: int = MAX_VALIDITY_NODES
    neighbors: int = 1

    @property
    def callers(self) -> int:
        """Requests that may run or wait."""
        return len(self.names) * (self.max_batch + self.max_queue)

    def open(self, tenants: Tenants) -> Service:
        """Load the models, and measure what would otherwise be measured in a request.

        Raises BadInput where memory does not hold the bounds.
        """
        from outpace.serving.logs import Log
        from outpace.serving.metrics import read_bounds
        from outpace.serving.offered import Defaults
        from outpace.serving.service import Service

        models = [self.hardware.load(name) for name in self.names]
        self._limit(models)
        [(own, chosen)] = self.settings.items()
        drafting = self.drafting
        named = drafting.load(self.hardware)
        defaults = Defaults(
            own,
            chosen,
            drafting.rule,
            drafting.lossless,
            named,
            self.grammar_limits,
            self.time_limit,
            self.max_validity_nodes,
        )
        log = Log(self.log_requests, self.log_texts)
        service = Service(models, tenants, defaults, log, read_bounds(self.goodput))
        for offered in service.offered.values():
            offered.warm_up()
        return service

    def _limit(self, models: list[Model]) -> None:
        """Give every model its bounds. Raises BadInput where memory does not hold them."""
        from outpace.engine.prefix_cache import PrefixCache
        from outpace.engine.scheduler import ROUND_ROWS, Limits
        from outpace.engine.shared_decoder import SharedDecoder

        free = free_memory()
        share = int(free * _KV_SHARE) // len(models) // self.neighbors
        each = share if self.kv_bytes is None else self.kv_bytes
        if each * len(models) > free:
            raise BadInput(
                f"--kv-bytes {each:,}: {free:,} bytes of memory are free for the K/V of {len(models)} "
                f"model{'s' if len(models) > 1 else ''}; give fewer"
            )
        for one in models:
            least = one.target.kv_bytes(None, 2 * ROUND_ROWS)
            if each < least:
                raise BadInput(
                    f"--kv-bytes: {each:,} bytes hold no request to '{one.name}'; the least that is useful are "
                    f"{least:,}"
                )
            cached = int(each * _PREFIX_SHARE) if self.prefix_cache_bytes is None else self.prefix_cache_bytes
            if cached > each:
                raise BadInput(f"--prefix-cache-bytes {cached:,} is more than a model's --kv-bytes, which is {each:,}")
            prefixes = PrefixCache(one.target, cached) if cached and one.target.kv_blocks else None
            limits = Limits(self.max_batch, self.max_queue, each)
            one.shared = SharedDecoder(one.target, one.tokenizer, limits, prefixes)
