"""DataConfig: which conversations are collected for training. BatchConfig: how they are made into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.core.errors import BadInput
from outpace.prompts.given_passages import GivenPassages
from outpace.prompts.sources import Source
from outpace.training.answers import TOGETHER, Answering, AnswerSampling
from outpace.training.dataset import BATCH, OVERLAP, WINDOW
from outpace.training.time_plan import TimePlan


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is to be collected. Sizes are in tokens of the target, shares in [0, 1]."""

    tokens: int
    """Tokens of answers, over all conversations."""
    sources: Sequence[Source] = ()
    self_written: float | None = None
    """Share of prompts that the model writes itself; None: those that are lacking when ``sources`` end."""
    passages: float = 0.0
    """Share of prompts about passages, as far as there are passages."""
    texts: GivenPassages | None = None
    """Passages for these prompts; None: the model's own longer answers."""
    most: int = 512
    """Tokens of one answer, at most."""
    longest: int = 1536
    """Tokens of one prompt, earlier turns included, at most."""
    room: int | None = None
    """Tokens of a conversation, at most, where what answers takes fewer than the target."""
    turns: int = 1
    """Turns of one conversation, at most; how many it has is told from its prompt's key."""
    cache_bytes: int | None = None
    """Bytes on disk for hidden states; None: half of the free disk, up to ``data.CACHE``."""
    state_bits: int = 16
    """Of a number of the hidden states on disk, 16 or 8."""
    sampling: AnswerSampling = field(default_factory=AnswerSampling)
    seed: int = 0
    together: int = TOGETHER
    """Requests that are answered at once."""
    answering: Answering | None = field(default=None, compare=False)
    """What answers in the target's place."""
    plan: TimePlan = field(default_factory=TimePlan, compare=False)
    """How long it may take."""


@dataclass(frozen=True)
class BatchConfig:
    """What batches are made of. Sizes are in tokens."""

    row_tokens: int = WINDOW
    """Of a row: a longer conversation is cut into several."""
    batch_tokens: int = BATCH
    """Of a batch, about."""
    pack: bool = True
    """Conversations end to end without padding, for kinds of heads that take them so."""
    evaluate_tokens: int = 20_000
    """Of held-out answers that the loss is watched on while training; 0: all."""
    accumulate: int = 1
    """Batches in a step of the optimiser."""
    prefetch: int = 0
    """Batches that are read ahead, beside training."""
    shard: bool = False
    """Several processes share out the optimiser's state among them."""

    def check(self) -> None:
        """Raise BadInput for an amount out of range."""
        for option, value, least in (
            ("--row-tokens", self.row_tokens, 2 * OVERLAP),
            ("--batch-tokens", self.batch_tokens, 1),
            ("--evaluate-tokens", self.evaluate_tokens, 0),
            ("--accumulate", self.accumulate, 1),
            ("--prefetch", self.prefetch, 0),
        ):
            if value < least:
                raise BadInput(f"{option} must be at least {least}, not {value}")
