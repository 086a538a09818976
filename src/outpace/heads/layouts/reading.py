"""What layouts share when a head is read: each finds a field or a map in what a folder holds, or says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.validation import validated
from outpace.heads.checkpoint import facts
from outpace.heads.draft_vocabulary import map_problem
from outpace.heads.head_config import CONFIG, HeadConfig, TargetFacts
from outpace.heads.incompatible import CheckName, IncompatibleHead
from outpace.heads.kinds import find_kind, weight_shapes
from outpace.targets.base import Target

IGNORED = ("rotary_emb.", "verifier_lm_head.", "verifier_norm.")
"""Parts of names of tensors that are not needed: recomputed, or the target's own."""


def refused(where: Path, what: str, check: CheckName = "configuration") -> IncompatibleHead:
    """The one line about a head that cannot be read."""
    return IncompatibleHead(f"the head at '{where}' {what}", check)


def same_size(name: str, theirs: object, ours: int, where: Path) -> None:
    """Raise IncompatibleHead for a head that was made for a target of another size."""
    if theirs != ours:
        raise refused(where, f"was made for another target: its {name} is {theirs}, this model's {ours}", "target")


def number(config: Mapping[str, Any], key: str, where: Path, default: Any = None, least: float = 1) -> Any:
    """A number of a configuration. Raises IncompatibleHead where it is missing or below ``least``."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise refused(where, f"has no usable {key} in its {CONFIG}: {value}")
    return value


def layer_ids(config: Mapping[str, Any], key: str, where: Path, shift: int = 0) -> tuple[int, ...]:
    """The layers whose input a head reads. ``shift``: 1 where the file names layers by their output.

    Raises IncompatibleHead for what is no list of layers.
    """
    value = config.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(one, int) for one in value):
        raise refused(where, f"does not say which layers it reads: {key} is {value}", "layers")
    return tuple(one + shift for one in value)


def decoder_shapes(config: Mapping[str, Any], target: Target, where: Path) -> dict[str, Any]:
    """The fields of a HeadConfig that describe its layers, from a configuration of transformers.

    Raises IncompatibleHead for another width or vocabulary than the target's, and for layers that heads here do not
    have.
    """
    hidden, vocabulary = number(config, "hidden_size", where), number(config, "vocab_size", where)
    same_size("hidden size", hidden, target.hidden_size, where)
    same_size("vocabulary", vocabulary, target.vocab_size, where)
    if config.get("target_hidden_size") not in (None, hidden):
        raise refused(where, "is of another width than its target, which is not read")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotation = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    for what, value, usual in (
        ("activation", config.get("hidden_act", "silu"), "silu"),
        ("rotary embedding", rotation, "default"),
        ("attention_bias", bool(config.get("attention_bias")), False),
        ("mlp_bias", bool(config.get("mlp_bias")), False),
    ):
        if value != usual:
            raise refused(where, f"has {what} {value}, which is not read ({usual} is)")
    heads = number(config, "num_attention_heads", where)
    theta = config.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, Mapping) else None)
    return {
        "layers": number(config, "num_hidden_layers", where, 1),
        "intermediate": number(config, "intermediate_size", where),
        "heads": heads,
        "kv_heads": number(config, "num_key_value_heads", where, heads),
        "head_size": number(config, "head_dim", where, hidden // heads),
        "epsilon": float(number(config, "rms_norm_eps", where, 1e-6, 0)),
        "rope_theta": float(number({}, "rope_theta", where, theta or 10000.0)),
        "context_length": number(config, "max_position_embeddings", where, 8192),
    }


def head_config(where: Path, **fields: Any) -> HeadConfig:
    """The configuration of a head. Raises IncompatibleHead for fields that no head can have."""
    return validated(HeadConfig, fields, lambda key, reason: refused(where, f"has an unusable {key}: {reason}"))


def options_of(kind: str, found: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """A kind's own settings, those that the file does not have by default. Raises IncompatibleHead beyond bounds."""

    def refusal(key: str, reason: str) -> IncompatibleHead:
        return refused(where, f"is beyond what a {kind} head can be: {key}: {reason}")

    return validated(find_kind(kind).Options, found, refusal).model_dump()


def target_facts(target: Target, name: object) -> TargetFacts:
    """The target of a file without fingerprint: it is taken to be this one."""
    return facts(target, name if isinstance(name, str) and name else "unnamed")


def vocabulary(tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Target, where: Path) -> Tensor:
    """The target's id of each draft token (Vd,) long, from ``d2t`` (offsets) and ``t2d`` (a mask over V).

    Without ``d2t``: all tokens. Raises IncompatibleHead for maps that contradict one another or ``draft_vocab_size``.
    """
    if "d2t" not in tensors:
        ids = torch.arange(target.vocab_size)
    else:
        offsets, marked = tensors["d2t"].long(), tensors.get("t2d")
        if offsets.dim() != 1:
            raise refused(where, f"has a d2t of shape {tuple(offsets.shape)}, not a list", "vocabulary")
        ids = offsets + torch.arange(len(offsets))
        if marked is not None and not torch.equal(ids.sort().values, marked.flatten().nonzero()[:, 0]):
            problem = _contradiction(offsets, ids, marked, target)
            if problem is not None:
                raise refused(where, problem, "vocabulary")
    if config.get("draft_vocab_size") not in (None, len(ids)):
        said = f"has a d2t of {len(ids)} tokens; its configuration says {config['draft_vocab_size']}"
        raise refused(where, said, "vocabulary")
    return ids


def _contradiction(offsets: Tensor, ids: Tensor, marked: Tensor, target: Target) -> str | None:
    if marked.shape != (target.vocab_size,):
        return f"has a t2d of shape {tuple(marked.shape)}; this model has {target.vocab_size} tokens"
    if torch.equal(offsets.sort().values, marked.nonzero()[:, 0]):
        return "has token ids in d2t where the layout has offsets (id minus position)"
    if len(ids) and map_problem(ids, target.vocab_size) is None:
        return "has maps that contradict one another: d2t and t2d name different tokens"
    return None  # the map is wrong by itself, which the checks of every head find


def weight_names(config: HeadConfig, where: Path) -> list[str]:
    """The names of a head's own tensors. Raises IncompatibleHead for a configuration that describes none."""
    try:
        return list(weight_shapes(config))
    except IncompatibleHead as error:
        raise refused(where, f"has {error}") from error


def renamed(
    called: Mapping[str, str], tensors: Mapping[str, Tensor], used: Iterable[str], where: Path
) -> dict[str, Tensor]:
    """Tensors by outpace's names, those that are there. Raises IncompatibleHead for one that is not asked for.

    ``called``: the file's name of each; ``used``: names that are read elsewhere.
    """
    rest = sorted(
        name for name in set(tensors) - set(called.values()) - set(used) if not any(part in name for part in IGNORED)
    )
    if rest:
        raise refused(where, f"has a tensor that its layout does not have: {rest[0]}", "keys")
    return {ours: tensors[theirs] for ours, theirs in called.items() if theirs in tensors}
