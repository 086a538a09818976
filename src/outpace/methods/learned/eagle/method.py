"""The ``eagle`` method (EAGLE, Li et al. 2024, arXiv 2401.15077)."""

from __future__ import annotations

from outpace.methods.learned.eagle.feature_settings import FeatureSettings
from outpace.methods.registry import Context, Parts, register


@register(
    "eagle",
    family="eagle",
    paper="Li et al. 2024, arXiv 2401.15077",
    summary="One decoder layer predicts the target's next features and drafts a tree of a fixed shape.",
    when_to_use="Any text, after a head was trained for the target. eagle2 drafts better trees with the same head.",
    head="eagle",
    aliases=("eagle-1",),
    tiny={"max_nodes": 3, "depth": 2, "topk": 2},
)
def build(context: Context, settings: FeatureSettings) -> Parts:
    """A tree shaped by ranks, or samples, from an ``eagle`` head. Raises BadInput where no head fits the target."""
    from outpace.methods.learned.eagle.drafter import EagleNet
    from outpace.methods.learned.eagle.feature_method import feature_parts

    return feature_parts(context, EagleNet(context.head("eagle"), context.target), settings, confident=False)
