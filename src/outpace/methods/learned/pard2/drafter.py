"""PARD-2 at decoding (An et al. 2026, arXiv 2605.08632): masks after the last token, filled in by one forward.

A round runs a small LM over the tokens that were committed since the round before (the last of them is the anchor) and
a mask for every further position. All of it is one causal chunk: the masks see the text and the masks before them.
Their keys and values are dropped at once, those of the tokens are kept.

With ``features`` each row carries the target's hidden states of the token before its own, and masks carry the anchor's;
without, the same drafter reads nothing of the target. A row whose hidden states are not known carries
none: that of a request's first token, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.drafting.marginals import FromMarginals, MarginalState
from outpace.heads.head_runner import HeadRunner, Rows, head_spec
from outpace.heads.lm_head import LmHead, Product
from outpace.methods.learned.pard2.network import Pard2
from outpace.targets.base import Sequence, Target

CATCH_UP = 16
"""So many committed tokens at most run in one forward with the masks; more run in a forward of their own before."""
RECENT = 32
"""Hidden states that are kept after their use, for requests that are rewound by a few tokens."""


@dataclass(slots=True)
class Pard2State(MarginalState):
    """What it keeps of one request: ``kv`` of the first committed tokens.

    ``carried[j]``, (layers * hidden): the target's hidden states of token j - 1, which the row of token j carries.
    """

    kv: Any = None
    carried: dict[int, Tensor] = field(default_factory=dict)

    def put(self, position: int, states: Tensor) -> None:
        """Hidden states (n, layers * hidden) of the tokens from ``position`` on."""
        self.carried.update(enumerate(states, start=position + 1))

    def forget_old(self) -> None:
        """Drop hidden states that no row will carry again."""
        oldest = max(self.carried, default=0) - RECENT
        for at in [at for at in self.carried if at < oldest]:
            del self.carried[at]


class Fusion:
    """From the target's hidden states to what a row carries: each layer's normed, side by side through one product."""

    def __init__(self, head: Pard2, target: Target) -> None:
        norms: list[Any] = list(head.fc_norm)
        weights = torch.cat([norm.weight.detach().float() for norm in norms])
        self._product = Product(head.config, head.fc.weight.detach().float() * weights, target)
        self._layers, self._epsilon = len(norms), head.config.epsilon

    @property
    def device(self) -> torch.device:
        """Where states are wanted."""
        return self._product.device

    def __call__(self, states: Tensor) -> Tensor:
        """(n, layers * hidden) to (n, hidden)."""
        apart = states.to(self.device).float().view(len(states), self._layers, -1)
        normed = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + self._epsilon)
        return self._product(normed.flatten(1))


class Pard2Drafter(FromMarginals[Pard2State]):
    """Drafts chains (``topk`` = 1) or trees of ``topk`` candidates a position from one forward.

    ``features``: whether rows carry the target's hidden states. ``sampled``: as for FromMarginals.
    """

    def __init__(
        self, head: Pard2, target: Target, topk: int = 1, *, features: bool = True, sampled: bool = False
    ) -> None:
        super().__init__(head.draft_vocabulary.d2t, topk, sampled=sampled)
        self.target = target
        self.aux_hidden_state_layers = head.config.aux_hidden_state_layers if features else ()
        self.most: int = head.options.ahead
        """Draft tokens of one forward."""
        factored = head.draft_vocabulary.rank > 0
        layers: Any = list(head.layers)
        rows, norm = (None, None) if factored else (head.draft_vocabulary.rows, head.norm)
        self._runner = HeadRunner(
            head_spec(head.config, layers, rows=rows, final_norm=norm, device=target.device), target
        )
        self._lm_head = LmHead(head, target, norm=head.norm) if factored else None
        self._fusion = Fusion(head, target) if features else None
        self._mask = head.mask.detach().float().to(self._runner.device)

    def begin(self, sequence: Sequence) -> Pard2State:
        return Pard2State(sequence, self.calibration_of(sequence), kv=self._runner.open())

    def on_prefill(self, state: Pard2State, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        states = torch.cat([hidden_states[layer] for layer in self.aux_hidden_state_layers], -1)
        state.put(position, states)
        self._keep([state], min(position + 1 + len(states), len(state.sequence.tokens) - 1))

    @torch.inference_mode()
    def rows(self, states: Seq[Pard2State], depths: Seq[int]) -> list[Tensor | None]:
        self._keep([one for one in states if self._lag(one) > CATCH_UP])
        batch, anchors = [], []
        for state, depth in zip(states, depths, strict=True):
            # The last token always runs, for its logits; its K/V may be there from a round without verdict.
            self._cut(state, len(state.sequence.tokens) - 1)
            anchors.append(self._lag(state) - 1)
            batch.append((state, len(state.sequence.tokens), min(depth, self.most) - 1))
        ran = self._runner.run(self._laid(batch), logits=self._lm_head is None)
        out = [one.states if one.logits is None else one.logits.float() for one in ran]
        for state, end, _ in batch:
            self._cut(state, end)  # the K/V of the masks
        found = [one[anchor:] for one, anchor in zip(out, anchors, strict=True)]
        if self._lm_head is None:
            return list(found)
        return list(torch.split(self._lm_head(torch.cat(found)), [len(one) for one in found]))

    def _lag(self, state: Pard2State) -> int:
        """Committed tokens that are not kept yet."""
        return len(state.sequence.tokens) - self._runner.length(state.kv)

    @torch.inference_mode()
    def _keep(self, states: Seq[Pard2State], end: int | None = None) -> None:
        """Keep rows of tokens up to ``end``, the last committed one by default."""
        stops = [(one, len(one.sequence.tokens) - 1 if end is None else end) for one in states]
        behind = [(one, stop, 0) for one, stop in stops if self._runner.length(one.kv) < stop]
        if behind:
            self._runner.keep(self._laid(behind))

    def _laid(self, batch: Seq[tuple[Pard2State, int, int]]) -> list[Rows]:
        """The rows that a forward keeps: (request, where its tokens end, masks behind them)."""
        spans = [(one, self._runner.length(one.kv), stop, masks) for one, stop, masks in batch]
        tokens = [token for one, first, stop, _ in spans for token in one.sequence.tokens[first:stop]]
        embedded = self.target.embed(torch.tensor(tokens)).to(self._mask)
        carried = self._carried([(one, at) for one, first, stop, _ in spans for at in range(first, stop)])
        rows, done = [], 0
        for one, first, stop, masks in spans:
            entering = torch.cat([embedded[done : done + stop - first], self._mask.expand(masks, -1)])
            if carried is not None:
                where = list(range(done, done + stop - first))
                entering = entering + carried[[*where, *where[-1:] * masks]]
            done += stop - first
            rows.append(Rows(one.kv, entering, list(range(first, stop + masks))))
            one.forget_old()
        return rows

    def _carried(self, places: list[tuple[Pard2State, int]]) -> Tensor | None:
        """What the rows of tokens at these places carry, (places, hidden); None: nothing."""
        if self._fusion is None:
            return None
        known = [row for row, (one, at) in enumerate(places) if at in one.carried]
        carried = torch.zeros(len(places), len(self._mask), device=self._mask.device)
        if known:
            states = torch.stack([places[row][0].carried[places[row][1]] for row in known])
            carried[known] = self._fusion(states).to(carried)
        return carried

    def _cut(self, state: Pard2State, length: int) -> None:
        """Give up what is kept of tokens from ``length`` on."""
        if length < self._runner.length(state.kv):
            state.kv = self._runner.truncate(state.kv, length)

    def observe_batch(self, states: Seq[Pard2State], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        if self.aux_hidden_state_layers:
            for state, verdict in zip(states, verdicts, strict=True):
                state.put(verdict.scores.length - 1, verdict.hidden_states(self.aux_hidden_state_layers))
            self._keep([one for one in states if self._lag(one) > CATCH_UP])

    def rewind(self, state: Pard2State, sequence: Sequence, kept: int) -> Pard2State:
        self._cut(state, kept)
        state.carried = {at: rows for at, rows in state.carried.items() if at <= kept}
        state.grown = None
        return state

    def end(self, state: Pard2State) -> None:
        self._runner.close(state.kv)
