"""``outpace train sprinter``: would the target accept this draft token? Labels are the verdicts of exact verification.

The model decodes prompts with the draft model and recursive rejection, half of them at temperature 0 and half at
``temperature``, so that the gate knows both. Every draft token up to the first rejected one is a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq

from pydantic import Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import RecursiveRejection
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.gates.features import ROW_FEATURES
from outpace.targets.base import Sequence
from outpace.training.gates.classifier import Labels, fit, passing_threshold
from outpace.training.gates.playing import Asked, RecordingDrafter, played
from outpace.training.gates.registry import gate
from outpace.training.gates.work import MadeGate, Work

LENGTH = 8
"""Draft tokens of a round while labels are collected."""


class SprinterOptions(StrictModel):
    """Settings of ``outpace train sprinter``."""

    error: float = Field(
        0.05, gt=0, lt=1, description="share of standing tokens that the target would have rejected (held-out prompts)"
    )
    temperature: float = Field(1.0, gt=0, le=2, description="temperature of half of the answers")
    hidden: int = Field(16, ge=1, le=1024, description="width of the classifier's hidden layer")


def _remark(thresholds: Mapping[str, float]) -> str | None:
    if thresholds["threshold"] < 1.0:
        return None
    return "no token would stand: give a larger --param error=SHARE, or more data"


@gate(
    "sprinter",
    options=SprinterOptions,
    reads_draft=True,
    figures={
        "answers": "{} answers",
        "labels": "{} labels",
        "auc": "AUC {}",
        "standing": "{:.0%} of the held-out ones stand",
        "error": "{:.1%} of these wrongly",
    },
    remark=_remark,
)
def train_sprinter(work: Work) -> MadeGate:
    """Labels, a classifier, and the threshold for ``error``. Raises BadInput where labels are too few."""
    model, options, data = work.model, work.options, Labels()

    def watch(sequence: Sequence, features: Seq[Tensor], verdict: Verdict) -> None:
        prompt = str(tuple(sequence.tokens[: sequence.prompt_length]))
        accepted = len(verdict.path)
        for at, row in enumerate(features[: accepted + 1]):
            data.add(row, at < accepted, prompt)

    def prompts() -> Iterator[tuple[Asked, SamplingParams]]:
        for number, prompt in enumerate(work.prompts):
            sampled = SamplingParams(temperature=options.temperature, seed=work.seed + number)
            tokens = tuple(model.tokenizer.chat(prompt.messages))
            yield Asked(prompt.id, tokens), sampled if number % 2 else SamplingParams()

    done = played(
        model.target,
        RecordingDrafter(work.draft, watch),
        RecursiveRejection(),
        prompts(),
        num_draft_tokens=LENGTH,
        most=work.answer_tokens,
        stop_ids=model.eos_ids,
        over=work.enough,
    )
    fitted = fit(data, options.hidden, work.seed, work.all_over, "accepted")
    threshold = passing_threshold(fitted, options.error)
    stands = fitted.probs > threshold
    figures = {
        "answers": len(done),
        **fitted.figures,
        "standing": round(float(stands.float().mean()), 4),
        "error": round(1.0 - float(fitted.labels[stands].mean()), 4) if bool(stands.any()) else None,
    }
    return MadeGate({"threshold": threshold}, figures, fitted.gate, ROW_FEATURES, options.hidden)
