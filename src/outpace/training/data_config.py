"""DataConfig: which conversations are collected for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.prompts.sources import Source
from outpace.training.answers import TOGETHER, AnswerSampling
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
    most: int = 224
    """Tokens of one answer, at most."""
    longest: int = 1024
    """Tokens of one prompt, at most."""
    cache_bytes: int | None = None
    """Bytes on disk for hidden states; None: half of the free disk, up to ``data.CACHE``."""
    sampling: AnswerSampling = field(default_factory=AnswerSampling)
    seed: int = 0
    together: int = TOGETHER
    """Requests that are answered at once."""
    plan: TimePlan = field(default_factory=TimePlan, compare=False)
    """How long it may take."""
