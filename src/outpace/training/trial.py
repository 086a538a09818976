"""A trial of a new head: whether the target accepts what it drafts, before anybody is told to use it.

Not a measurement of speed, which takes minutes (``outpace eval-head``): a few prompts of the held-out split, decoded
greedily with drafts of a fixed size, so that the figure does not depend on the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from outpace.controllers.fixed import Fixed
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.heads.base import Head
from outpace.methods.bindings import Bindings, heads
from outpace.methods.registry import build
from outpace.model import Model
from outpace.training.dataset import Conversations, held_out
from outpace.training.shards import Conversation

PROMPTS, LENGTH, DRAFT_TOKENS = 4, 32, 4
LEAST_ACCEPTED = 0.25
"""Draft tokens a round below which a head does not pay: a draft takes about as much of a forward of the target."""


@dataclass(frozen=True, slots=True)
class Trial:
    """``accepted``: draft tokens a round, of up to ``draft_tokens``; ``prompts``: how many were decoded."""

    accepted: float
    draft_tokens: int
    prompts: int

    @property
    def gains(self) -> bool:
        """Whether enough is accepted to make decoding faster."""
        return self.accepted >= LEAST_ACCEPTED

    def public(self) -> dict[str, Any]:
        """As a head's provenance has it."""
        return {**asdict(self), "accepted": round(self.accepted, 3), "gains": self.gains}


def try_head(
    model: Model, head: Head, method: str, shards: Conversations, over: Callable[[], bool] = lambda: False
) -> Trial:
    """Decode prompts of the held-out split, or where nothing is held out others, with ``method`` and this head.

    ``over``: asked after every round; once it returns True, what was counted so far is the trial.
    """
    context = replace(model.context(), bindings=Bindings(heads({head.config.kind: head})))
    made = build(method, context, {})
    made = replace(made, controller=Fixed(DRAFT_TOKENS, 1, DRAFT_TOKENS))
    decoder = Decoder(model.target)
    running = [
        decoder.submit(Request(tuple(one.prompt), made, max_new_tokens=LENGTH, stop_ids=model.eos_ids))
        for one in _asked(shards)
    ]
    while decoder.step() and not over():
        pass
    for one in running:
        one.cancel()
    decoder.admit()
    rounds = sum(one.metrics.rounds for one in running)
    accepted = sum(one.metrics.accepted for one in running)
    return Trial(accepted / rounds if rounds else 0.0, DRAFT_TOKENS, len(running))


def _asked(shards: Conversations) -> list[Conversation]:
    for wanted in (held_out, lambda _: True):
        found = (one for path in shards.paths for one in shards.read(path, wanted=wanted))
        if some := list(itertools.islice(found, PROMPTS)):
            return some
    return []
