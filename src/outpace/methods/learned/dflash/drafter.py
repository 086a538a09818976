"""DFlash: a small network over the target's states drafts a block in one forward.

What the network's layers read of a committed token are a key and a value each, functions of the token's states alone.
They are made when the target has run the token, all layers' by one product, and kept beside the target's own K/V. A
round then runs the block's rows and nothing else: the last committed token, and a mask for every token to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.drafting.marginals import FromMarginals
from outpace.heads.blocks import turns
from outpace.heads.head_runner import HeadRunner, Rows, head_spec
from outpace.heads.lm_head import LmHead, Product
from outpace.methods.learned.dflash.network import DFlash
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target, TreeScores


@dataclass(slots=True)
class _Kept:
    """Keys and values of a request's tokens; row i is of the token at position ``start + i``."""

    kv: Any
    start: int = 0


class ContextKV:
    """From the target's states to what the network's layers read of them, (layers, 2, kv_heads, n, head_size)."""

    def __init__(self, head: DFlash, target: Target) -> None:
        config = head.config
        attentions: list[Any] = [layer.self_attn for layer in head.layers]
        matrices = [linear.weight for one in attentions for linear in (one.k_proj, one.v_proj)]
        self._fuse = Product(config, head.fc.weight, target)
        self._project = Product(config, torch.cat(matrices), target, norm=head.hidden_norm)
        self._shape = (len(attentions), 2, config.kv_heads, config.head_size)
        self._norms = torch.stack([one.k_norm.weight.detach().float() for one in attentions]).to(self.device)[:, None]
        self._config = config
        self._turns = turns(torch.arange(0), config.head_size, config.rope_theta)

    @property
    def device(self) -> torch.device:
        """Where states are wanted."""
        return self._fuse.device

    def __call__(self, states: Tensor, positions: Tensor, last: int) -> Tensor:
        """Of tokens' states, those of all taps side by side (n, taps * hidden), at ``positions`` (n) up to ``last``."""
        made = self._project(self._fuse(states.to(self.device).float())).view(-1, *self._shape)
        keys = made[:, :, 0]
        keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + self._config.epsilon) * self._norms
        cosines, sines = (one[positions][:, None, None] for one in self._up_to(last))
        first, second = keys.chunk(2, -1)
        made[:, :, 0] = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
        return made.permute(1, 2, 3, 0, 4)

    def _up_to(self, last: int) -> tuple[Tensor, Tensor]:
        """Rotations of positions up to ``last``, at least."""
        if len(self._turns[0]) <= last:
            positions = torch.arange(max(512, 2 * last), device=self.device)
            self._turns = turns(positions, self._config.head_size, self._config.rope_theta)
        return self._turns


