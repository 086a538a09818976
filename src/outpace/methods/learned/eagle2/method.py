"""EAGLE-2 (Li et al. 2024, arXiv 2406.16858): an ``eagle`` head with a dynamic tree.

The drafter's own probabilities choose which nodes are expanded; all candidates are ranked again when it is complete.
"""

from __future__ import annotations

from outpace.methods.learned.eagle.feature_settings import FeatureSettings
from outpace.methods.registry import Context, Parts, register


@register(
    "eagle2",
    family="eagle",
    paper="Li et al. 2024, arXiv 2406.16858",
    summary="EAGLE's drafter with a dynamic tree: its own probabilities choose which paths are drafted.",
    when_to_use="Any text, after a head was trained for the target; eagle3 has longer accepted lengths. Not for "
    "batches that already use the whole machine.",
    head="eagle",
    tiny={"max_nodes": 2, "depth": 2, "topk": 2},
)
def build(context: Context, settings: FeatureSettings) -> Parts:
    """A dynamic tree, or samples, from an ``eagle`` head. Raises BadInput where no head fits the target."""
    from outpace.methods.learned.eagle.drafter import EagleNet
    from outpace.methods.learned.eagle.feature_method import feature_parts

    return feature_parts(context, EagleNet(context.head("eagle"), context.target), settings, confident=True)
