"""Untrained heads: certification drafts with them, and evaluation compares trained ones with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel
from torch import Tensor

from outpace.heads.base import Head, teacher_of
from outpace.heads.checkpoint import new_head
from outpace.heads.head_config import TargetFacts
from outpace.heads.kinds import find_kind, plan
from outpace.targets.base import Target

_MOST_TOKENS = 2048


def random_head(
    kinds: Seq[str],
    target: Target,
    *,
    seed: int = 0,
    vocabulary: int = _MOST_TOKENS,
    rank: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Head:
    """A tiny head of the first of ``kinds`` with large random weights, for a target of any size.

    Large: its drafts then depend on every token and state that it reads, which small weights would hide from a test.
    Its draft vocabulary is the last ``vocabulary`` tokens of the target. The target is not run.
    """
    facts = TargetFacts(
        name="any",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        fingerprint=[],
    )
    config = plan(find_kind(kinds[0]), facts, size="tiny", vocabulary=vocabulary, rank=rank, options=options)
    ids = torch.arange(target.vocab_size - config.vocabulary, target.vocab_size)
    with torch.random.fork_rng(devices=[]):
        head = new_head(config, target, ids, seed)
        torch.manual_seed(seed)
        for weight in head.parameters():
            if weight.requires_grad and weight.dim() >= 2:
                weight.data.normal_(std=weight.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


def other_choices(options: type[BaseModel]) -> dict[str, Any]:
    """Settings of a kind with every choice made otherwise than by default: switches, and values out of a list."""
    found: dict[str, Any] = {}
    for name, field in options.model_fields.items():
        if field.annotation is bool:
            found[name] = not field.get_default()
        elif get_origin(field.annotation) is Literal:
            found[name] = next(one for one in reversed(get_args(field.annotation)) if one != field.get_default())
    return found


def as_training_begins(head: Head, target: Target, seed: int = 0) -> Head:
    """The same head before its first training step: another network of its configuration and vocabulary."""
    ids: Tensor = head.draft_vocabulary.d2t.cpu()
    with torch.random.fork_rng(devices=[]):
        fresh = new_head(head.config, target, ids, seed)
        fresh.initialise(target, teacher_of(target, fresh, torch.device("cpu")))
    return fresh.eval().requires_grad_(False)
