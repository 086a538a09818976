"""``illusion``: where the time of speculative decoding goes, and how far it is from its bounds.

(Liu, Yu, Park, Stoica and Cheung 2026, arXiv 2601.11580.) Rounds are divided into draft, score (the target's forward),
accept and other, by method and batch. Two bounds stand beside the measured speed-up: an oracle drafter, all of whose
tokens are accepted and which takes no time, with the length that then is best by measured costs; and an oracle of the
length, which drafts in every round just what is accepted of the method's drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from outpace.bench.records import Answer
from outpace.controllers.predictor import Predictor, speedups
from outpace.core.errors import BadInput
from outpace.core.metrics import PHASES
from outpace.core.validation import StrictModel
from outpace.model import Model
from outpace.studies.claims import FROM, TO, Claim, above, interval, resampled_groups
from outpace.studies.decoded import Figures, contexts_of, decode, parts_of, speedup, turn_of, whole
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study


class IllusionSettings(StrictModel):
    """Settings of ``illusion``."""

    methods: list[str] = Field(["pld", "eagle3", "draft-model"], min_length=1, description="methods that are timed")
    draft_model: str = Field("", description="draft model of methods that take one; by default what is shipped")
    batches: list[int] = Field([1, 4, 8], min_length=1, description="requests decoded at once")
    max_new_tokens: int = Field(32, ge=2, description="tokens of an answer, at most")
    longest: int = Field(16, ge=1, le=64, description="draft tokens of the oracle drafter, at most")


@study(
    "illusion",
    title="Where the time goes, and how far the bounds are",
    paper="Liu et al. 2026, arXiv 2601.11580",
    resumable=True,
)
def illusion(context: StudyContext, settings: IllusionSettings) -> Findings:
    """Time every method at every batch, beside autoregressive decoding."""
    if min(settings.batches) < 1:
        raise BadInput("batches must be at least 1")
    model = context.model
    draft = context.draft_model(settings.draft_model)
    methods = {name: model.method(name, draft_model=draft) for name in ("none", *settings.methods)}
    rows: list[dict[str, Any]] = []
    gains: dict[int, Figures] = {}
    gaps: list[Figures] = []
    shares: list[Figures] = []
    batches = sorted(set(settings.batches))
    count = len(contexts_of(model, context.prompts, settings.max_new_tokens))
    for batch in batches:
        context.journal.plan({name: float(len(some)) for name, some in parts_of(count, batch).items()})
    for batch in batches:
        found = decode(
            *(model, methods, context.prompts),
            batch=batch,
            max_new_tokens=settings.max_new_tokens,
            seed=context.seed,
            journal=context.journal,
        )
        weights = resampled_groups([at // turn_of(batch) for at in range(len(found.prompts))], context.seed + batch)
        once = whole(len(found.prompts))
        plain = found.answers["none"]
        bound = _oracle_drafter(model, batch, _mean_context(plain), settings.longest)
        best: Figures | None = None
        for name in settings.methods:
            answers = found.answers[name]
            gain, measured = speedup(weights, answers, plain), float(speedup(once, answers, plain)[0])
            split = {phase: float(_share(once, answers, phase)[0]) for phase in PHASES}
            shares.append(_share(weights, answers, "score"))
            best = gain if best is None else np.maximum(best, gain)
            low, high = interval(gain)
            tokens, steps = _oracle_length(model, answers, batch)
            ends = interval(_per_step(weights, tokens, steps))
            rows.append(
                {
                    "method": name,
                    "batch": batch,
                    "speedup": measured,
                    "low": low,
                    "high": high,
                    "oracle_length": float(_per_step(once, tokens, steps)[0]),
                    "oracle_length_low": ends[0],
                    "oracle_length_high": ends[1],
                    "oracle_drafter": bound,
                    **split,
                }
            )
        assert best is not None
        gains[batch] = best
        gaps.append(bound / best)
    claims = _claims(rows, gains, gaps, shares)
    series = {
        name: [
            PlotPoint(row["batch"], row["speedup"], row["low"], row["high"]) for row in rows if row["method"] == name
        ]
        for name in settings.methods
    }
    series["oracle drafter"] = [
        PlotPoint(row["batch"], row["oracle_drafter"]) for row in rows[:: len(settings.methods)]
    ]
    columns = {"method": "method", "batch": "batch", "speedup": "speed-up", "low": FROM, "high": TO}
    columns |= {"oracle_length": "oracle length", "oracle_length_low": FROM, "oracle_length_high": TO}
    columns |= {"oracle_drafter": "oracle drafter"}
    columns |= {phase: phase for phase in PHASES}
    return Findings(
        rows,
        columns,
        claims,
        Plot("Speed-up and its bound, by batch", "batch", "times autoregressive decoding", series, logarithmic=True),
        [
            "The bounds are predicted from measured costs of forwards; speed-ups and shares of the time are measured: "
            "of drafting, the target's forward (score), choosing tokens (accept) and all else (other). "
            "Intervals are over turns: prompts that were answered together."
        ],
    )


def _claims(
    rows: list[dict[str, Any]], gains: dict[int, Figures], gaps: list[Figures], shares: list[Figures]
) -> list[Claim]:
    least, gap = np.min(_paired(shares), axis=0), np.min(_paired(gaps), axis=0)
    found = [
        above(
            "the target's forward takes most of the time, whatever the method and the batch",
            min(row["score"] for row in rows),
            least,
            0.5,
        ),
        above(
            "an oracle drafter would be faster than the best method, at every batch",
            min(row["oracle_drafter"] / row["speedup"] for row in _best(rows)),
            gap,
            1.0,
        ),
    ]
    if len(gains) > 1:
        small, large = min(gains), max(gains)
        first, last = (next(row["speedup"] for row in _best(rows) if row["batch"] == one) for one in (small, large))
        one, other = _paired([gains[small], gains[large]])
        found.append(above(f"speed-ups shrink from batch {small} to batch {large}", first / last, one / other, 1.0))
    return found


def _paired(samples: list[Figures]) -> list[Figures]:
    """As many of each: one, and so no interval, where a batch was answered in a single turn."""
    count = min(map(len, samples))
    return [one[:count] for one in samples]


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest method of each batch."""
    batches = dict.fromkeys(row["batch"] for row in rows)
    return [max((row for row in rows if row["batch"] == one), key=lambda row: row["speedup"]) for one in batches]


