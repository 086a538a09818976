"""HeadTarget: a draft LM as a target, for methods that draft with a draft model; it borrows the target's embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outpace.heads.head_runner import HeadRunner, head_spec
from outpace.heads.lm_head import LmHead
from outpace.methods.learned.distill.network import DraftLm
from outpace.targets.base import Target
from outpace.targets.cost_table import digest
from outpace.targets.costs import Costs
from outpace.targets.forward_plan import ForwardPlan
from outpace.targets.row_target import RowTarget


class HeadTarget(RowTarget):
    """A draft LM as a target: it reads the target's tokens; its logits (rows, Vd) are over its draft vocabulary.

    ``widened``: its logits are (rows, V) over the target's vocabulary, -inf for the other tokens.
    """

    whole = False

    def __init__(self, head: DraftLm, target: Target, *, widened: bool = False) -> None:
        self.device = target.device
        factored = head.draft_vocabulary.rank > 0
        plan = head_spec(
            head.config,
            list(head.layers),  # type: ignore[arg-type]
            rows=None if factored else head.draft_vocabulary.rows,
            final_norm=None if factored else head.norm,
            device=self.device,
        )
        self._inner = HeadRunner(plan, target).inner
        self._lm_head = LmHead(head, target, norm=head.norm) if factored else None
        self._target = target
        self._fingerprint = digest(head.named_parameters())
        self._output: Callable[[Tensor], Tensor] = self.widened if widened else lambda logits: logits
        self.d2t: Tensor = head.draft_vocabulary.d2t.to(self.device)
        self.dtype = self._inner.dtype
        self.vocab_size, self.hidden_size = target.vocab_size, head.config.hidden_size
        self.num_layers = self._inner.num_layers
        self.context_length = head.config.context_length
        self.prefill_chunk = self._inner.prefill_chunk

    @cached_property
    def costs(self) -> Costs:
        return self._target.costs.beside(self, f"draft LM {self._fingerprint} forward")

    @cached_property
    def word_list(self) -> list[int]:
        """The target's id of each draft token."""
        return list(self.d2t.tolist())

    def widened(self, logits: Tensor) -> Tensor:
        """Logits (n, Vd) as (n, V): -inf for tokens outside of the draft vocabulary."""
        wide = logits.new_full((len(logits), self.vocab_size), -math.inf)
        wide[:, self.d2t] = logits
        return wide

    def run(
        self, plan: ForwardPlan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        plan = replace(plan, states=self.embed(torch.tensor(tokens)))
        if self._lm_head is None or not logits:
            found = self._inner.run(plan, [0] * len(tokens), logits=logits)
            return None if found is None else self._output(found.float())
        plan.wanted = frozenset([self.num_layers])
        self._inner.run(plan, [0] * len(tokens), logits=False)
        return self._output(self._lm_head(plan.hidden_states[self.num_layers]))

    def open(self) -> Any:
        return self._inner.open()

    def embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self._inner.lm_head(hidden) if self._lm_head is None else self._lm_head(hidden)

    def first_rows(self, side_kv: Any, rows: int) -> Any:
        return self._inner.first_rows(side_kv, rows)

    def stacked(self, lower: Any, upper: Any, boundary: int) -> Any:
        return self._inner.stacked(lower, upper, boundary)
