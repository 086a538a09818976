"""The ``eagle3`` method (EAGLE-3, Li et al. 2025, arXiv 2503.01840)."""

from __future__ import annotations

from outpace.methods.learned.eagle.feature_settings import FeatureSettings
from outpace.methods.registry import Context, Parts, register


@register(
    "eagle3",
    family="eagle",
    paper="Li et al. 2025, arXiv 2503.01840; Li et al. 2024, arXiv 2406.16858; Eldenk et al. 2026, arXiv 2605.09992",
    aliases=("attdrift",),
    summary="One decoder layer, trained on its own outputs, drafts a dynamic tree from the hidden states of "
    "three target layers.",
    when_to_use="Any text including open-ended prose, after a head was trained for the target. Not for batches "
    "that already use the whole machine.",
    head="eagle3",
    tiny={"max_nodes": 2, "depth": 2, "topk": 2},
)
def build(context: Context, settings: FeatureSettings) -> Parts:
    """A dynamic tree, or samples, from an ``eagle3`` head. Raises BadInput where no head fits the target."""
    from outpace.methods.learned.eagle.feature_method import feature_parts
    from outpace.methods.learned.eagle3.drafter import Eagle3Net

    return feature_parts(context, Eagle3Net(context.head("eagle3"), context.target), settings, confident=True)
