"""Drafters that draft together: their trees are united, and no draw is lost.

``merge`` scores the trees of all its parts in one forward. Equal nodes become one; every draw stays with the row that
it was sampled from, in the order of the parts (as SpecInfer, Miao et al. 2024, arXiv 2305.09781, merges the drafts of
several models), and the rule tries them one after the other. Each part has a random stream of its own: equal numbers
would make two draws agree more often than their distributions imply.

What deterministic parts draft is a function of the context, so their union is cut to the size with the most
expected tokens per time: paths by falling acceptance probability. A sampled draw is never cut.
"""

from __future__ import annotations

from pydantic import Field

from outpace.controllers.combined import CombinedController
from outpace.drafting.merged import Merge
from outpace.methods.combination.parts import CombinationSettings, build_parts
from outpace.methods.registry import Context, Parts, register


class MergeSettings(CombinationSettings):
    """Settings of ``merge``."""

    parts: tuple[str, ...] = Field(
        ("sam", "recycling"),
        min_length=1,
        max_length=16,
        description="names of methods; their draws are tried in order",
    )


@register(
    "merge",
    family="combination",
    paper="Miao et al. 2024, arXiv 2305.09781",
    summary="Merges the trees of several drafters: equal nodes once, every draw kept.",
    when_to_use="Parts that predict different tokens, on machines where additional rows cost little. Not in "
    "batches that already use the whole machine.",
    tiny={
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 2}},
    },
)
def build(context: Context, settings: MergeSettings) -> Parts:
    """The union of the parts."""
    built = build_parts(context, settings)
    return Parts(Merge(built.drafters, built.names), CombinedController(built.controllers, united=True))
