"""Head: the network of a learned drafter, and what its losses are given.

A head is a torch module, trained on the target's own text and hidden states. It borrows the target's embedding and the
LM-head rows of its draft vocabulary (:mod:`outpace.heads.draft_vocabulary`); its other weights are its own.

To add a kind: a subclass with its ``Options`` in ``network.py`` of a folder of its own under ``methods/learned``,
decorated with :func:`outpace.heads.kinds.kind`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional

from outpace.heads.blocks import shifted
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, shapes
from outpace.heads.losses import TeacherTargets
from outpace.models.placement import training_dtype
from outpace.targets.base import Target


@dataclass(slots=True)
class Batch:
    """Conversations in B rows of T tokens: side by side, padded at their ends, or packed end to end into one row.

    ``tokens`` (B, T) long; ``states[layer]`` (B, T, hidden): the residual stream entering ``layer`` at each token;
    ``real`` (B, T) bool: no padding; ``answer`` (B, T) bool: tokens that the target wrote, the ones to be predicted.
    ``lengths``: tokens of each conversation of a packed row, which has no padding (B = 1); None where every row is one
    conversation. ``offsets``: for each conversation, how many of its tokens stand before those that are here.
    """

    tokens: Tensor
    states: Mapping[int, Tensor]
    real: Tensor
    answer: Tensor
    lengths: list[int] | None = None
    offsets: list[int] | None = None
    replay: Replay | None = None

    def positions(self) -> Tensor:
        """(B, T) long: the position of each token in its own conversation, as far as it is here."""
        if self.lengths is None:
            return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(self.tokens.shape)
        return torch.cat([torch.arange(size) for size in self.lengths])[None].to(self.tokens.device)

    def ahead(self, rows: Tensor, by: int) -> Tensor:
        """(B, T, ...) moved ``by`` tokens towards the beginning; zero (False) beyond a conversation's end."""
        moved = shifted(rows, by)
        if self.lengths is None or not by:
            return moved
        sizes = torch.tensor(self.lengths, device=rows.device)
        inside = by < sizes.repeat_interleave(sizes) - self.positions()[0]
        return torch.where(inside.view(1, -1, *[1] * (rows.dim() - 2)), moved, moved.new_zeros(()))

    def conversations(self) -> list[tuple[int, int]]:
        """Where, in the flattened (B, T), each conversation begins and ends."""
        sizes = self.real.sum(1).tolist() if self.lengths is None else self.lengths
        starts = range(0, self.tokens.numel(), self.tokens.shape[1]) if self.lengths is None else _sums(sizes)
        return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same on ``device``, its states as ``dtype``."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            states={layer: rows.to(device, dtype) for layer, rows in self.states.items()},
            real=self.real.to(device),
            answer=self.answer.to(device),
            replay=None if self.replay is None else self.replay.to(device, dtype),
        )


@dataclass(slots=True)
class Replay:
    """What a drafter drafted itself from some rows of a batch, and the target's states after it.

    ``tokens`` (steps - 1, B * T) long: the token that each row reads in the second step and later instead of the
    text's, -1 for the text's own. ``states`` (m, hidden): the last layer's output after such tokens; ``places``
    (steps - 1, B * T) long: which of them follows the token that is read.
    """

    tokens: Tensor
    states: Tensor
    places: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Replay:
        """The same on ``device``, its states as ``dtype``."""
        return Replay(self.tokens.to(device), self.states.to(device, dtype), self.places.to(device))


def _sums(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes[:-1])] if sizes else []


