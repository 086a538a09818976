"""Draft models of another vocabulary (Timor et al. 2025, arXiv 2502.05202): three algorithms.

``tli`` (token-level intersection): the draft model drafts only tokens that both vocabularies have, its distribution
renormalised over them; a sampled chain with its true q. All other draft-model methods use it for such a model.

``slem`` (string-level exact match): the draft model drafts in its own tokens, whatever the two vocabularies share; its
text is tokenised again in the target's vocabulary and proposed deterministically. It drafts greedily, since a
deterministic draft token is accepted with the target's probability of it.

``slrs`` (string-level rejection sampling): a target token is drafted with the probability that the draft model writes a
string that begins with it, an exact sum over draft token sequences. Only small vocabularies leave few enough of them;
others are refused when the method is built.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.controllers.draft_length import draft_length
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.methods.registry import Context, Parts, register


class HetvocabSettings(StrictModel):
    """Settings of ``hetvocab``."""

    algorithm: Literal["tli", "slem", "slrs"] = Field(
        "tli",
        description="token-level intersection (tli), string-level exact match (slem) or rejection sampling (slrs)",
    )
    num_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=128,
        description="draft tokens per round, in the target's vocabulary; by default from measured costs and acceptance",
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=512,
        description="slem: tokens that the draft model generates for the text; by default as many as num_draft_tokens",
    )
    terms: int = Field(
        256, ge=1, le=65536, description="slrs: maximum number of draft token sequences summed over per token"
    )
    confidence: float = Field(
        0.0, ge=0.0, le=1.0, description="stop before the next draw when the draft model's largest probability is lower"
    )


@register(
    "hetvocab",
    family="draft-model",
    paper="Timor et al. 2025, arXiv 2502.05202",
    needs=("draft model",),
    summary="A draft model of another vocabulary: shared tokens, exact string match, or rejection sampling of strings.",
    when_to_use="When the only suitable small model has another tokenizer: tli if shared tokens cover most of the "
    "text, slem for any vocabularies, slrs for small vocabularies. Not for a draft model with the "
    "target's vocabulary.",
    tiny={"num_draft_tokens": 2},
)
def build(context: Context, settings: HetvocabSettings) -> Parts:
    """The draft model that the caller named, whatever its tokenizer. Raises BadInput where it cannot draft."""
    from outpace.drafting.text_drafter import TextDrafter
    from outpace.targets.bridged import BridgedTarget, StringTarget
    from outpace.vocabulary.shared import vocabulary_map
    from outpace.vocabulary.strings import StringSum

    choice = context.draft_choice()
    if context.tokenizer is None:
        raise BadInput("method 'hetvocab' needs the target's tokenizer beside the draft model's")
    theirs, ours, model = choice.tokenizer, context.tokenizer, choice.target
    length, confidence = settings.num_draft_tokens, settings.confidence
    controller = draft_length(context.target.costs, [model.costs], length, confidence=confidence)
    if settings.algorithm == "slem":
        return Parts(TextDrafter(model, theirs, ours, settings.steps), controller)
    words = vocabulary_map(ours, theirs, context.target.vocab_size, model.vocab_size)
    if settings.algorithm == "slrs":
        strings = StringSum(ours, theirs, words.target_size, words.draft_size, settings.terms)
        return Parts(DraftModel(StringTarget(model, words, strings, context.target.context_length)), controller)
    if not len(words):
        raise BadInput("the two vocabularies share no token; use algorithm=slem")
    return Parts(DraftModel(BridgedTarget(model, words, context.target.context_length)), controller)
