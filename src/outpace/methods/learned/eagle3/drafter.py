"""EAGLE-3 at decoding (Li et al. 2025, arXiv 2503.01840): its layer beside the target.

Drafts are EAGLE-2's dynamic trees by default (Li et al. 2024, arXiv 2406.16858), chosen by score and deterministic at
every temperature. ``mode="sampled"`` draws trees without replacement and ``"chain"`` chains; each draw carries the row
that it was sampled from. At temperature 0 all modes draft the likeliest paths.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from outpace.heads.feature_net import Net
from outpace.heads.head_runner import head_spec, matrix_of, norm_of
from outpace.heads.lm_head import LmHead
from outpace.targets.base import Target
from outpace.targets.branches import Begins
from outpace.targets.dense.decoder_spec import Entry, Matrix


class Eagle3Net(Net):
    """A row is a state; attention reads the embedding of its token beside it.

    ``norms="attdrift"`` (Eldenk et al. 2026, arXiv 2605.09992): states are handed on behind the final norm.
    """

    def __init__(self, head: Any, target: Target) -> None:
        layer, factored, where = head.layers[0], bool(head.draft_vocabulary.rank), target.device
        drifting, before = head.options.norms == "attdrift", head.options.residual == "normed"
        layer_norms = Matrix(torch.cat([norm_of(one, where).weight for one in head.fc_norm])) if drifting else None
        spec = head_spec(
            head.config,
            [layer],
            rows=None if factored else head.draft_vocabulary.rows,
            final_norm=head.norm,
            first_norms=[nn.Identity() if before else layer.hidden_norm],
            second_norm=layer.input_layernorm,
            entry=Entry(matrix_of(head.fc, where), layer_norms, norm_of(layer.hidden_norm, where) if before else None),
            device=where,
        )
        self.begins = Begins.NORMED_STATE if before else Begins.STATE
        lm_head = LmHead(head, target, norm=None if drifting else head.norm) if factored else None
        super().__init__(head, target, spec, lm_head, normed=drifting)

    def known(self, tokens: Seq[int], states: Tensor) -> Tensor:
        return states
