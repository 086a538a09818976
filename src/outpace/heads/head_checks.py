"""The checks of a stored head, in one list: loading stops at the first that fails, ``validate-head`` reports all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from outpace.heads.base import Head
from outpace.heads.blocks import Uninitialised
from outpace.heads.draft_vocabulary import DraftVocabulary, map_problem
from outpace.heads.fingerprint import ALIKE, cosines, probe
from outpace.heads.head_config import CONFIG, HeadConfig
from outpace.heads.incompatible import CheckName, IncompatibleHead
from outpace.heads.kinds import find_kind, weight_shapes
from outpace.heads.layouts.base import D2T, ROWS, StoredHead
from outpace.targets.base import Target

LM_HEADS_ALIKE = 0.5
"""Cosine of LM heads below which they are not of one model: training moves a copy of the target's by little."""
_ROOM = 2**22
"""Weights by which a described head may exceed the stored one and still be built, to name what is missing."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_OTHER_WEIGHTS = "was made for other weights than this model's"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    ``problems``: what is wrong, as predicates of "the head ..."; ``fine``: what was found where nothing is wrong.
    ``loads``: outpace drafts with the head all the same, though other engines may not.
    """

    check: CheckName
    problems: list[str] = field(default_factory=list)
    fine: str = ""
    loads: bool = False


def examine(stored: StoredHead, target: Target) -> tuple[list[Finding], Head | None]:
    """All checks that can be made without decoding, and the head, its weights not yet loaded.

    After a target of another size, a wrong vocabulary map or a configuration that describes no head the other checks
    cannot be made; there is no head then.
    """
    found = [_sizes(stored.config, target)]
    if not found[-1].problems:
        found.append(_map(stored, target))
    if found[-1].problems:
        return found, None
    d2t = stored.tensors[D2T].long()
    lent = target.lm_head_rows(d2t).float().cpu()
    found += [_order(d2t), _weights_alike(stored, lent, target), _layers(stored.config, target)]
    rows = stored.tensors.get(ROWS)
    own = rows is not None and not torch.equal(lent.bfloat16(), rows.bfloat16())
    try:
        described = sum(map(prod, weight_shapes(stored.config).values()))
    except IncompatibleHead as error:
        return [*found, Finding("configuration", [f"has {error}"])], None
    there = sum(value.numel() for value in stored.tensors.values())
    if described > 4 * there + _ROOM:  # what is missing would be allocated before it is named
        problem = f"has a {CONFIG} that describes {described:,} weights, and holds {there:,}"
        return [*found, Finding("shapes", [problem])], None
    with Uninitialised():
        vocabulary = DraftVocabulary(d2t, lent, rank=stored.config.rank, own=own)
        head = find_kind(stored.config.kind)(stored.config, vocabulary)
    return [*found, *_tensors(stored, {name: tuple(value.shape) for name, value in head.state_dict().items()})], head


def _sizes(config: HeadConfig, target: Target) -> Finding:
    theirs = config.target
    problems = [
        f"(for {theirs.name}) was made for another target: its {name} is {its}, this model's {ours}"
        for name, its, ours in (
            ("hidden size", theirs.hidden_size, target.hidden_size),
            ("vocabulary", theirs.vocab_size, target.vocab_size),
            ("number of layers", theirs.num_layers, target.num_layers),
        )
        if its != ours
    ]
    fine = f"hidden size {theirs.hidden_size}, vocabulary {theirs.vocab_size}, {theirs.num_layers} layers"
    return Finding("target", problems, fine)


def _map(stored: StoredHead, target: Target) -> Finding:
    count, d2t = stored.config.vocabulary, stored.tensors.get(D2T)
    if d2t is None or d2t.shape != (count,) or not count or d2t.is_floating_point():
        problem: str | None = f"lacks a vocabulary map of {count} tokens"
    else:
        problem = map_problem(d2t, target.vocab_size)
    problems = [] if problem is None else [f"{problem} ({stored.name(D2T)})"]
    return Finding("vocabulary", problems, f"{count} of {target.vocab_size} tokens")


