"""DFlash at decoding (Chen et al. 2026, arXiv 2602.06036): a small network drafts a block of tokens in one forward.

Each of its layers reads one key and one value of a committed token, which depend on the target's hidden states of that
token alone. They are computed once the target has run the token, for all layers by one product, and kept. A round then
runs the rows of the block and nothing else: the last committed token, and a mask for every token to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.drafting.marginals import FromMarginals, MarginalState
from outpace.heads.head_runner import HeadRunner, Rows, head_spec
from outpace.heads.lm_head import LmHead, Product
from outpace.methods.learned.dflash.network import DFlash
from outpace.methods.registry import Context
from outpace.targets.base import Sequence, Target
from outpace.targets.rotary import RotaryTable, angles, rotate


@dataclass(slots=True)
class DFlashState(MarginalState):
    """What it keeps of one request: ``kv``, of whose rows the i-th is of the token at position ``start + i``."""

    kv: Any = None
    start: int = 0


class ContextKV:
    """From the target's hidden states to keys and values of all layers: (layers, 2, kv_heads, n, head_size)."""

    def __init__(self, head: DFlash, target: Target) -> None:
        config = head.config
        attentions: list[Any] = [layer.self_attn for layer in head.layers]
        matrices = [linear.weight for one in attentions for linear in (one.k_proj, one.v_proj)]
        self._fuse = Product(config, head.fc.weight, target)
        self._project = Product(config, torch.cat(matrices), target, norm=head.hidden_norm)
        self._shape = (len(attentions), 2, config.kv_heads, config.head_size)
        self._norms = torch.stack([one.k_norm.weight.detach().float() for one in attentions]).to(self.device)[:, None]
        self._epsilon = config.epsilon
        rotation = partial(angles, head_size=config.head_size, theta=config.rope_theta)
        self._rotary = RotaryTable([rotation], self._norms, config.context_length)

    @property
    def device(self) -> torch.device:
        """Where states are wanted."""
        return self._fuse.device

    def __call__(self, states: Tensor, positions: Tensor, last: int) -> Tensor:
        """``states`` (n, layers * hidden), auxiliary layers side by side, at ``positions`` (n), of which none is after
        ``last``."""
        made = self._project(self._fuse(states.to(self.device).float())).view(-1, *self._shape)
        keys = made[:, :, 0]
        keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + self._epsilon) * self._norms
        made[:, :, 0] = rotate(keys, self._rotary.rows(positions, last)[0, :, :, None])
        return made.permute(1, 2, 3, 0, 4)


class DFlashDrafter(FromMarginals[DFlashState]):
    """Drafts from blocks: chains (``topk`` = 1) of likeliest or of drawn tokens, or trees of ``topk`` tokens a row."""

    def __init__(self, head: DFlash, target: Target, topk: int = 1, *, sampled: bool = False) -> None:
        super().__init__(head.draft_vocabulary.d2t, topk, sampled=sampled)
        self.target = target
        self.aux_hidden_state_layers = head.config.aux_hidden_state_layers
        self.most = head.longest_draft
        """Draft tokens of a block."""
        factored = head.draft_vocabulary.rank > 0
        layers: Any = head.layers
        rows, norm = (None, None) if factored else (head.draft_vocabulary.rows, head.norm)
        self._runner = HeadRunner(
            head_spec(head.config, layers, rows=rows, final_norm=norm, device=target.device), target
        )
        self._lm_head = LmHead(head, target, norm=head.norm) if factored else None
        self._context = ContextKV(head, target)
        self._causal: bool = head.options.causal
        self._seen = [row.nonzero()[:, 0].tolist() for row in head.seen()]
        self._masks = head.mask_embedding.detach().float().to(self._runner.device).expand(self.most, -1)

    def begin(self, sequence: Sequence) -> DFlashState:
        return DFlashState(sequence, self.calibration_of(sequence), kv=self._runner.open())

    def on_prefill(self, state: DFlashState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        states = torch.cat([hidden_states[layer] for layer in self.aux_hidden_state_layers], -1)
        self._keep([(state, position, states)])

    @torch.inference_mode()
    def _keep(self, found: Seq[tuple[DFlashState, int, Tensor]]) -> None:
        """Keep the context of tokens from a position on, by their hidden states: one product for all requests."""
        hidden = torch.cat([rows for _, _, rows in found]) if len(found) > 1 else found[0][2]
        positions = [at for _, start, rows in found for at in range(start, start + len(rows))]
        where = torch.tensor(positions, device=self._context.device)
        made = self._context(hidden, where, max(positions, default=0))
        first = 0
        for state, start, rows in found:
            self._cut(state, start)
            if self._end(state) != start:  # hidden states were left out: K/V before the gap cannot be used
                self._runner.close(state.kv)
                state.kv, state.start = self._runner.open(), start
            self._runner.put(state.kv, made[:, :, :, first : first + len(rows)])
            first += len(rows)

    def _end(self, state: DFlashState) -> int:
        """The first token of which nothing is kept."""
        return state.start + self._runner.length(state.kv)

    def _cut(self, state: DFlashState, length: int) -> None:
        """Forget tokens from ``length`` on."""
        if length < self._end(state):
            state.kv = self._runner.truncate(state.kv, max(0, length - state.start))

    @torch.inference_mode()
    def rows(self, states: Seq[DFlashState], depths: Seq[int]) -> list[Tensor | None]:
        logits: list[Tensor | None] = [None] * len(states)
        ready = [at for at, one in enumerate(states) if self._end(one) == len(one.sequence.tokens) - 1]
        if not ready:
            return logits
        tokens = torch.tensor([states[at].sequence.tokens[-1] for at in ready])
        embedded = self.target.embed(tokens).to(self._masks)
        batch = [
            self._block(states[at], row, depths[at]) for at, row in zip(ready, torch.split(embedded, 1), strict=True)
        ]
        out = self._runner.run(batch, logits=self._lm_head is None)
        if self._lm_head is None:
            found = [one.logits[1:] for one in out if one.logits is not None]
        else:
            rows = [one.states[1:] for one in out]
            found = list(torch.split(self._lm_head(torch.cat(rows)), [len(one) for one in rows]))
        for at, part in zip(ready, found, strict=True):
            logits[at] = part
        return logits

    def _block(self, state: DFlashState, embedded: Tensor, depth: int) -> Rows:
        """A whole block, as it was trained; of causal ones the rows that are wanted."""
        count = min(depth, self.most) if self._causal else self.most
        first = len(state.sequence.tokens) - 1
        rows = torch.cat([embedded, self._masks[:count]])
        return Rows(state.kv, rows, list(range(first, first + 1 + count)), seen=self._seen[: 1 + count])

    def observe_batch(self, states: Seq[DFlashState], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        layers = self.aux_hidden_state_layers
        if states:
            self._keep(
                [(s, v.scores.length - 1, v.hidden_states(layers)) for s, v in zip(states, verdicts, strict=True)]
            )

    def rewind(self, state: DFlashState, sequence: Sequence, kept: int) -> DFlashState:
        self._cut(state, min(kept, len(sequence.tokens) - 1))
        state.grown = None
        return state

    def end(self, state: DFlashState) -> None:
        self._runner.close(state.kv)


def head_of(context: Context) -> DFlash:
    """The head that was named or is shipped."""
    head = context.head("dflash")
    assert isinstance(head, DFlash)
    return head
