"""A draft LM that begins as a part of its target: some of its layers, and of their MLPs the neurons that matter most.

Layers are taken evenly from the first to the last. A neuron of a gated MLP is one row of the gate, one of the up
projection and one column of the down projection; how much it can add is bounded by the product of their norms, and
those of the largest products stay, in the order in which they were.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from outpace.heads.blocks import DecoderLayer
from outpace.heads.head_config import HeadConfig
from outpace.targets.dense.decoder_spec import DecoderSpec, LayerSpec
from outpace.targets.rotary import angles

_OWN = {"norm1", "norm2"}
"""The norms of our layers; a layer that has others computes something else."""


def even(count: int, of: int) -> list[int]:
    """``count`` of ``of`` layers, evenly, the first and the last among them; fewer where there are fewer."""
    return [round(float(at)) for at in torch.linspace(0, of - 1, min(count, of))]


def important(layer: LayerSpec, count: int) -> Tensor:
    """The ``count`` neurons of a layer's MLP that can add most, ascending: (count,) long."""
    size = layer.gate.weight.float().norm(dim=1) * layer.up.weight.float().norm(dim=1)
    size = size * layer.down.weight.float().norm(dim=0)
    chosen: Tensor = size.argsort(descending=True, stable=True)[:count].sort().values
    return chosen


def fits(plan: DecoderSpec, config: HeadConfig) -> bool:
    """Whether layers of the target compute what layers of the head do, at the same sizes but that of the MLP."""
    same = (plan.hidden, plan.heads, plan.kv_heads, plan.head_size) == (
        config.hidden_size,
        config.heads,
        config.kv_heads,
        config.head_size,
    )
    linear = all(
        one.bias is None
        for layer in plan.layers
        for one in (layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down)
    )
    scaled = plan.attention_scale == config.head_size**-0.5 and not plan.softcap and plan.embedding_scale == 1.0
    return (
        same and linear and scaled and plan.activation == "silu" and all(set(one.norms) == _OWN for one in plan.layers)
    )


@torch.no_grad()
def take_layers(plan: DecoderSpec, config: HeadConfig, layers: Seq[DecoderLayer], norm: nn.RMSNorm) -> list[int]:
    """Fill ``layers`` and the final ``norm`` from the target; returns which of its layers were taken.

    None where they do not fit. Rotary embeddings turn as fast as the target's from then on, and ``config`` says so.
    """
    theta = plain_theta(plan)
    if not theta or not fits(plan, config):
        return []
    chosen = even(len(layers), len(plan.layers))
    config.rope_theta, config.epsilon = theta, plan.epsilon
    own: Any
    for layer, index in zip(layers, chosen, strict=False):
        source = plan.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        attention.theta = theta
        for linear, matrix in (
            (attention.q_proj, source.query),
            (attention.k_proj, source.key),
            (attention.v_proj, source.value),
            (attention.o_proj, source.out),
        ):
            linear.weight.copy_(matrix.weight)
        neurons = important(source, config.intermediate)
        for linear, matrix in ((mlp.gate_proj, source.gate), (mlp.up_proj, source.up)):
            linear.weight[: len(neurons)] = matrix.weight[neurons].to(linear.weight)
        mlp.down_proj.weight.zero_()  # neurons that the target does not have add nothing at first
        mlp.down_proj.weight[:, : len(neurons)] = source.down.weight[:, neurons].to(mlp.down_proj.weight)
        for own, name in ((layer.input_layernorm, "norm1"), (layer.post_attention_layernorm, "norm2")):
            own.weight.copy_(source.norms[name].weight)
            own.eps = plan.epsilon
    if plan.final_norm is not None:
        norm.weight.copy_(plan.final_norm.weight)
        norm.eps = plan.epsilon
    return chosen


def plain_theta(plan: DecoderSpec) -> float:
    """The base of the target's rotary embedding; 0 where it is not a plain one."""
    half = plan.head_size // 2
    if len(plan.rotations) != 1 or half < 2:
        return 0.0
    where = torch.arange(8)
    turn = plan.rotations[0]
    cosines, sines = turn(where)
    speed = float(torch.atan2(sines[1, 1].double(), cosines[1, 1].double()))
    theta = float(f"{speed**-half:.4g}")
    plain = angles(where, plan.head_size, theta)
    alike = sines.shape == plain[1].shape and torch.allclose(sines.cpu(), plain[1], atol=1e-3)
    return theta if alike else 0.0
