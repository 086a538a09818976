"""The kinds of heads by name, and the configuration of a new head of one kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from functools import cache
from typing import Any, TypeVar

import torch

from outpace.core.errors import BadInput
from outpace.core.names import unknown
from outpace.core.plugins import import_all
from outpace.core.validation import known_fields, validated
from outpace.heads.base import Head
from outpace.heads.blocks import Uninitialised
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, TargetFacts
from outpace.heads.incompatible import IncompatibleHead
from outpace.models.quiet import one_line

H = TypeVar("H", bound=type[Head])
_KINDS: dict[str, type[Head]] = {}


def kind(name: str) -> Callable[[H], H]:
    """Declare a kind of head."""

    def declare(head: H) -> H:
        head.kind = name
        _KINDS[name] = head
        return head

    return declare


@cache
def discover() -> None:
    """Import the learned methods: each declares its kind of head and the layouts that it is read from."""
    import_all("outpace.methods.learned")


def kinds() -> dict[str, type[Head]]:
    """Every kind of head by name."""
    discover()
    return dict(sorted(_KINDS.items()))


def find_kind(name: str) -> type[Head]:
    """The kind of this name. Raises BadInput with the known names."""
    if name not in kinds():
        raise unknown("kind of head", name, list(kinds()))
    return _KINDS[name]


def weight_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's own tensors by name, without those of its draft vocabulary; nothing is allocated.

    Raises IncompatibleHead for a configuration that describes no head of its kind.
    """
    try:
        with torch.device("meta"), Uninitialised():
            vocabulary = DraftVocabulary(torch.zeros(1, dtype=torch.long), torch.zeros(1, config.hidden_size))
            head = find_kind(config.kind)(config.model_copy(update={"vocabulary": 1, "rank": 0}), vocabulary)
    except (ValueError, RuntimeError, ArithmeticError, AssertionError) as error:  # pydantic's errors are ValueErrors
        what = f"a configuration that describes no {config.kind} head ({one_line(error)})"
        raise IncompatibleHead(what, "configuration") from error
    return {name: tuple(value.shape) for name, value in head.own_weights().items()}


def plan(
    head: type[Head],
    facts: TargetFacts,
    *,
    size: str = "base",
    vocabulary: int = 0,
    rank: int = 0,
    options: Mapping[str, Any] | None = None,
    aux_hidden_state_layers: Seq[int] = (),
) -> HeadConfig:
    """The configuration of a new head of one kind. Raises BadInput for options and layers that do not exist."""

    def refusal(key: str, reason: str) -> BadInput:
        return BadInput(f"head '{head.kind}', setting '{key}': {reason} (settings: {known_fields(head.Options)})")

    settings = validated(head.Options, options or {}, refusal)
    chosen = tuple(aux_hidden_state_layers) or head.aux_layers_of(facts.num_layers, settings)
    outside = next((layer for layer in chosen if not 0 <= layer <= facts.num_layers), None)
    if outside is not None:
        raise BadInput(f"layer {outside} does not exist: the target has {facts.num_layers} layers")
    return HeadConfig(
        kind=head.kind,
        target=facts,
        aux_hidden_state_layers=chosen,
        vocabulary=min(vocabulary or facts.vocab_size, facts.vocab_size),
        rank=rank,
        layers=head.depth_of(settings),
        rank_accuracies=(),
        options=settings.model_dump(),
        **head.shapes_of(facts.hidden_size, size, settings),
    )
