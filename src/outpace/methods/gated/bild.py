"""The Big Little Decoder (BiLD: Kim et al. 2023, arXiv 2302.07863). Lossy.

The little model writes until it is unsure: *fallback*, where its largest probability is below a threshold before the
draw. The big model then reads what was written in one forward, *rolls back* the first token at which the two models
differ by more than a distance (rule ``rollback``), and writes the token there. Both thresholds may come from a gate
that ``outpace train bild`` chose for a limit on the excess negative log-likelihood. The paper's alignment of the little
model with the big one is distillation: ``outpace train draft-lm``.

With ``rollback`` 0 every token that the big model would not have written is rolled back, and the output distribution is
the target's.
"""

from __future__ import annotations

from pydantic import Field

from outpace.acceptance.rollback import MOST_DISTANCE, Rollback, RollbackSettings
from outpace.controllers.fixed import Fixed
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.methods.gated.given_gate import FILE, stored_gate
from outpace.methods.registry import Context, Parts, register

FALLBACK, ROLLBACK = 0.5, 2.0
"""Without a gate."""


class BildSettings(StrictModel):
    """Settings of ``bild``."""

    gate: str = Field("", description="folder of thresholds that 'outpace train bild' chose", json_schema_extra=FILE)
    fallback: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="the draft model stops before a draw when its largest probability is lower; by default that of the "
        f"gate, or {FALLBACK:g}",
    )
    rollback: float | None = Field(
        None,
        ge=0.0,
        le=MOST_DISTANCE,
        description="cross entropy in nats from which a draft token is rolled back; 0 is lossless; by default that of "
        f"the gate, or {ROLLBACK:g}",
    )
    num_draft_tokens: int = Field(10, ge=1, le=128, description="draft tokens after which the target is asked anyway")


@register(
    "bild",
    family="gated",
    paper="Kim et al. 2023, arXiv 2302.07863",
    needs=("draft model",),
    lossless=False,
    summary="A draft model writes until it is unsure; the target rolls back what differs too much. Approximate.",
    when_to_use="A draft model whose largest probability tells when it is wrong. Rule rollback states a bound on what "
    "that costs; measure it (outpace bench --quality).",
    aliases=("big-little-decoder",),
    tiny={"fallback": 0.3, "rollback": 0.0, "num_draft_tokens": 2},
)
def build(context: Context, settings: BildSettings) -> Parts:
    """The draft model that the caller named, and the thresholds. Raises BadInput for a gate of other models."""
    draft = context.draft()
    fallback, rollback = settings.fallback, settings.rollback
    if settings.gate:
        found = stored_gate("bild", settings.gate, 0, context.target, draft)
        fallback = found.threshold("fallback") if fallback is None else fallback
        rollback = found.threshold("rollback", MOST_DISTANCE) if rollback is None else rollback
    rule = Rollback(RollbackSettings(distance=ROLLBACK if rollback is None else rollback))
    most = settings.num_draft_tokens
    return Parts(DraftModel(draft), Fixed(most, 1, most, FALLBACK if fallback is None else fallback), rule)
