"""Head: the network of a learned drafter. What it needs to know of its target, and what training asks of it.

A head is a torch module that is trained on the target's own text and hidden states. It borrows the target's embedding
and the LM-head rows of the tokens that it may draft (:mod:`outpace.heads.draft_vocabulary`); what it learns is its own.

Adding a kind: a subclass with its ``Options``, in a module of this package, decorated with :func:`kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from outpace.core.errors import BadInput
from outpace.core.plugins import import_all
from outpace.core.validation import known_fields, validated
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.losses import TeacherTargets
from outpace.targets.base import Target

SIZES = {"tiny": 0.25, "small": 0.5, "base": 1.0, "large": 2.0}
"""The dial for size: how wide an MLP is, as a share of the usual 8/3 of the hidden size."""


class TargetFacts(BaseModel):
    """What a head knows of the target that it was made for; ``fingerprint`` is :func:`fingerprint.probe`'s."""

    model_config = ConfigDict(extra="forbid")

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    fingerprint: list[float]


class HeadConfig(BaseModel):
    """``config.json`` of a head. Layer numbers are taps: the residual stream entering that layer, counted from 0."""

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    kind: str
    target: TargetFacts
    aux_hidden_state_layers: tuple[int, ...] = Field(
        validation_alias=AliasChoices("aux_hidden_state_layers", "taps")  # taps: heads of outpace 0.1
    )
    vocabulary: int = Field(description="tokens that it can draft")
    rank: int = Field(0, description="of a low-rank LM head; 0: the target's rows")
    layers: int = 1
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float = 1e-5
    rope_theta: float = 10000.0
    context_length: int = 8192
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        """Heads are as wide as their target."""
        return self.target.hidden_size


@dataclass(slots=True)
class Batch:
    """Conversations side by side, padded at their ends. B rows of T tokens.

    ``tokens`` (B, T) long; ``states[layer]`` (B, T, hidden): the residual stream entering ``layer`` at each token;
    ``real`` (B, T) bool: no padding; ``answer`` (B, T) bool: tokens that the target wrote, the ones to be predicted.
    """

    tokens: Tensor
    states: Mapping[int, Tensor]
    real: Tensor
    answer: Tensor


@dataclass(slots=True)
class Teacher:
    """What losses ask of the target, as plain tensors on the training device. ``final`` is its last layer's tap.

    ``embedding`` (V, hidden), as the first layer sees tokens; ``rows`` (Vd, hidden): its LM head for the head's words;
    ``norm``: the final norm as a function of states.
    """

    embedding: Tensor
    rows: Tensor
    norm: Callable[[Tensor], Tensor]
    final: int

    def normed(self, batch: Batch) -> Tensor:
        """The target's states behind its final norm, what its LM head reads: (B, T, hidden)."""
        return self.norm(batch.states[self.final])

    def target_probs(self, batch: Batch) -> tuple[TeacherTargets, Tensor]:
        """What the target says after each token that an answer's token follows.

        And where to find it: (B, T) long, the index into it by the token that it is said after; 0 where nothing is.
        """
        wanted = torch.zeros_like(batch.answer)
        wanted[:, :-1] = batch.answer[:, 1:]
        kept = wanted.flatten().nonzero()[:, 0]
        place = torch.zeros(wanted.numel(), dtype=torch.long, device=kept.device)
        place[kept] = torch.arange(len(kept), device=kept.device)
        states = batch.states[self.final].flatten(0, 1)[kept]
        return TeacherTargets(self.norm(states), self.rows), place.view_as(wanted)

    def logits(self, normed: Tensor) -> Tensor:
        """The target's logits for the head's words, (..., Vd), of states behind its final norm."""
        return functional.linear(normed.to(self.rows.dtype), self.rows)


