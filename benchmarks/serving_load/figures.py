"""Figures of a cell: one server's answers under one load, and how two servers compare in it.

Percentiles of TTFT, inter-token latency and time per output token have bootstrap intervals over requests: the gaps of
one answer are drawn together. Rates and their ratios have bootstrap intervals over blocks, paired for ratios, because
the servers took turns and the k-th block of each had the same conversations.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.bench.statistics import Rate, speedup, speedup_interval, total_rate
from serving_load.client import Reply
from serving_load.loads import Block

PERCENTILES = (50, 90, 99)
_RESAMPLES = 400
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bounds:
    """An answer within both counts for goodput. Milliseconds."""

    ttft: float
    tpot: float

    def holds(self, one: Reply) -> bool:
        """Whether an answer came whole and in time; the answer of a single token has no time per token."""
        if one.error is not None or one.ttft is None:
            return False
        return 1e3 * one.ttft <= self.ttft and 1e3 * (one.tpot or 0.0) <= self.tpot


def cell(blocks: Seq[Block], bounds: Bounds, cores: int) -> dict[str, Any]:
    """All figures of one server under one load. Latencies in milliseconds."""
    replies = [one for block in blocks for one in block.replies]
    good = [one for one in replies if one.error is None]
    whole = [block.whole for block in blocks]
    kept = [sum(bounds.holds(one) for one in block.replies) for block in blocks]
    latencies = {
        "ttft_ms": [[one.ttft] for one in good if one.ttft is not None],
        "itl_ms": [one.gaps for one in good if one.gaps],
        "tpot_ms": [[one.tpot] for one in good if one.tpot is not None],
        "e2e_ms": [[one.latency] for one in good],
    }
    later = [one for one in good if one.turn]
    drafted, rounds = sum(one.drafted for one in good), sum(one.rounds for one in good)
    counted = [block.rounds for block in blocks if block.rounds is not None]
    return {
        "requests": len(replies),
        "errors": _counted([one.error for one in replies if one.error is not None]),
        "tokens": sum(one.tokens for one in good),
        "tokens_from_usage": all(one.counted for one in good),
        **{name: percentiles(values) for name, values in latencies.items()},
        "tokens_per_second": _rate([(block.tokens, block.seconds) for block in blocks]),
        "requests_per_second": _rate(list(zip([len(block.replies) for block in blocks], whole, strict=True))),
        "goodput": _rate(list(zip(kept, whole, strict=True))) | {"share": sum(kept) / max(1, len(replies))},
        "cached_share": _share(sum(one.cached_tokens for one in good), sum(one.prompt_tokens for one in good)),
        "later_turns": {
            "requests": len(later),
            "cached_share": _share(sum(o.cached_tokens for o in later), sum(o.prompt_tokens for o in later)),
            "ttft_ms": percentiles([[one.ttft] for one in later if one.ttft is not None]),
        },
        "speculation": {
            "drafted": drafted,
            "accepted": sum(one.accepted for one in good),
            "rounds": rounds,
            "rounds_share": _share(sum(one.drafted for one in counted), sum(one.all for one in counted)),
            "requests_share": _share(sum(one.drafted > 0 for one in good), len(good)),
            "mean_acceptance_length": _share(sum(one.tokens for one in good), rounds),
        },
        "client_cpu_share": _share(sum(block.client_cpu for block in blocks), sum(whole) * cores),
    }


def compared(ours: Seq[Block], theirs: Seq[Block]) -> dict[str, Any]:
    """Tokens per second of one server over another's, block beside block."""
    pair = [[(block.tokens, block.seconds) for block in blocks] for blocks in (ours, theirs)]
    return {"ratio": speedup(*pair), "ci95": speedup_interval(*pair), "blocks": len(ours)}


def percentiles(groups: Seq[Seq[float]], seed: int = 0) -> dict[str, Any] | None:
    """p50, p90 and p99 of all values in milliseconds, each with its 95 % interval; None where there are none.

    ``groups``: the values of one request each.
    """
    if not groups:
        return None
    values = 1e3 * np.concatenate([np.asarray(one, float) for one in groups])
    owners = np.repeat(np.arange(len(groups)), [len(one) for one in groups])
    order = np.argsort(values)
    values, owners = values[order], owners[order]
    generator = np.random.default_rng(seed)
    draws = generator.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=_RESAMPLES)
    resampled = np.array([_quantiles(values, counts[owners]) for counts in draws if counts[owners].any()])
    low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
    found = _quantiles(values, np.ones(len(values)))
    return {
        f"p{percentile}": {"value": float(found[at]), "ci95": [float(low[at]), float(high[at])]}
        for at, percentile in enumerate(PERCENTILES)
    }


def _quantiles(values: Floats, weights: NDArray[Any]) -> Floats:
    """The smallest values with at least the percentiles' shares of the weight at or below them."""
    reached = np.cumsum(weights)
    at = np.searchsorted(reached, np.array(PERCENTILES) / 100 * reached[-1])
    found: Floats = values[np.minimum(at, len(values) - 1)]
    return found


def _rate(parts: Seq[Rate]) -> dict[str, Any]:
    """A rate over all blocks, with its interval: its ratio to a rate of exactly one."""
    interval = speedup_interval(parts, [(1.0, 1.0)] * len(parts))
    return {"value": total_rate(parts), "ci95": None if interval is None else list(interval)}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _counted(errors: Seq[str]) -> dict[str, int]:
    return {one: errors.count(one) for one in dict.fromkeys(errors)}
