"""EAGLE and EAGLE-2 at decoding: drafts from the target's features, and then from features that the drafter foretells.

Both draft with an ``eagle`` head and differ in their trees. ``eagle`` (Li et al. 2024, arXiv 2401.15077) has one of a
fixed shape: what a token is worth depends on its rank among its siblings and its depth alone. The paper's shape was
chosen by hand; here the ranks' acceptance rates choose it, and are learned. ``eagle2`` (Li et al. 2024, arXiv
2406.16858) goes by the drafter's own probabilities: a dynamic tree, ranked again when it is complete.

Trees are chosen by score, and so deterministic at every temperature; ``mode="sampled"`` and ``"chain"`` sample.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.heads.feature_net import Entering, Net
from outpace.heads.head_runner import HeadRunner, head_spec, matrix_of
from outpace.heads.lm_head import LmHead
from outpace.methods.learned.feature_method import FeatureSettings, feature_parts
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Target
from outpace.targets.dense.decoder_spec import Entry


class EagleNet(Net):
    """Rows are embeddings and features, joined before they enter the layer."""

    def __init__(self, head: Any, target: Target) -> None:
        factored = bool(head.draft_vocabulary.rank)
        super().__init__(head, target, LmHead(head, target) if factored else None)
        plan = head_spec(
            head.config,
            list(head.layers),
            rows=None if factored else head.draft_vocabulary.rows,
            entry=Entry(matrix_of(head.fc, self._where)),
            device=self._where,
        )
        self.runner = HeadRunner(plan, target)

    def entering(self, tokens: Seq[int], states: Tensor, *, known: bool) -> Entering:
        embedded = self.embedded(tokens)
        features = self.target.final_norm(states) if known else states
        return Entering(torch.cat([embedded, features.to(embedded)], -1), entry=True)


@register(
    "eagle",
    family="eagle",
    paper="Li et al. 2024, arXiv 2401.15077",
    summary="A layer that foretells the target's features drafts a tree of a fixed shape.",
    when_to_use="On any text once a head is trained for the target. eagle2 drafts better trees with the same head.",
    head="eagle",
    aliases=("eagle1",),
    tiny={"nodes": 3, "depth": 2, "width": 2},
)
def build(context: Context, settings: FeatureSettings) -> Parts:
    """A tree shaped by ranks, or samples, of an ``eagle`` head."""
    return feature_parts(context, EagleNet(context.head("eagle"), context.target), settings, confident=False)
