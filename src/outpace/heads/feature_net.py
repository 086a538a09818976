"""The network of an EAGLE-family head at decoding: from tokens and hidden states to the rows of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn import functional

from outpace.heads.base import Head
from outpace.heads.head_runner import HeadRunner, Out, Rows
from outpace.heads.lm_head import LmHead
from outpace.heads.runner_branches import RunnerBranches
from outpace.targets.base import Target
from outpace.targets.branches import Begins, Branches
from outpace.targets.cost_table import digest
from outpace.targets.dense.decoder_spec import DecoderSpec


class Net(ABC):
    """The network of a head at decoding: what happens to states before its layers, and its LM head after them.

    ``aux_hidden_state_layers``: layers of the target whose hidden states it reads; ``ids``: the target's id of each
    token of the draft vocabulary (Vd); ``begins``: what rows of drafted tokens enter the layers with.
    """

    begins: Begins = Begins.STATE

    def __init__(
        self, head: Head, target: Target, spec: DecoderSpec, lm_head: LmHead | None = None, *, normed: bool = False
    ) -> None:
        """``spec``: of the layers; ``lm_head``: gives the logits where they do not. ``normed``: states are handed on
        behind the final norm."""
        self.target = target
        self.aux_hidden_state_layers: tuple[int, ...] = head.config.aux_hidden_state_layers
        self.ids = array("i", head.draft_vocabulary.d2t.tolist())
        self.vocab_size = target.vocab_size
        self.fingerprint = digest(head.named_parameters())
        """Tells its measured times from another head's."""
        self.reads_tokens = spec.second_norm is not None
        """Whether the layers read the embeddings of the rows' tokens beside their states."""
        self.runner = HeadRunner(spec, target, normed=normed)
        self._lm_head = lm_head
        self._behind = None if spec.entry is None or spec.entry.after is None else spec.entry.after.weight
        self._epsilon = spec.epsilon

    @property
    def joins(self) -> bool:
        """Whether rows of drafted tokens go through the entry, as rows of committed ones do."""
        return self.begins is Begins.EMBEDDING_AND_STATE

    @abstractmethod
    def known(self, tokens: Seq[int], states: Tensor) -> Tensor:
        """What enters the entry for ``tokens`` (n) after the target's hidden states, (n, layers * hidden): (n, inputs)
        float32."""

    def begun(self, tokens: Seq[int], states: Tensor) -> Tensor:
        """What rows of drafted ``tokens`` (n) begin with, after the states (n, hidden) of the rows before them."""
        if self.begins is Begins.EMBEDDING_AND_STATE:
            embedded = self.embedded(tokens)
            return torch.cat([embedded, states.to(embedded)], -1)
        if self.begins is Begins.NORMED_STATE:
            assert self._behind is not None
            return functional.rms_norm(states.float(), self._behind.shape, self._behind, self._epsilon)
        return states

    def embedded(self, tokens: Seq[int]) -> Tensor:
        """The target's embeddings, (n, hidden) float32."""
        return self.target.embed(torch.tensor(tokens, device=self.target.device)).float()

    def branches(self) -> Branches:
        """What grows drafts: one call of the kernels a level where these hold the whole head."""
        own = None if self._lm_head is not None else self.runner.branches(self.begins)
        return RunnerBranches(self) if own is None else own

    def run(self, batch: Seq[Rows]) -> list[Out]:
        """One forward of the head's layers, with logits (n, Vd) float32 of every row."""
        if self._lm_head is None:
            return self.runner.run(batch)
        outs = self.runner.run(batch, logits=False)
        found = self._lm_head(torch.cat([one.states for one in outs]))
        for one, rows in zip(outs, torch.split(found, [len(one.states) for one in outs]), strict=True):
            one.logits = rows
        return outs
