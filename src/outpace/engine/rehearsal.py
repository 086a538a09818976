"""What a drafter's drafts take: a few rounds of a made-up text, so that nothing of it depends on anybody's request."""

from __future__ import annotations

from statistics import median
from typing import Any

from outpace.acceptance.default import default_rule
from outpace.controllers.base import Controller
from outpace.core.sampling import SamplingParams
from outpace.drafting.base import Drafter
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.targets.base import Target

_PROMPT = 24
_FIRST, _ROUNDS = 4, 12
"""Rounds that are left out, for they read the prompt and little is of the target's own text; rounds that count."""


def draft_seconds(target: Target, drafter: Drafter[Any], controller: Controller, count: int = 1) -> float:
    """Seconds that drafting takes in a round with ``count`` greedy requests: the median of a few rounds
    without the slowest quarter, which other programs have disturbed."""
    decoder = Decoder(target)
    method = Method("rehearsal", drafter, default_rule(drafter.proposal), controller)
    size, vocabulary = max(1, min(_PROMPT, target.context_length // 4)), target.vocab_size
    prompts = [tuple((37 * i + 11 * one + 5) % vocabulary for i in range(size)) for one in range(count)]
    running = [decoder.submit(Request(one, method, SamplingParams(), target.context_length)) for one in prompts]
    spent: list[float] = []
    before = 0.0
    for _ in range(_FIRST + _ROUNDS):
        if not decoder.step():
            break
        now = running[0].metrics.phase_seconds["draft"]
        spent.append(now - before)
        before = now
    for one in running:
        one.cancel()
    decoder.step()
    usual = sorted(spent[_FIRST:] or spent)
    return median(usual[: (3 * len(usual) + 3) // 4])
