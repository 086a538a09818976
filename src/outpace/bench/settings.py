"""The settings that all methods of a bench share, and the progress that it reports while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from outpace.constraints.grammar import DEFAULT_LIMITS, Grammar, GrammarLimits
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams

if TYPE_CHECKING:
    from outpace.bench.bench_trace import BenchTrace


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What all methods share. ``max_new_tokens`` is per answer. Raises BadInput for values out of range.

    ``namespace``: where each method keeps what it learns; without one nothing outlives a request. ``quality``: measure
    the answers' divergence from the target, and score those that can be scored. ``command`` (what the user typed) and
    ``extra`` (settings of the methods, say) are only noted in the result.
    """

    max_new_tokens: int = 128
    params: SamplingParams = field(default_factory=SamplingParams)
    batch_size: int = 1
    ignore_eos: bool = False
    references: tuple[str, ...] = ()
    namespace: str = ""
    warmup_tokens: int = 8
    quality: bool = False
    command: str = ""
    grammar: Grammar | None = None
    """Of all prompts that have none of their own."""
    grammar_limits: GrammarLimits = DEFAULT_LIMITS
    extra: Mapping[str, Any] = field(default_factory=dict)
    trace: BenchTrace | None = None
    """Collects what rounds drafted and committed, where a trace is asked for."""

    repeats: bool | None = None
    """Whether sampled answers must be the same again, so that nothing of a batch's drafts may depend on a clock; None:
    where a seed is given, as in a server."""

    def __post_init__(self) -> None:
        if self.repeats is None:
            object.__setattr__(self, "repeats", self.params.seed is not None)
        # Prompts and noise of runs that are compared repeat: without a seed it is 0.
        object.__setattr__(self, "params", replace(self.params, seed=self.params.fixed_seed))
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, not {getattr(self, name)}")

    def seeded(self, request: int) -> SamplingParams:
        """The sampling parameters of one request; its seed is its own, and the same for every method."""
        return replace(self.params, seed=self.params.fixed_seed + 1_000_003 * request)

    def public(self) -> dict[str, Any]:
        sampling = {one.name: getattr(self.params, one.name) for one in fields(self.params)}
        sampling["processors"] = len(self.params.processors)
        del sampling["constraint"]
        sampling["constraint_weighting"] = str(self.params.constraint_weighting)
        if self.grammar is not None:
            sampling["grammar"] = {"kind": self.grammar.kind, "source": self.grammar.source}
        return {
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "ignore_eos": self.ignore_eos,
            "references": len(self.references),
            "namespace": self.namespace or None,
            "warmup_tokens": self.warmup_tokens,
            "quality": self.quality,
            "command": self.command,
            **sampling,
            **self.extra,
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the bench stands, reported before every turn of a prompt or batch, while it is answered, and at the end.

    ``done``: answers of all methods that have ended; ``method``: whose turn it is. ``rates``: decode tokens per second.
    """

    done: int
    total: int
    method: str
    category: str
    rates: Mapping[str, float | None]
