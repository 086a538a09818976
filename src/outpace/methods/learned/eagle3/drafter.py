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
from torch.nn import functional

from outpace.heads.feature_net import Entering, Net
from outpace.heads.head_runner import HeadRunner, head_spec, matrix_of, norm_of
from outpace.heads.lm_head import LmHead
from outpace.targets.base import Target
from outpace.targets.dense.decoder_spec import Entry, Matrix


class Eagle3Net(Net):
    """A row is a state; attention reads the embedding of its token beside it.

    ``norms="attdrift"`` (Eldenk et al. 2026, arXiv 2605.09992): states are handed on behind the final norm.
    """

    def __init__(self, head: Any, target: Target) -> None:
        layer, factored = head.layers[0], bool(head.draft_vocabulary.rank)
        drifting, before = head.options.norms == "attdrift", head.options.residual == "normed"
        lm_head = LmHead(head, target, norm=None if drifting else head.norm) if factored else None
        super().__init__(head, target, lm_head)
        layer_norms = (
            Matrix(torch.cat([norm_of(one, self._where).weight for one in head.fc_norm])) if drifting else None
        )
        behind = norm_of(layer.hidden_norm, self._where) if before else None
        plan = head_spec(
            head.config,
            [layer],
            rows=None if factored else head.draft_vocabulary.rows,
            final_norm=head.norm,
            first_norms=[nn.Identity() if before else layer.hidden_norm],
            second_norm=layer.input_layernorm,
            entry=Entry(matrix_of(head.fc, self._where), layer_norms, behind),
            device=self._where,
        )
        self.runner = HeadRunner(plan, target, normed=drifting)
        self._epsilon = head.config.epsilon
        self._before = None if behind is None else behind.weight

    def entering(self, tokens: Seq[int], states: Tensor, *, known: bool) -> Entering:
        if self._before is not None and not known:
            states = functional.rms_norm(states.float(), self._before.shape, self._before, self._epsilon)
        return Entering(states, beside=True, entry=known)
