"""HeadRunner: a head's decoder layers as they run beside a target, on the same kernels as the target's own.

Rows go in as states and come out as states and logits. Rows that are *kept* extend a sequence's K/V: what was
committed. Rows of *trees* see what was kept and the rows of their tree that they name, and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outpace.heads.blocks import DecoderLayer
from outpace.heads.head_config import HeadConfig
from outpace.targets.base import Target
from outpace.targets.branches import Begins, Branches
from outpace.targets.dense.decoder_spec import DecoderSpec, Entry, LayerSpec, Matrix
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from outpace.targets.rotary import angles
from outpace.targets.row_target import RowTarget


@dataclass(slots=True)
class Rows:
    """Rows of one sequence. ``states`` (n, hidden) enter the first layer, at ``positions`` (n).

    ``entry``: they are (n, inputs) and go through the DecoderSpec's entry first; all rows of a forward do, or none.
    ``tokens`` (n): whose embeddings layer 0 reads beside them, for layers that do. ``seen``: None for rows that are
    kept, each seeing what is before it; else for each row which rows of its tree it sees, itself among them, by index:
    the tree's earlier rows, whose K/V is ``old`` (what an earlier call gave back as ``side``), count first.
    ``old_positions``: theirs.
    """

    kv: Any
    states: Tensor
    positions: list[int]
    tokens: Seq[int] = ()
    seen: list[list[int]] | None = None
    old: Any = None
    old_positions: list[int] = field(default_factory=list)
    entry: bool = False


@dataclass(slots=True)
class Out:
    """The results of rows: ``states`` (n, hidden) as they left the last layer, before the final norm or behind it;
    ``logits`` (n, Vd); ``side``: K/V of the tree's old and new rows."""

    states: Tensor
    logits: Tensor | None
    side: Any


class _Seen:
    """A tree as a forward reads it: which rows see which."""

    def __init__(self, seen: list[list[int]], old: int) -> None:
        self._rows: list[list[int]] = [[] for _ in range(old)] + seen

    def seen(self) -> list[list[int]]:
        return self._rows

    def ancestor_mask(self) -> Tensor:
        mask = torch.zeros(len(self._rows), len(self._rows), dtype=torch.bool)
        for row, seen in enumerate(self._rows):
            mask[row, seen] = True
        return mask


class HeadRunner:
    """The layers of a DecoderSpec, beside ``target``: on the compiled kernels where that is, else in plain PyTorch.

    ``normed``: whether states come out behind the final norm.
    """

    def __init__(self, plan: DecoderSpec, target: Target, *, normed: bool = False) -> None:
        self._normed = normed
        self.inner: RowTarget = target.runner_for(plan) or GraphTarget(plan, embeddings_of=target)

    @property
    def device(self) -> torch.device:
        """The device that rows must be on."""
        return self.inner.device

    def open(self) -> Any:
        """K/V of a sequence of which nothing is kept."""
        return self.inner.open()

    def length(self, kv: Any) -> int:
        """How many rows are kept."""
        return self.inner.length(kv)

    def fork(self, kv: Any, length: int | None = None) -> Any:
        """An independent copy of the first ``length`` rows."""
        return self.inner.fork(kv, length)

    def truncate(self, kv: Any, length: int) -> Any:
        """The first ``length`` rows; ``kv`` itself must not be used again."""
        return self.inner.truncate(kv, length)

    def close(self, kv: Any) -> None:
        """Release it."""
        self.inner.close(kv)

    def put(self, kv: Any, keys_values: Tensor) -> None:
        """Keep rows whose K/V was made elsewhere: (layers, 2, kv_heads, n, head_size), keys turned already."""
        kv.take(keys_values, range(keys_values.shape[3]))

    def branches(self, begins: Begins) -> Branches | None:
        """What grows rows of drafts in one call a level; None where only :meth:`run` runs them."""
        return self.inner.branches(begins, normed=self._normed)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """What the final norm and the LM head alone make of states (n, hidden): (n, Vd)."""
        return self.inner.lm_head(states)

    @torch.inference_mode()
    def run(self, batch: Seq[Rows], *, logits: bool = True) -> list[Out]:
        """One forward over the rows of many sequences. Rows without ``seen`` are kept with it."""
        last = self.inner.num_layers
        plan, found = self._forward(batch, frozenset([last]), logits=logits)
        out = []
        for part in plan.parts:
            rows = slice(part.start, part.stop)
            out.append(Out(plan.hidden_states[last][rows], None if found is None else found[rows], part.side_kv))
        return out

    @torch.inference_mode()
    def keep(self, batch: Seq[Rows]) -> None:
        """Keep rows of which only the K/V is wanted: the compiled kernels run no more than that takes."""
        self._forward(batch, frozenset(), logits=False)

    def _forward(self, batch: Seq[Rows], wanted: frozenset[int], *, logits: bool) -> tuple[ForwardPlan, Tensor | None]:
        parts: list[SequenceRows] = []
        start = 0
        for one in batch:
            stop = start + len(one.states)
            tree: Any = None if one.seen is None else _Seen(one.seen, len(one.old_positions))
            positions = [*one.old_positions, *one.positions]
            parts.append(SequenceRows(one.kv, start, stop, positions, tree, one.old))
            start = stop
        plan = ForwardPlan(parts, 0, self.inner.num_layers, wanted=wanted, normed=self._normed)
        states = _joined([one.states for one in batch])
        if batch and batch[0].entry:
            plan.entry_inputs = states
        else:
            plan.states = states
        if batch and batch[0].tokens:
            plan.second = [token for one in batch for token in one.tokens]
        found = self.inner.run(plan, [0] * start, logits=logits)
        for one in batch:
            if one.seen is None:
                one.kv.advance(len(one.states))
        return plan, found


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def matrix_of(linear: nn.Linear, where: torch.device) -> Matrix:
    """A linear layer as a Matrix, on a device."""
    bias = None if linear.bias is None else linear.bias.detach().float().to(where)
    return Matrix(linear.weight.detach().float().to(where), bias)


