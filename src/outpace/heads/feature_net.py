"""The network of an EAGLE-family head at decoding: from tokens and hidden states to the rows of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.heads.base import Head
from outpace.heads.head_runner import HeadRunner, Out, Rows
from outpace.heads.lm_head import LmHead
from outpace.targets.base import Target
from outpace.targets.cost_table import digest


class Entering(NamedTuple):
    """Rows on their way into the layers, as :class:`outpace.heads.head_runner.Rows` has them.

    ``beside``: whether the layers read the embeddings of the rows' tokens too.
    """

    states: Tensor
    beside: bool = False
    entry: bool = False


class Net(ABC):
    """The network of a head at decoding: what happens to states before its layers, and its LM head after them.

    ``aux_hidden_state_layers``: layers of the target whose hidden states it reads; ``ids``: the target's id of each
    token of the draft vocabulary (Vd).
    """

    runner: HeadRunner

    def __init__(self, head: Head, target: Target, lm_head: LmHead | None = None) -> None:
        """``lm_head``: gives the logits where ``runner`` does not."""
        self.target = target
        self.aux_hidden_state_layers: tuple[int, ...] = head.config.aux_hidden_state_layers
        self.ids: list[int] = head.draft_vocabulary.d2t.tolist()
        self.vocab_size = target.vocab_size
        self.fingerprint = digest(head.named_parameters())
        """Tells its measured times from another head's."""
        self._lm_head = lm_head

    @abstractmethod
    def entering(self, tokens: Seq[int], states: Tensor, *, known: bool) -> Entering:
        """Rows of ``tokens`` (n) after ``states``.

        ``known``: these are the target's, auxiliary layers side by side (n, layers * hidden); else what left the last
        of the head's layers, (n, hidden).
        """

    def embedded(self, tokens: Seq[int]) -> Tensor:
        """The target's embeddings, (n, hidden) float32."""
        return self.target.embed(torch.tensor(tokens, device=self._where)).float()

    def run(self, batch: Seq[Rows], *, logits: bool = True) -> list[Out]:
        """One forward of the head's layers, with logits (n, Vd) float32 of every row unless they are not wanted."""
        if self._lm_head is None or not logits:
            return self.runner.run(batch, logits=logits)
        outs = self.runner.run(batch, logits=False)
        found = self._lm_head(torch.cat([one.states for one in outs]))
        for one, rows in zip(outs, torch.split(found, [len(one.states) for one in outs]), strict=True):
            one.logits = rows
        return outs

    @property
    def _where(self) -> torch.device:
        return self.target.device