def _share(weights: Figures, answers: list[Answer], phase: str) -> Figures:
    own = np.array([one.metrics.phase_seconds[phase] for one in answers])
    every = np.array([sum(one.metrics.phase_seconds.values()) for one in answers])
    found: Figures = (weights @ own) / np.maximum(weights @ every, 1e-9)
    return found


def _mean_context(answers: list[Answer]) -> int:
    return int(np.mean([len(one.context) + len(one.tokens) / 2 for one in answers]))


def _oracle_drafter(model: Model, batch: int, context: int, longest: int) -> float:
    """The best speed-up of drafts of 0, 1, ... tokens that are all accepted and take no time."""
    predictor = Predictor(model.target.costs)
    steps = [_steps(predictor, batch * count, batch, context) for count in range(1, longest + 1)]
    return max(speedups([1.0] * longest, steps))


def _oracle_length(model: Model, answers: list[Answer], batch: int) -> tuple[Figures, Figures]:
    """(P,) each: the tokens of the method's own drafts, and the autoregressive steps that they would take where none
    were longer than what is accepted of it; drafting takes as much less as drafts are shorter."""
    predictor, context = Predictor(model.target.costs), _mean_context(answers)
    step = model.target.costs.round_seconds(batch, context, batch=batch)
    tokens, steps = np.zeros(len(answers)), np.zeros(len(answers))
    for at, answer in enumerate(answers):
        for each in answer.counts[1:]:  # no speed-up counts the first, whose draft reads the prompt
            kept = each.accepted / each.drafted if each.drafted else 0.0
            tokens[at] += each.committed
            steps[at] += _steps(predictor, batch * each.accepted, batch, context) + kept * each.draft_seconds / step
    return tokens, steps


def _per_step(weights: Figures, tokens: Figures, steps: Figures) -> Figures:
    """(R,): tokens per autoregressive step, a speed-up; 1 where there were none."""
    took = weights @ steps
    found: Figures = np.divide(weights @ tokens, took, out=np.ones(len(weights)), where=took > 0)
    return found


def _steps(predictor: Predictor, more: int, batch: int, context: int) -> float:
    """What a round with ``more`` draft tokens takes, in autoregressive rounds."""
    return predictor.round_seconds(more, batch, context) / predictor.round_seconds(0, batch, context)