def _order(d2t: Tensor) -> Finding:
    sorted_ = bool((d2t[1:] > d2t[:-1]).all())
    problem = "has draft tokens that are not in the order of their ids, which engines that mark them (t2d) rely on"
    return Finding("vocabulary", [] if sorted_ else [problem], loads=True)


def _weights_alike(stored: StoredHead, lent: Tensor, target: Target) -> Finding:
    """Whether the target's weights are those that the head was made for, as far as the folder tells."""
    if stored.fingerprint is not None:
        embeddings, states = cosines(stored.fingerprint, probe(target))
        problem = f"{_OTHER_WEIGHTS}, though the sizes agree; train one for this model (outpace train)"
        fine = f"embeddings: cosine {embeddings:.4f}, states: {states:.4f} ({ALIKE} and more is the same model)"
        return Finding("fingerprint", [] if min(embeddings, states) >= ALIKE else [problem], fine)
    if stored.embedding is not None:
        return _embeddings_alike(stored.embedding, stored.masked, target)
    if stored.lm_head is not None and stored.lm_head.shape == lent.shape:
        cosine = _cosine(stored.lm_head, lent)
        problem = f"{_OTHER_WEIGHTS}: its LM head and the model's have cosine {cosine:.3f}"
        return Finding("fingerprint", [] if cosine >= LM_HEADS_ALIKE else [problem], f"LM heads: cosine {cosine:.4f}")
    return Finding("fingerprint", fine="the file has no embedding to tell")


def _embeddings_alike(embedding: Tensor, masked: int | None, target: Target) -> Finding:
    shape = (target.vocab_size, target.hidden_size)
    if tuple(embedding.shape) != shape:
        return Finding("shapes", [f"has a tensor embed_tokens of shape {tuple(embedding.shape)}, not {shape}"])
    tokens = torch.arange(target.vocab_size)
    if masked is not None:
        tokens = tokens[tokens != masked]
    tokens = tokens[:: max(1, len(tokens) // 4096)]
    cosine = _cosine(embedding[tokens], target.embed(tokens).cpu())
    problem = (
        f"{_OTHER_WEIGHTS}, or with an embedding of its own, which is not read: its embed_tokens and the model's have "
        f"cosine {cosine:.3f}"
    )
    return Finding("fingerprint", [] if cosine >= ALIKE else [problem], f"embeddings: cosine {cosine:.4f}")


def _cosine(one: Tensor, other: Tensor) -> float:
    one, other = one.float(), other.float()
    return float((one * other).sum() / (one.norm() * other.norm()).clamp_min(1e-12))


def _layers(config: HeadConfig, target: Target) -> Finding:
    layers = config.aux_hidden_state_layers
    problems = [
        f"reads layer {one}; this model has {target.num_layers} layers"
        for one in layers
        if not 0 <= one <= target.num_layers
    ]
    fine = f"states entering layers {', '.join(map(str, layers))}" if layers else "none: it reads tokens alone"
    return Finding("layers", problems, fine)


def _tensors(stored: StoredHead, expected: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    """``expected``: the shapes of all tensors that the head has."""
    name, tensors = stored.name, stored.tensors
    missing = [f"lacks tensor {name(one)}" for one in expected if one not in tensors]
    unknown = [one for one in sorted(tensors) if one not in expected and one != ROWS]  # rows that the target lends
    missing += [f"has a tensor that its kind does not know: {name(one)}" for one in unknown]
    yield Finding("keys", missing, "every tensor that its kind has, and no other")
    wrong = [
        f"has a tensor {name(one)} of shape {tuple(tensors[one].shape)}, not {shape}"
        for one, shape in expected.items()
        if one in tensors and tuple(tensors[one].shape) != shape
    ]
    yield Finding("shapes", wrong, "as its configuration says")
    endless = [
        f"has a tensor {name(one)} with numbers that are not finite"
        for one, value in tensors.items()
        if not bool(value.isfinite().all())
    ]
    count = sum(value.numel() for one, value in tensors.items() if one != D2T)
    yield Finding("numbers", endless, f"{count:,} weights, all finite")
    odd = [
        f"has a tensor {name(one)} of {value.dtype}"
        for one, value in tensors.items()
        if one != D2T and value.dtype not in _FLOATS
    ]
    yield Finding("numbers", odd, loads=True)
