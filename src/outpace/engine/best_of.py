"""The best of several samples of one prompt."""

from __future__ import annotations

from collections.abc import Iterable

from outpace.engine.request import Generation


def best_of(samples: Iterable[Generation], n: int) -> list[Generation]:
    """The ``n`` samples with the highest mean log-probability of a token, the best first.

    Of the model's own distribution, before temperature and penalties. The samples must have recorded it.
    """
    return sorted(samples, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(one: Generation) -> float:
    return sum(each.logprob for each in one.logprobs) / max(1, len(one.logprobs))