@dataclass(slots=True)
class Teacher:
    """The target's weights that losses need, as plain tensors on the training device.

    ``embedding`` (V, hidden), as the first layer sees tokens; ``rows`` (Vd, hidden): its LM head for the draft
    vocabulary; ``norm``: the final norm as a function of states (..., hidden); ``final``: the key in ``Batch.states``
    of the last layer's output.
    """

    embedding: Tensor
    rows: Tensor
    norm: Callable[[Tensor], Tensor]
    final: int

    def normed(self, batch: Batch) -> Tensor:
        """The target's states behind its final norm, which its LM head reads: (B, T, hidden)."""
        return self.norm(batch.states[self.final])

    def target_probs(self, batch: Batch) -> tuple[TeacherTargets, Tensor]:
        """The target's distributions after every token that a token of an answer follows.

        Returns the distributions, and ``index`` (B, T) long: the row of them that follows each token; 0 where no token
        of an answer follows. Those of the batch's replay come last.
        """
        wanted = batch.ahead(batch.answer, 1)
        kept = wanted.flatten().nonzero()[:, 0]
        index = torch.zeros(wanted.numel(), dtype=torch.long, device=kept.device)
        index[kept] = torch.arange(len(kept), device=kept.device)
        states = batch.states[self.final].flatten(0, 1)[kept]
        if batch.replay is not None:
            states = torch.cat([states, batch.replay.states.to(states)])
        return TeacherTargets(self.norm(states), self.rows), index.view_as(wanted)

    def logits(self, normed: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary, (..., Vd), of states (..., hidden) behind its final norm."""
        return functional.linear(normed.to(self.rows.dtype), self.rows)


class Head(nn.Module, ABC):
    """A learned drafter's network."""

    kind: ClassVar[str] = ""
    Options: ClassVar[type[BaseModel]] = BaseModel
    """The kind's own settings, which ``outpace train`` takes as --param."""
    paper: ClassVar[str] = ""
    matrix_rate: ClassVar[float] = 0.02
    """Largest learning rate of its matrices, which Muon trains."""
    packs: ClassVar[bool] = False
    """Whether its losses take batches whose conversations are packed into one row."""

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self.config = config
        self.draft_vocabulary = draft_vocabulary

    @property
    def options(self) -> Any:
        """The kind's own settings, checked."""
        return self.Options.model_validate(self.config.options)

    @property
    def longest_draft(self) -> int | None:
        """Tokens of a draft at most, for heads that draft them all in one forward; None for those that go on."""
        return None

    @property
    def on_policy_share(self) -> float:
        """Share, in [0, 1], of the training batches whose answers it samples itself; 0.0 where it cannot."""
        return 0.0

    def sample_answers(
        self, batch: Batch, teacher: Teacher, *, most: int, stop_ids: frozenset[int], seed: int
    ) -> list[tuple[int, list[int]]]:
        """For each row of ``batch`` where its answer begins, and what the head writes there: up to ``most`` tokens.

        An answer ends with one of ``stop_ids``, and is no longer than the batch's. Asked for where ``on_policy_share``
        is above 0.
        """
        raise NotImplementedError(f"a head of kind {self.kind} writes no text of its own")

    @property
    def replay_share(self) -> float:
        """Share, in [0, 1], of the training batches in which it learns from its own chains too; 0.0 where it cannot."""
        return 0.0

    def own_drafts(self, batch: Batch, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """What it drafts itself from every row of a batch: (B * T, steps) long, -1 where a row drafts nothing.

        And (B * T,) long: how many of these tokens, from the first on, are the text's. Asked for where
        ``replay_share`` is above 0.
        """
        raise NotImplementedError(f"a head of kind {self.kind} replays no drafts")

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
        """Sizes of each of its layers, as fields of HeadConfig; ``size`` is one of SIZES."""
        return shapes(hidden, size)

    def initialise(self, target: Target, teacher: Teacher) -> None:
        """Start from the target's weights where they help. Called once, before training."""

    @abstractmethod
    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        """``loss``, a scalar to minimise, and further scalars to report."""

    def measured(self, batches: Iterable[Batch], teacher: Teacher) -> HeadConfig:
        """Its configuration with what is measured of it on held-out ``batches`` once it is trained."""
        return self.config

    def own_weights(self) -> dict[str, Tensor]:
        """Its tensors by name, without those of the draft vocabulary."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("draft_vocabulary.")}


def parameters(head: nn.Module) -> int:
    """How many trainable weights it has."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


def teacher_of(target: Target, head: Head, device: torch.device) -> Teacher:
    """The target's weights that the losses of ``head`` need, copied to ``device``."""
    tokens = torch.arange(target.vocab_size)
    pieces = torch.split(tokens, 4096)
    embedding = torch.cat([target.embed(some).detach().clone() for some in pieces])
    d2t = head.draft_vocabulary.d2t.cpu()
    home = target.embed(tokens[:1]).device

    def norm(states: Tensor) -> Tensor:
        # The target may be on another device than the training.
        found = target.final_norm(states.flatten(0, -2).to(home))
        return found.to(states.device, copy=True).view(states.shape)

    dtype = training_dtype(device)
    return Teacher(
        embedding=embedding.to(device, dtype),
        rows=target.lm_head_rows(d2t).clone().to(device, dtype),
        norm=norm,
        final=target.num_layers,
    )