class DFlashDrafter(FromMarginals):
    """Drafts blocks: chains (``k`` = 1) of their likeliest tokens or of draws, or trees of ``k`` candidates a row."""

    def __init__(self, head: DFlash, target: Target, k: int = 1, *, sampled: bool = False) -> None:
        super().__init__(head.draft_vocabulary.d2t, k, sampled=sampled)
        self.target = target
        self.aux_hidden_state_layers = head.config.aux_hidden_state_layers
        self.most: int = head.options.block - 1
        """Draft tokens of a block."""
        factored = head.draft_vocabulary.rank > 0
        device = getattr(target, "device", torch.device("cpu"))
        layers: Any = head.layers
        rows, norm = (None, None) if factored else (head.draft_vocabulary.rows, head.norm)
        self._runner = HeadRunner(head_spec(head.config, layers, rows=rows, final_norm=norm, device=device), target)
        self._lm_head = LmHead(head, target, norm=head.norm) if factored else None
        self._context = ContextKV(head, target)
        self._causal: bool = head.options.causal
        self._seen = [row.nonzero()[:, 0].tolist() for row in head.seen()]
        self._masks = head.mask_embedding.detach().float().to(self._runner.device).expand(self.most, -1)
        self._kept: dict[Sequence, _Kept] = {}

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._kept[sequence] = _Kept(self._runner.open())

    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        self._keep(
            [(sequence, position, torch.cat([hidden_states[layer] for layer in self.aux_hidden_state_layers], -1))]
        )

    @torch.inference_mode()
    def _keep(self, found: Seq[tuple[Sequence, int, Tensor]]) -> None:
        """Keep the context of tokens from a position on, by their states: one product for all sequences."""
        states = torch.cat([rows for _, _, rows in found]) if len(found) > 1 else found[0][2]
        positions = [at for _, start, rows in found for at in range(start, start + len(rows))]
        where = torch.tensor(positions, device=self._context.device)
        made = self._context(states, where, max(positions, default=0))
        first = 0
        for sequence, start, rows in found:
            kept = self._kept[sequence]
            self._cut(kept, start)
            if (
                kept.start + self._runner.length(kept.kv) != start
            ):  # states were left out: what is before is out of reach
                self._runner.close(kept.kv)
                kept.kv, kept.start = self._runner.open(), start
            self._runner.put(kept.kv, made[:, :, :, first : first + len(rows)])
            first += len(rows)

    def _cut(self, kept: _Kept, length: int) -> None:
        """Forget tokens from ``length`` on."""
        rows = max(0, length - kept.start)
        if rows < self._runner.length(kept.kv):
            kept.kv = self._runner.truncate(kept.kv, rows)

    @torch.inference_mode()
    def rows(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Tensor | None]:
        logits: list[Tensor | None] = [None] * len(sequences)
        ready = [at for at, one in enumerate(sequences) if self._is_complete(one)]
        if not ready:
            return logits
        tokens = torch.tensor([sequences[at].tokens[-1] for at in ready])
        embedded = self.target.embed(tokens).to(self._masks)
        batch = [
            self._block(sequences[at], row, depths[at]) for at, row in zip(ready, torch.split(embedded, 1), strict=True)
        ]
        out = self._runner.run(batch, logits=self._lm_head is None)
        for at, one in zip(ready, out, strict=True):
            logits[at] = one.logits[1:] if self._lm_head is None and one.logits is not None else one.states[1:]
        if self._lm_head is not None:
            said = self._lm_head(torch.cat([one.states[1:] for one in out]))
            parts = torch.split(said, [len(one.states) - 1 for one in out])
            for at, part in zip(ready, parts, strict=True):
                logits[at] = part
        return logits

    def _is_complete(self, sequence: Sequence) -> bool:
        kept = self._kept[sequence]
        return kept.start + self._runner.length(kept.kv) == len(sequence.tokens) - 1

    def _block(self, sequence: Sequence, embedded: Tensor, depth: int) -> Rows:
        """A whole block, as it was trained; of causal ones the rows that are wanted."""
        count = min(depth, self.most) if self._causal else self.most
        first = len(sequence.tokens) - 1
        states = torch.cat([embedded, self._masks[:count]])
        positions = list(range(first, first + 1 + count))
        return Rows(self._kept[sequence].kv, states, positions, seen=self._seen[: 1 + count])

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        found = []
        for sequence, part, verdict in zip(sequences, scores, verdicts, strict=True):
            # An answer that ended may have been cut short of the path; its last token has no state.
            path = verdict.path[: max(0, len(sequence.tokens) - part.length - 1)]
            rows = [0, *(1 + node for node in path)]
            chosen: Any = slice(0, len(rows)) if rows[-1] == len(path) else rows  # a chain's path is its first rows
            states = torch.cat([part.hidden_states[layer][chosen] for layer in self.aux_hidden_state_layers], -1)
            found.append((sequence, part.length - 1, states))
        if found:
            self._keep(found)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        kept = self._kept[sequence]
        rows = min(self._runner.length(kept.kv), max(0, len(twin.tokens) - 1 - kept.start))
        self._kept[twin] = _Kept(self._runner.fork(kept.kv, rows), kept.start)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        super().rewind(sequence, kept)
        self._cut(self._kept[sequence], min(kept, len(sequence.tokens) - 1))

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self._runner.close(kept.kv)


def head_of(context: Context) -> DFlash:
    """The head that was named or is shipped."""
    head = context.head("dflash")
    assert isinstance(head, DFlash)
    return head


class DFlashSettings(BaseModel):
    """Settings of ``dflash``."""

    model_config = ConfigDict(extra="forbid")

    length: int | None = Field(None, ge=0, le=63, description="draft tokens a round; by default what pays")
    sampled: bool = Field(
        True, description="above temperature 0, whether tokens are drawn from the rows; otherwise the likeliest"
    )


@register(
    "dflash",
    family="trained",
    paper="Chen et al. 2026, arXiv 2602.06036",
    summary="A few layers over the target's states fill in a block of masked tokens in one forward; a chain.",
    head="dflash",
    when_to_use="Where a draft's forwards are dear, for it is always one. "
    "Positions are said without knowing the ones between, so that long blocks need a well trained head.",
    tiny={"length": 2},
)
def build(context: Context, settings: DFlashSettings) -> Parts:
    """A chain from one block."""
    drafter = DFlashDrafter(head_of(context), context.target, sampled=settings.sampled)
    controller: Controller = CostModel(context.target.costs, drafter.most)
    if settings.length is not None:
        controller = Fixed(settings.length, nodes=settings.length)
    return Parts(drafter, controller)
