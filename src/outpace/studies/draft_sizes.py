"""Draft models of several sizes for one target: trained on its own answers, judged on others, and timed untrained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from outpace.core.errors import BadInput
from outpace.core.names import unknown
from outpace.core.progress import stage
from outpace.core.validation import StrictModel
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.teacher_forcing import likelihood_ratios
from outpace.heads.checkpoint import new_head
from outpace.heads.head_config import SIZES, HeadConfig, TargetFacts
from outpace.heads.kinds import find_kind, plan, weight_shapes
from outpace.methods.learned.distill.network import DraftLm
from outpace.methods.learned.distill.target import HeadTarget
from outpace.methods.named_weights import DRAFT_LM
from outpace.model import Model
from outpace.studies.decoded import Figures
from outpace.targets.costs import ForwardCosts
from outpace.training.job import train
from outpace.training.training_progress import TrainingProgress

CONTEXT = 256
"""Committed tokens after which forwards are timed."""


class DraftSettings(StrictModel):
    """How draft models are trained."""

    tokens: int = Field(12_000, ge=1, description="of answers that draft models are trained on, about")
    epochs: float = Field(1.0, gt=0, description="passes over them")
    batch_tokens: int = Field(512, ge=64, description="tokens of a step of training, about")
    answer_tokens: int = Field(128, ge=8, description="tokens of an answer that is trained on, at most")
    train_prompts: str = Field("", description="file of prompts to train on; by default the target writes its own")
    vocabulary: int = Field(8192, ge=16, description="tokens that draft models can draft")
    pruned: bool = Field(True, description="begin with layers of the target, as draft LMs do by default")


@dataclass(frozen=True, slots=True)
class DraftSize:
    """A draft model's size. ``weights``: its own, without the embedding and the LM head that it borrows."""

    layers: int
    size: str
    config: HeadConfig
    weights: int

    @property
    def name(self) -> str:
        return f"{self.layers}:{self.size}"


def read_size(model: Model, text: str, settings: DraftSettings) -> DraftSize:
    """A size from LAYERS:SIZE. Raises BadInput for one that does not exist."""
    layers, sign, size = text.partition(":")
    if not sign or not layers.isdigit():
        raise BadInput(f"sizes are LAYERS:SIZE, such as 2:base, not '{text}'")
    if size not in SIZES:
        raise unknown("size", size, list(SIZES))
    target = model.target
    facts = TargetFacts(
        name=model.name,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        fingerprint=[],
    )
    options = {"layers": int(layers), "pruned": settings.pruned}
    config = plan(find_kind(DRAFT_LM), facts, size=size, vocabulary=settings.vocabulary, options=options)
    return DraftSize(int(layers), size, config, sum(math.prod(shape) for shape in weight_shapes(config).values()))


def folder_of(one: DraftSize, folder: Path) -> Path:
    """Where :func:`trained` writes it."""
    return folder / f"{one.layers}-{one.size}"


def trained(
    model: Model, one: DraftSize, folder: Path, settings: DraftSettings, seed: int, check: Callable[[], None]
) -> int:
    """Train a draft model of this size, or go on where that was ended; all of one ``folder`` learn from the same
    answers. Returns these answers' tokens. ``check``: called all along, may raise KeyboardInterrupt."""
    with stage(f"training a draft model of {one.weights / 1e6:.1f} million weights") as at:

        def report(now: TrainingProgress) -> None:
            at.move(now.done, now.total, now.doing)
            if now.stage != "stopped":
                check()

        found = train(
            model,
            DRAFT_LM,
            folder_of(one, folder),
            prompts=[settings.train_prompts] if settings.train_prompts else None,
            tokens=settings.tokens,
            passages=0.0,
            turns=1,
            answer_tokens=settings.answer_tokens,
            data=folder / "data",
            epochs=settings.epochs,
            resume=folder_of(one, folder).exists(),
            size=one.size,
            vocabulary=settings.vocabulary,
            batch_tokens=settings.batch_tokens,
            options={"layers": one.layers, "pruned": settings.pruned},
            seed=seed,
            on_progress=report,
        )
    return int(found.provenance["data"]["answer_tokens"])


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft model's sums over the target's answers, (P,) each: of -log q, and the tokens that it can draft; of the
    probabilities that a token drawn from it would be accepted, and all tokens."""

    surprise: Figures
    known: Figures
    accepted: Figures
    tokens: Figures

    def perplexity(self, weights: Figures) -> Figures:
        """(R,), over the tokens that it can draft."""
        found: Figures = np.exp((weights @ self.surprise) / np.maximum(weights @ self.known, 1.0))
        return found

    def acceptance(self, weights: Figures) -> Figures:
        """(R,): the probability that a draft token is accepted after the target's own text."""
        found: Figures = (weights @ self.accepted) / (weights @ self.tokens)
        return found


def judged(model: Model, folder: Path, answers: Seq[KnownAnswer]) -> Judged:
    """The draft model in ``folder`` on answers that the target drew: a token a with probability p is accepted with
    min(1, q / p), whose mean over a is the acceptance of a draw from q."""
    draft = model.context(draft_model=folder).draft()
    sums = []
    for answer, ratios in zip(answers, likelihood_ratios(draft, answers), strict=True):
        q = np.array(ratios) * np.array(answer.probs)
        known = q > 0.0
        sums.append((-np.log(q[known]).sum(), known.sum(), np.minimum(ratios, 1.0).sum(), len(ratios)))
    return Judged(*np.array(sums, float).T)


def draft_seconds(model: Model, sizes: Seq[DraftSize]) -> dict[str, float]:
    """What a forward over one row takes, by size: of draft models with random weights."""
    found = {}
    with stage("timing draft models", total=len(sizes), unit="sizes") as at, torch.random.fork_rng(devices=[]):
        for number, one in enumerate(sizes, 1):
            head = new_head(one.config, model.target, torch.arange(one.config.vocabulary))
            assert isinstance(head, DraftLm)
            draft = HeadTarget(head.eval().requires_grad_(False), model.target, widened=True)
            found[one.name] = ForwardCosts(draft).seconds(1, CONTEXT)
            at.move(number)
    return found
