"""Inference with reference (``llma``, Yang et al. 2023, arXiv 2304.04487): n-gram lookup in reference texts alone.

Without references the prompt is searched. The drafter keeps its place in the reference
(:mod:`outpace.drafting.alignment`), so that it does not continue at another occurrence of words that come again.
"""

from __future__ import annotations

from pydantic import Field

from outpace.drafting.copying import length_controller
from outpace.methods.lookup.pld import LookupSettings, PromptLookup
from outpace.methods.registry import Context, Parts, register


class LlmaSettings(LookupSettings):
    """Settings of ``llma``."""

    align: bool = Field(True, description="track the position in the references, and look up only when it is lost")


@register(
    "llma",
    family="model-free",
    paper="Yang et al. 2023, arXiv 2304.04487",
    needs=("reference",),
    summary="Copies from the reference texts, or from the prompt if there are none.",
    when_to_use="References that contain the answer's wording. No gain where nothing is quoted.",
)
def build_llma(context: Context, settings: LlmaSettings) -> Parts:
    """N-gram lookup in the references."""
    drafter = PromptLookup(
        settings.min_ngram, settings.max_ngram, settings.prefer, own_text=False, align=settings.align
    )
    return Parts(drafter, length_controller(context.target, settings.num_draft_tokens))
