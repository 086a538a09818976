"""PARD-2: masks behind the last token, filled in by one forward of a small LM.

A round runs the tokens that were committed since the last one, the last of them is the anchor, and behind it a mask for
every further position. All of it is one causal chunk: the masks see the text and the masks before them. Their keys and
values are given up at once, those of the tokens stay.

With ``features`` every row carries the target's states before its token, the masks the anchor's; without, the very same
drafter reads nothing of the target. A row whose states are not known (they are of tokens that another decoder put out)
carries none.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.drafting.marginals import FromMarginals
from outpace.heads.head_runner import HeadRunner, Rows, head_spec
from outpace.heads.lm_head import LmHead, Product
from outpace.methods.learned.pard2.network import Pard2
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target, TreeScores

CATCH_UP = 16
"""Committed tokens that ride along with the masks, unless there are more."""
RECENT = 32
"""States of the last tokens that are kept beyond their use: a decoder inside a drafter takes some tokens back."""


@dataclass(slots=True)
class _Request:
    """``kv``: of the beginning of the committed tokens. ``states[j]``, (taps * hidden): those of token j - 1, which the
    row of token j carries."""

    kv: Any
    states: dict[int, Tensor] = field(default_factory=dict)


class Fusion:
    """The target's states to what a row carries: each tap normed, side by side through one product."""

    def __init__(self, head: Pard2, target: Target) -> None:
        norms: list[Any] = list(head.fc_norm)
        weights = torch.cat([norm.weight.detach().float() for norm in norms])
        self._product = Product(head.config, head.fc.weight.detach().float() * weights, target)
        self._taps, self._epsilon = len(norms), head.config.epsilon

    @property
    def device(self) -> torch.device:
        """Where states are wanted."""
        return self._product.device

    def __call__(self, states: Tensor) -> Tensor:
        """(n, taps * hidden) to (n, hidden)."""
        apart = states.to(self.device).float().view(len(states), self._taps, -1)
        normed = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + self._epsilon)
        return self._product(normed.flatten(1))


