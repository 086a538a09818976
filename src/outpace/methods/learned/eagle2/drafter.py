"""EAGLE-2 (Li et al. 2024, arXiv 2406.16858): an ``eagle`` head with a dynamic tree.

The drafter's own probabilities choose which paths are expanded and which nodes are drafted.
"""

from __future__ import annotations

from outpace.methods.learned.eagle.drafter import EagleNet
from outpace.methods.learned.feature_method import FeatureSettings, feature_parts
from outpace.methods.registry import Context, Parts, register


@register(
    "eagle2",
    family="eagle",
    paper="Li et al. 2024, arXiv 2406.16858",
    summary="EAGLE's drafter with a dynamic tree: its own probabilities say which paths are drafted.",
    when_to_use="On any text once a head is trained for the target; eagle3 foretells further. Not in batches that "
    "fill a "
    "machine.",
    head="eagle",
    tiny={"nodes": 3, "depth": 2, "width": 2},
)
def build_dynamic(context: Context, settings: FeatureSettings) -> Parts:
    """A dynamic tree, or samples, of an ``eagle`` head."""
    return feature_parts(context, EagleNet(context.head("eagle"), context.target), settings, confident=True)
