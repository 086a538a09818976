"""How fast the machine is at this moment, beside when its costs were measured: other users slow it by up to a third."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median
from time import perf_counter

import torch

from outpace.core.tree import TokenTree
from outpace.targets.base import Target
from outpace.targets.batch_forwards import made_up
from outpace.traces.trace_format import TracedRequest

ROWS, CONTEXT = (1, 16), 128
_SECONDS, _LEAST = 0.6, 7


@torch.inference_mode()
def pace(target: Target) -> float:
    """How many times as long forwards of :data:`ROWS` rows take now as the cost table has them."""
    usual = {rows: target.costs.seconds(rows, CONTEXT) for rows in ROWS}
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    with target.round(), made_up(target, CONTEXT) as sequence:
        trees = {rows: TokenTree.chain([7 % target.vocab_size] * (rows - 1)) for rows in ROWS}
        until = perf_counter() + _SECONDS
        while perf_counter() < until or len(found[ROWS[0]]) < _LEAST:
            for rows, tree in trees.items():
                began = perf_counter()
                target.score([(sequence, tree)])
                found[rows].append(perf_counter() - began)
    return mean(median(found[rows][1:]) / usual[rows] for rows in ROWS)


def at_pace(one: TracedRequest, slower: float) -> TracedRequest:
    """The request as it would have been where nothing takes ``slower`` times as long."""

    def quicker(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / slower

    rounds = one.rounds
    ms, draft_ms = (tuple(each / slower for each in times) for times in (rounds.ms, rounds.draft_ms))
    return replace(
        one,
        rounds=replace(rounds, ms=ms, draft_ms=draft_ms),
        arrival=quicker(one.arrival),
        first_token=quicker(one.first_token),
        seconds=quicker(one.seconds),
    )
