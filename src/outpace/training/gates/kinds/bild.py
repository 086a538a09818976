"""``outpace train bild``: the fastest fallback and rollback thresholds within a limit on the excess likelihood.

The model decodes prompts greedily with the draft model. Of every draft token the draft model's largest probability and
the target's cross entropy are noted, behind the draft tokens before it. What each pair of thresholds of a grid would
have drafted and kept of these drafts follows without decoding again; its time from the measured costs of both models.
The drafts begin where the target's own text ends, not where kept tokens would have led, so this is an estimate;
``outpace bench --quality`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.bounds import view
from outpace.acceptance.rejection import RecursiveRejection
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.targets.base import Sequence
from outpace.training.gates.classifier import held_out
from outpace.training.gates.playing import Asked, RecordingDrafter, played
from outpace.training.gates.registry import gate
from outpace.training.gates.work import MadeGate, Work

FALLBACKS = tuple(step / 10 for step in range(10))
ROLLBACKS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_NOMINAL = 0.1
"""Of a step of the target, where costs are fixed: a token of the draft."""
_LEAST = 10
"""Drafts of held-out prompts, and of others, below which nothing is chosen."""


class BildOptions(StrictModel):
    """Settings of ``outpace train bild``."""

    excess_nll: float = Field(
        0.05, ge=0, le=10, description="limit of the excess negative log-likelihood, in nats per token"
    )
    num_draft_tokens: int = Field(10, ge=1, le=64, description="draft tokens after which the target is asked anyway")


class DraftToken(NamedTuple):
    """``confidence``: the draft model's largest probability before the draw. ``distance``: -log p of the token under
    the target, and ``excess``: log max p - log p, in nats; ``same``: it is the target's first choice."""

    confidence: float
    distance: float
    excess: float
    same: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pair of thresholds makes of some drafts. ``seconds``: in whatever unit costs are; ``excess``: nats."""

    tokens: int
    seconds: float
    excess: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def excess_nll(self) -> float:
        return self.excess / self.tokens


Costs = Callable[[int], float]
"""The time of a round with so many draft tokens, its draft included."""


def outcome(drafts: Seq[Seq[DraftToken]], fallback: float, rollback: float, costs: Costs) -> Outcome:
    """What rounds that begin as ``drafts`` do commit, take and cost."""
    tokens, seconds, excess = 0, 0.0, 0.0
    for draft in drafts:
        drafted = next((at for at, one in enumerate(draft) if one.confidence < fallback), len(draft))
        kept = 0
        while kept < drafted and (draft[kept].same or draft[kept].distance <= rollback):
            excess += draft[kept].excess
            kept += 1
        tokens, seconds = tokens + kept + 1, seconds + costs(drafted)
    return Outcome(tokens, seconds, excess)


def best_thresholds(drafts: Seq[Seq[DraftToken]], limit: float, costs: Costs) -> tuple[float, float]:
    """Fallback and rollback of the most tokens per time with at most ``limit`` of excess; rollback 0 has none."""
    pairs = [(fallback, rollback) for fallback in FALLBACKS for rollback in ROLLBACKS]
    found = [(outcome(drafts, *pair, costs), pair) for pair in pairs]
    allowed = [(one.rate, pair) for one, pair in found if one.excess_nll <= limit]
    return max(allowed, key=lambda one: one[0])[1]


@gate(
    "bild",
    options=BildOptions,
    reads_draft=True,
    figures={
        "drafts": "{} drafts",
        "held_out_drafts": "{} held out",
        "tokens_per_round": "{} tokens per round",
        "excess_nll": "{} nats of excess per token",
        "expected_speedup": "{}x expected",
        "expected_speedup_lossless": "{}x with rollback 0",
    },
)
def train_bild(work: Work) -> MadeGate:
    """Drafts, and the thresholds for ``excess_nll``. Raises BadInput where drafts are too few."""
    model, options = work.model, work.options
    learned: list[list[DraftToken]] = []
    kept_out: list[list[DraftToken]] = []

    def watch(sequence: Sequence, features: Seq[Tensor], verdict: Verdict) -> None:
        prompt = str(tuple(sequence.tokens[: sequence.prompt_length]))
        (kept_out if held_out(prompt) else learned).append(_draft(features, verdict))

    def prompts() -> Iterator[tuple[Asked, SamplingParams]]:
        for prompt in work.prompts:
            yield Asked(prompt.id, tuple(model.tokenizer.chat(prompt.messages))), SamplingParams()

    played(
        model.target,
        RecordingDrafter(work.draft, watch),
        RecursiveRejection(),
        prompts(),
        num_draft_tokens=options.num_draft_tokens,
        most=work.answer_tokens,
        stop_ids=model.eos_ids,
        over=work.enough,
    )
    if min(len(learned), len(kept_out)) < _LEAST:
        raise BadInput(
            f"{len(learned)} drafts to choose by and {len(kept_out)} to measure with are too few (at least {_LEAST} "
            "each); give more --prompts, --tokens or --max-minutes"
        )
    costs, alone = _costs(work, options.num_draft_tokens), model.target.costs.seconds(1)
    fallback, rollback = best_thresholds(learned, options.excess_nll, costs)
    _, best = max((outcome(learned, one, 0.0, costs).rate, one) for one in FALLBACKS)
    found, exact = outcome(kept_out, fallback, rollback, costs), outcome(kept_out, best, 0.0, costs)
    figures = {
        "drafts": len(learned),
        "held_out_drafts": len(kept_out),
        "tokens_per_round": round(found.tokens / len(kept_out), 4),
        "excess_nll": round(found.excess_nll, 4),
        "expected_speedup": round(found.rate * alone, 4),
        "expected_speedup_lossless": round(exact.rate * alone, 4),
    }
    return MadeGate({"fallback": fallback, "rollback": rollback}, figures)


def _draft(features: Seq[Tensor], verdict: Verdict) -> list[DraftToken]:
    """The draft tokens of a chain; node ``at`` follows node ``at`` - 1, the first the root, -1."""
    found, scores = [], verdict.scores
    for at, row in enumerate(features):
        logs = view(scores, at - 1).probs.double().log()
        token, best = float(logs[scores.tree.tokens[at]]), float(logs.max())
        same = scores.argmax(at - 1) == scores.tree.tokens[at]
        found.append(DraftToken(math.exp(float(row[0])), -token, best - token, same))
    return found


def _costs(work: Work, most: int) -> Costs:
    """A draft that ends before ``most`` tokens has run the draft model once more than it drafted."""
    target, draft = work.model.target.costs, work.draft.costs
    level = _NOMINAL if target.fixed else draft.seconds(1)
    rounds = [target.seconds(1 + count) + min(count + 1, most) * level for count in range(most + 1)]
    return lambda count: rounds[count]
