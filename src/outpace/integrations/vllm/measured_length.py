"""How many tokens a head drafts in vLLM: the number with which it has measured best as a chain.

``outpace eval-head --record`` writes beside a head what was measured of it: of a chain of N draft tokens the share of
rounds in which each position was accepted, the mean accepted length and the speed-up. Length over speed-up is what such
a round took in autoregressive steps, so a round of K draft tokens takes about ``1 + K/N`` of what it took beyond one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from outpace.core.errors import BadInput
from outpace.heads.checkpoint import read_provenance
from outpace.heads.head_folder import HeadFolder

UNMEASURED = 3
"""For heads of which nothing was measured."""


@dataclass(frozen=True, slots=True)
class DraftLength:
    """``tokens`` drafted in a round, and where the number comes from."""

    tokens: int
    source: str


def measured_length(head: HeadFolder) -> DraftLength:
    """The draft length with the most expected tokens per time, as measured; 3 where nothing was."""
    try:
        record = (read_provenance(head.files.path) or {})["measured"]["temperature 0"]
        if record["weights"] == head.files.fingerprint:
            best = max(filter(None, map(_best, record["drafters"])), key=lambda one: one[0], default=None)
            if best is not None:
                return DraftLength(best[1], f"measured with this head: {record['command']}")
    except (BadInput, KeyError, TypeError, ValueError, AttributeError):  # not measured, or by another program
        pass
    return DraftLength(UNMEASURED, "not measured with this head; outpace eval-head --record measures")


def _best(row: Mapping[str, Any]) -> tuple[float, int] | None:
    """The largest expected speed-up of a recorded chain, and with how many draft tokens; None for what is no chain."""
    chain = re.fullmatch(r"chain of (\d+)", row["shape"])
    if chain is None:
        return None
    step = (row["mean_acceptance_length"] / row["speedup"] - 1.0) / int(chain[1])
    expected = accumulate(row["per_position_acceptance"], initial=1.0)
    return max((tokens / (1.0 + count * max(step, 0.0)), count) for count, tokens in enumerate(expected) if count)
