"""What layouts share when a head is read: each finds a field or a map in what a folder holds, or says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.validation import validated
from outpace.heads.base import HeadConfig, TargetFacts, find_kind
from outpace.heads.checkpoint import distinct, facts
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.incompatible import CheckName, IncompatibleHead
from outpace.heads.layouts.files import CONFIG
from outpace.targets.base import Target

IGNORED = ("rotary_emb.", "verifier_lm_head.", "verifier_norm.")
"""Parts of tensors' names of which nothing is needed: recomputed, or the target's own."""


def refused(where: Path, what: str, check: CheckName = "configuration") -> IncompatibleHead:
    """The one line about a head that cannot be read."""
    return IncompatibleHead(f"the head at '{where}' {what}", check)


def same_size(name: str, theirs: object, ours: int, where: Path) -> None:
    """Raise BadInput for a head that was made for a target of another size."""
    if theirs != ours:
        raise refused(where, f"was made for another target: its {name} is {theirs}, this model's {ours}", "target")


def number(config: Mapping[str, Any], key: str, where: Path, default: Any = None, least: float = 1) -> Any:
    """A number of a configuration. Raises BadInput where it is missing or too small."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise refused(where, f"has no usable {key} in its {CONFIG}: {value}")
    return value


def layer_ids(config: Mapping[str, Any], key: str, where: Path, target: Target, shift: int = 0) -> tuple[int, ...]:
    """Tapped layers. Raises BadInput for what are none, or lie outside the target."""
    value = config.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(one, int) for one in value):
        raise refused(where, f"does not say which layers it reads: {key} is {value}", "layers")
    aux_hidden_state_layers = tuple(one + shift for one in value)
    outside = next((one for one in aux_hidden_state_layers if not 0 <= one <= target.num_layers), None)
    if outside is not None:
        raise refused(
            where, f"reads layer {outside - shift} ({key}); this model has {target.num_layers} layers", "layers"
        )
    return aux_hidden_state_layers


def decoder_shapes(config: Mapping[str, Any], target: Target, where: Path) -> dict[str, Any]:
    """The fields of a HeadConfig that describe its layers, from a configuration of transformers.

    Raises BadInput for another width or vocabulary than the target's, and for layers that heads here do not have.
    """
    hidden, vocabulary = number(config, "hidden_size", where), number(config, "vocab_size", where)
    for name, theirs, ours in (
        ("hidden size", hidden, target.hidden_size),
        ("vocabulary", vocabulary, target.vocab_size),
    ):
        if theirs != ours:
            raise refused(where, f"was made for another target: its {name} is {theirs}, this model's {ours}")
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


def options_of(kind: str, found: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """A kind's own settings, the others as they are when nobody asks. Raises BadInput for one beyond its bounds."""

    def refusal(key: str, reason: str) -> IncompatibleHead:
        return refused(where, f"is beyond what a {kind} head can be: {key}: {reason}")

    return validated(find_kind(kind).Options, found, refusal).model_dump()


def target_facts(target: Target, name: object) -> TargetFacts:
    """What is known of the target of a file without fingerprint: that it is taken for this one."""
    return facts(target, name if isinstance(name, str) and name else "unnamed")


def vocabulary(tensors: Mapping[str, Tensor], target: Target, where: Path) -> Tensor:
    """The target's id of each draft token (Vd,) long, from ``d2t`` (offsets) and ``t2d`` (which are among them).

    Without ``d2t``: all tokens. Raises BadInput for a map that leads outside, twice to a token, or contradicts itself.
    """
    if "d2t" not in tensors:
        return torch.arange(target.vocab_size)
    offsets = tensors["d2t"].long()
    if offsets.dim() != 1:
        raise refused(where, f"has a d2t of shape {tuple(offsets.shape)}, not a list", "vocabulary")
    ids, among = offsets + torch.arange(len(offsets)), tensors.get("t2d")
    known = None if among is None or among.shape != (target.vocab_size,) else among.bool()
    if known is not None and _leads_to(offsets, known) and not _leads_to(ids, known):
        raise refused(where, "has token ids in d2t where the layout has offsets (id minus position)", "vocabulary")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise refused(
            where, f"drafts tokens that this model does not have (d2t leads to {int(ids.max())})", "vocabulary"
        )
    if not distinct(ids):
        raise refused(where, "has two draft tokens for one of the model's (d2t)", "vocabulary")
    if among is not None and known is None:
        raise refused(
            where, f"has a t2d of shape {tuple(among.shape)}; this model has {target.vocab_size} tokens", "vocabulary"
        )
    if known is not None and not _leads_to(ids, known):
        raise refused(where, "has maps that contradict one another: d2t and t2d name different tokens", "vocabulary")
    return ids


def _leads_to(ids: Tensor, among: Tensor) -> bool:
    inside = bool(len(ids)) and 0 <= int(ids.min()) <= int(ids.max()) < len(among)
    return inside and distinct(ids) and bool(among[ids].all()) and int(among.sum()) == len(ids)


def lm_head(
    rows: Tensor | None, ids: Tensor, target: Target, where: Path, name: str = "lm_head.weight"
) -> dict[str, Tensor]:
    """``words.ids``, and ``words.rows`` where ``rows`` (Vd, hidden) are not what the target would lend."""
    if rows is None:
        return {"words.ids": ids}
    if tuple(rows.shape) != (len(ids), target.hidden_size):
        raise refused(
            where, f"has a tensor {name} of shape {tuple(rows.shape)}, not {(len(ids), target.hidden_size)}", "shapes"
        )
    lent = target.head_rows(ids).cpu()
    if torch.equal(lent.bfloat16(), rows.bfloat16()):
        return {"words.ids": ids}
    return {"words.ids": ids, "words.rows": rows}


def weight_names(config: HeadConfig) -> list[str]:
    """What outpace calls the weights of a head, its words apart."""
    with torch.device("meta"):
        words = DraftVocabulary(torch.arange(1), torch.zeros(1, config.hidden_size))
        head = find_kind(config.kind)(config.model_copy(update={"vocabulary": 1}), words)
    return [name for name in head.state_dict() if not name.startswith("words.")]


def renamed(
    called: Mapping[str, str], tensors: Mapping[str, Tensor], used: Iterable[str], where: Path
) -> dict[str, Tensor]:
    """Tensors by outpace's names, those that are there. Raises BadInput for one that nobody asks for.

    ``used``: names that have been read already.
    """
    rest = sorted(
        name for name in set(tensors) - set(called.values()) - set(used) if not any(part in name for part in IGNORED)
    )
    if rest:
        raise refused(where, f"has a tensor that its layout does not have: {rest[0]}", "keys")
    return {ours: tensors[theirs] for ours, theirs in called.items() if theirs in tensors}


def check_ids(ids: Tensor, target: Target, where: Path, name: str) -> Tensor:
    """Token ids (Vd,) long, each once and of this model. Raises BadInput for what is no such list."""
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
        raise refused(where, f"has a {name} that is no list of tokens", "vocabulary")
    if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise refused(where, f"drafts tokens that this model does not have ({name})", "vocabulary")
    if not distinct(ids):
        raise refused(where, f"has two draft tokens for one of the model's ({name})", "vocabulary")
    return ids.long()