class ParallelDraft(FromMarginals):
    """Drafts chains (``k`` = 1) or trees of ``k`` candidates a position from one forward."""

    def __init__(
        self, head: Pard2, target: Target, k: int = 1, *, features: bool = True, sampled: bool = False
    ) -> None:
        super().__init__(head.draft_vocabulary.d2t, k, sampled=sampled)
        self.target = target
        self.aux_hidden_state_layers = head.config.aux_hidden_state_layers if features else ()
        self.most: int = head.options.ahead
        """Draft tokens of one forward."""
        factored = head.draft_vocabulary.rank > 0
        device = getattr(target, "device", torch.device("cpu"))
        layers: Any = list(head.layers)
        rows, norm = (None, None) if factored else (head.draft_vocabulary.rows, head.norm)
        self._runner = HeadRunner(head_spec(head.config, layers, rows=rows, final_norm=norm, device=device), target)
        self._lm_head = LmHead(head, target, norm=head.norm) if factored else None
        self._fusion = Fusion(head, target) if features else None
        self._mask = head.mask.detach().float().to(self._runner.device)
        self._requests: dict[Sequence, _Request] = {}

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._requests[sequence] = _Request(self._runner.open())

    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        self._learn(sequence, position, torch.cat([hidden_states[layer] for layer in self.aux_hidden_state_layers], -1))
        self._keep(
            [sequence],
            min(position + 1 + len(hidden_states[self.aux_hidden_state_layers[0]]), len(sequence.tokens) - 1),
        )

    def _learn(self, sequence: Sequence, position: int, states: Tensor) -> None:
        """States (n, taps * hidden) of the tokens from ``position`` on."""
        self._requests[sequence].states.update(enumerate(states, start=position + 1))

    @torch.inference_mode()
    def rows(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Tensor | None]:
        self._keep([one for one in sequences if self._lag(one) > CATCH_UP])
        batch, anchors = [], []
        for sequence, depth in zip(sequences, depths, strict=True):
            # A forward says something of the last token's row alone, which may be there from a round without verdict.
            self._cut(sequence, len(sequence.tokens) - 1)
            anchors.append(self._lag(sequence) - 1)
            batch.append((sequence, len(sequence.tokens), min(depth, self.most) - 1))
        states = self._run(batch, logits=self._lm_head is None)
        for sequence, end, _ in batch:
            self._cut(sequence, end)  # the masks have had their say
        found = [one[anchor:] for one, anchor in zip(states, anchors, strict=True)]
        if self._lm_head is None:
            return list(found)
        return list(torch.split(self._lm_head(torch.cat(found)), [len(one) for one in found]))

    def _lag(self, sequence: Sequence) -> int:
        """Committed tokens that are not kept yet."""
        return len(sequence.tokens) - self._runner.length(self._requests[sequence].kv)

    @torch.inference_mode()
    def _keep(self, sequences: Seq[Sequence], end: int | None = None) -> None:
        """Keep rows of tokens up to ``end``, the last committed one by default."""
        stops = [(one, len(one.tokens) - 1 if end is None else end) for one in sequences]
        behind = [(one, stop, 0) for one, stop in stops if self._runner.length(self._requests[one].kv) < stop]
        if behind:
            self._run(behind, logits=False)

    def _run(self, batch: Seq[tuple[Sequence, int, int]], *, logits: bool) -> list[Tensor]:
        """One forward over rows that are kept: (sequence, where its tokens end, masks behind them).

        Logits of all rows, or the states that left the last layer.
        """
        spans = [(self._runner.length(self._requests[one].kv), stop, masks) for one, stop, masks in batch]
        tokens = [
            token
            for (one, _, _), (first, stop, _) in zip(batch, spans, strict=True)
            for token in one.tokens[first:stop]
        ]
        embedded = self.target.embed(torch.tensor(tokens)).to(self._mask)
        carried = self._carried([(one, *span) for (one, _, _), span in zip(batch, spans, strict=True)])
        rows, done = [], 0
        for (sequence, _, _), (first, stop, masks) in zip(batch, spans, strict=True):
            states = torch.cat([embedded[done : done + stop - first], self._mask.expand(masks, -1)])
            if carried is not None:
                where = list(range(done, done + stop - first))
                states = states + carried[[*where, *where[-1:] * masks]]
            done += stop - first
            rows.append(Rows(self._requests[sequence].kv, states, list(range(first, stop + masks))))
            self._forget(sequence)
        out = self._runner.run(rows, logits=logits)
        return [one.states if one.logits is None else one.logits.float() for one in out]

    def _carried(self, spans: Seq[tuple[Sequence, int, int, int]]) -> Tensor | None:
        """What the rows of tokens carry, (tokens, hidden), those of all sequences end to end; None: nothing."""
        if self._fusion is None:
            return None
        known: list[Tensor] = []
        places: list[int] = []
        count = 0
        for sequence, first, stop, _ in spans:
            states = self._requests[sequence].states
            for at in range(first, stop):
                if at in states:
                    known.append(states[at])
                    places.append(count)
                count += 1
        carried = torch.zeros(count, len(self._mask), device=self._mask.device)
        if known:
            carried[places] = self._fusion(torch.stack(known)).to(carried)
        return carried

    def _forget(self, sequence: Sequence) -> None:
        """Drop states that no row will carry again."""
        states = self._requests[sequence].states
        oldest = max(states, default=0) - RECENT
        for at in [at for at in states if at < oldest]:
            del states[at]

    def _cut(self, sequence: Sequence, length: int) -> None:
        """Give up what is kept of tokens from ``length`` on."""
        request = self._requests[sequence]
        if length < self._runner.length(request.kv):
            request.kv = self._runner.truncate(request.kv, length)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        if not self.aux_hidden_state_layers:
            return
        for sequence, part, verdict in zip(sequences, scores, verdicts, strict=True):
            # An answer that ended may have been cut short of the path; its last token has no state.
            path = verdict.path[: max(0, len(sequence.tokens) - part.length - 1)]
            rows = [0, *(1 + node for node in path)]
            self._learn(
                sequence,
                part.length - 1,
                torch.cat([part.hidden_states[layer][rows] for layer in self.aux_hidden_state_layers], -1),
            )
        self._keep([one for one in sequences if self._lag(one) > CATCH_UP])

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        request, count = self._requests[sequence], len(twin.tokens)
        kept = min(self._runner.length(request.kv), count - 1)
        states = {at: rows for at, rows in request.states.items() if at <= count}
        self._requests[twin] = _Request(self._runner.fork(request.kv, kept), states)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        super().rewind(sequence, kept)
        self._cut(sequence, kept)
        states = self._requests[sequence].states
        for at in [at for at in states if at > kept]:
            del states[at]

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        request = self._requests.pop(sequence, None)
        if request is not None:
            self._runner.close(request.kv)


class Pard2Settings(BaseModel):
    """Settings of ``pard2``."""

    model_config = ConfigDict(extra="forbid")

    width: int = Field(8, ge=1, le=64, description="candidates of a position; 1: a chain")
    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    depth: int = Field(8, ge=0, le=32, description="draft tokens on a path, where nodes are given")
    features: bool = Field(True, description="whether rows carry the target's states (target-dependent mode)")
    sampled: bool = Field(False, description="above temperature 0, a chain drawn from the rows instead of a tree")


@register(
    "pard2",
    family="trained",
    paper="An et al. 2026, arXiv 2605.08632",
    summary="Masks behind the last token: a small LM says all draft tokens in one forward, a tree of the likeliest.",
    when_to_use="Where a draft's forwards are dear, for it is always one. A chain of a drafter that sees its own "
    "tokens is "
    "accepted further.",
    aliases=("pard",),
    head="pard2",
    tiny={"nodes": 3, "depth": 2, "width": 2},
)
def build(context: Context, settings: Pard2Settings) -> Parts:
    """The parallel drafter that was named or is shipped, beside the target."""
    head = context.head("pard2")
    assert isinstance(head, Pard2)
    drafter = ParallelDraft(head, context.target, settings.width, features=settings.features, sampled=settings.sampled)
    controller: Controller = CostModel(context.target.costs, width=settings.width)
    if settings.nodes is not None:
        controller = Fixed(settings.depth, settings.width, settings.nodes)
    return Parts(drafter, controller)