def norm_of(module: nn.Module, where: torch.device) -> Matrix:
    """A norm's weights as a Matrix, on a device."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return Matrix(weight.detach().float().to(where))


def head_spec(
    config: HeadConfig,
    layers: Seq[DecoderLayer],
    *,
    rows: Tensor | None = None,
    final_norm: nn.RMSNorm | None = None,
    first_norms: Seq[nn.Module] | None = None,
    second_norm: nn.RMSNorm | None = None,
    entry: Entry | None = None,
    width: int = 0,
    device: torch.device | None = None,
) -> DecoderSpec:
    """The DecoderSpec of a head's layers.

    ``rows`` (Vd, hidden): its LM head, read behind ``final_norm``; None where only states are wanted.
    ``first_norms``: what stands before each layer's attention instead of its ``input_layernorm``. ``second_norm``: that
    of the second row, for a first layer whose attention reads two (its projections take the second row first).
    ``entry``: what rows that are not states yet go through.
    ``width``: of states that are not as wide as the head's, in runners without layers.
    """
    hidden = width or config.hidden_size
    where = device or torch.device("cpu")

    plans = []
    for index, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        norms = {"norm2": norm_of(layer.post_attention_layernorm, where)}
        first = layer.input_layernorm if first_norms is None else first_norms[index]
        if not isinstance(first, nn.Identity):
            norms["norm1"] = norm_of(first, where)
        if attention.norms:
            norms["query"], norms["key"] = norm_of(attention.q_norm, where), norm_of(attention.k_norm, where)
        plans.append(
            LayerSpec(
                query=matrix_of(attention.q_proj, where),
                key=matrix_of(attention.k_proj, where),
                value=matrix_of(attention.v_proj, where),
                out=matrix_of(attention.o_proj, where),
                gate=matrix_of(mlp.gate_proj, where),
                up=matrix_of(mlp.up_proj, where),
                down=matrix_of(mlp.down_proj, where),
                norms=norms,
            )
        )
    # Rows come as states: no embedding is read. Where there is no LM head either, something must stand there.
    stand_in = Matrix(torch.zeros(16, hidden, device=where))
    return DecoderSpec(
        layers=plans,
        hidden=hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        intermediate=config.intermediate,
        vocabulary=16 if rows is None else len(rows),
        activation="silu",
        epsilon=config.epsilon,
        attention_scale=config.head_size**-0.5,
        embedding=stand_in,
        lm_head=None if rows is None else Matrix(rows.detach().float().to(where)),
        final_norm=None if final_norm is None else norm_of(final_norm, where),
        rotations=[lambda positions: angles(positions, config.head_size, config.rope_theta)],
        context_length=config.context_length,
        context_note="",
        second_norm=None if second_norm is None else norm_of(second_norm, where),
        entry=entry,
        device=where,
    )
