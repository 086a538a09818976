"""EAGLE at decoding (Li et al. 2024, arXiv 2401.15077): the target's last features, then the drafter's predicted ones.

The tree has a fixed shape: the estimated acceptance of a candidate depends on its depth and its rank among its
siblings, not on its probability. The paper's shape was chosen by hand; here it follows from the acceptance rates of the
ranks, which are learned while decoding. ``eagle2`` drafts with the same head by the drafter's own probabilities.

Trees are chosen by score and deterministic at every temperature; ``mode="sampled"`` and ``"chain"`` sample.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.heads.feature_net import Net
from outpace.heads.head_runner import head_spec, matrix_of
from outpace.heads.lm_head import LmHead
from outpace.targets.base import Target
from outpace.targets.branches import Begins
from outpace.targets.dense.decoder_spec import Entry


class EagleNet(Net):
    """A row is an embedding and a feature side by side, joined by a linear layer before the decoder layer."""

    begins = Begins.EMBEDDING_AND_STATE

    def __init__(self, head: Any, target: Target) -> None:
        factored = bool(head.draft_vocabulary.rank)
        spec = head_spec(
            head.config,
            list(head.layers),
            rows=None if factored else head.draft_vocabulary.rows,
            entry=Entry(matrix_of(head.fc, target.device)),
            device=target.device,
        )
        super().__init__(head, target, spec, LmHead(head, target) if factored else None)

    def known(self, tokens: Seq[int], states: Tensor) -> Tensor:
        embedded = self.embedded(tokens)
        return torch.cat([embedded, self.target.final_norm(states).to(embedded)], -1)
