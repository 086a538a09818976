"""A head of the EAGLE family at decoding: what becomes of tokens and states before they enter its layers, and after."""

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


class Entering(NamedTuple):
    """Rows on their way into a runner, as :class:`outpace.heads.head_runner.Rows` has them. ``beside``: whether it
    reads the rows' tokens itself."""

    states: Tensor
    beside: bool = False
    entry: bool = False


class Net(ABC):
    """A head at decoding: what becomes of states before its layers and after them.

    ``aux_hidden_state_layers``: layers of the target whose states it reads; ``ids``: the target's id of each word
    that it scores.
    """

    runner: HeadRunner

    def __init__(self, head: Head, target: Target, lm_head: LmHead | None = None) -> None:
        """``lm_head``: scores the words where the stack does not."""
        self.target = target
        self.aux_hidden_state_layers: tuple[int, ...] = head.config.aux_hidden_state_layers
        self.ids: list[int] = head.draft_vocabulary.d2t.tolist()
        self.vocab_size = target.vocab_size
        self._lm_head = lm_head

    @abstractmethod
    def entering(self, tokens: Seq[int], states: Tensor, *, known: bool) -> Entering:
        """Rows of ``tokens`` (n) after ``states``.

        ``known``: these are the target's, of all taps side by side (n, taps * hidden); else what left the stack.
        """

    def embedded(self, tokens: Seq[int]) -> Tensor:
        """The target's embeddings, (n, hidden) float32."""
        return self.target.embed(torch.tensor(tokens, device=self._where)).float()

    def run(self, batch: Seq[Rows], *, logits: bool = True) -> list[Out]:
        """The stack's forward, with logits (n, Vd) float32 of every row."""
        if self._lm_head is None or not logits:
            return self.runner.run(batch, logits=logits)
        outs = self.runner.run(batch, logits=False)
        found = self._lm_head(torch.cat([one.states for one in outs]))
        for one, rows in zip(outs, torch.split(found, [len(one.states) for one in outs]), strict=True):
            one.logits = rows
        return outs

    @property
    def _where(self) -> torch.device:
        device: torch.device = getattr(self.target, "device", torch.device("cpu"))
        return device