class Head(nn.Module, ABC):
    """A learned drafter's network."""

    kind: ClassVar[str] = ""
    Options: ClassVar[type[BaseModel]] = BaseModel
    """The kind's own settings, which ``outpace train`` takes as --param."""
    paper: ClassVar[str] = ""
    matrix_rate: ClassVar[float] = 0.02
    """Step in which its matrices learn by Muon, at most."""

    def __init__(self, config: HeadConfig, words: DraftVocabulary) -> None:
        super().__init__()
        self.config = config
        self.words = words

    @property
    def options(self) -> Any:
        """The kind's own settings, checked."""
        return self.Options.model_validate(self.config.options)

    @classmethod
    @abstractmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:
        """Which layers of a target of ``layers`` layers it reads; ``layers`` itself is the last one's output."""

    @classmethod
    def depth_of(cls, options: Any) -> int:  # noqa: ARG003
        """How many layers it has itself."""
        return 1

    @classmethod
    def shapes_of(cls, hidden: int, size: str, options: Any) -> dict[str, int]:  # noqa: ARG003
        """Sizes of each of its layers; ``size`` is one of SIZES."""
        return shapes(hidden, size)

    def initialise(self, target: Target, teacher: Teacher) -> None:
        """Begin from what the target's weights offer. Called once, before training."""

    @abstractmethod
    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """``loss``, a scalar to minimise, and what else is worth watching (scalars)."""


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
def _discover() -> None:
    # Kinds register themselves; learned methods are found by the name of their package, as plugins are.
    import_all("outpace.methods.learned")


def kinds() -> dict[str, type[Head]]:
    """Every kind of head by name."""
    _discover()
    return dict(sorted(_KINDS.items()))


def find_kind(name: str) -> type[Head]:
    """The kind of this name. Raises BadInput with the names there are."""
    if name not in kinds():
        raise BadInput(f"unknown kind of head '{name}'; known: {', '.join(kinds())}")
    return _KINDS[name]


def shapes(hidden: int, size: str) -> dict[str, int]:
    """Sizes of a head's layers for a target of width ``hidden``; ``size`` is one of SIZES."""
    if size not in SIZES:
        raise BadInput(f"unknown size '{size}'; known: {', '.join(SIZES)}")
    # Rotary embeddings turn pairs: heads are even, and of an odd target a little narrower together than it is.
    head_size = next((width for width in (64, 32, 16, 8, 4, 2) if hidden % width == 0), 2)
    heads = max(1, hidden // head_size)
    kv_heads = next(count for count in range(max(1, heads // 3), heads + 1) if heads % count == 0)
    intermediate = max(8, round(SIZES[size] * hidden * 8 / 3 / 64) * 64)
    return {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "intermediate": intermediate}


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
    outside = next((tap for tap in chosen if not 0 <= tap <= facts.num_layers), None)
    if outside is not None:
        raise BadInput(f"tap {outside} does not exist: the target has {facts.num_layers} layers")
    return HeadConfig(
        kind=head.kind,
        target=facts,
        aux_hidden_state_layers=chosen,
        vocabulary=min(vocabulary or facts.vocab_size, facts.vocab_size),
        rank=rank,
        layers=head.depth_of(settings),
        options=settings.model_dump(),
        **head.shapes_of(facts.hidden_size, size, settings),
    )


def low_middle_high(layers: int) -> tuple[int, ...]:
    """The taps that EAGLE-3 fuses, and others after it, of a target of ``layers`` layers (Li et al. 2025)."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


def parameters(head: nn.Module) -> int:
    """How many weights are its own."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


__all__ = ["SIZES", "Batch", "Head", "HeadConfig", "TargetFacts", "Teacher", "find_kind", "kind", "kinds"]


def shared_out(hidden: int, size: str, layers: int) -> dict[str, int]:
    """Sizes of ``layers`` layers that have one layer's MLP between them."""
    found = shapes(hidden, size)
    found["intermediate"] = max(8, found["intermediate"] // layers // 32 * 32)
    return found


def teacher_of(target: Target, head: Head, device: torch.device) -> Teacher:
    """The target's part of every loss, copied out of it."""
    tokens = torch.arange(target.vocab_size)
    pieces = torch.split(tokens, 4096)
    embedding = torch.cat([target.embed(some).detach().clone() for some in pieces])
    ids = head.words.ids.cpu()
    home = target.embed(tokens[:1]).device

    def norm(states: Tensor) -> Tensor:
        # A target may be on another device than the training: its answer comes back to where the question was.
        found = target.final_norm(states.flatten(0, -2).to(home))
        return found.to(states.device, copy=True).view(states.shape)

    return Teacher(
        embedding=embedding.to(device, torch.bfloat16),
        rows=target.head_rows(ids).clone().to(device, torch.bfloat16),
        norm=norm,
        final=target.num_layers,
    )
