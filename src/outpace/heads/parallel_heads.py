"""Parallel heads on the target's last hidden state: several positions predicted at once, each without the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.head_config import HeadConfig
from outpace.heads.losses import soft_cross_entropy
from outpace.heads.row_losses import ROWS
from outpace.heads.typical_tree import RANKS, falling
from outpace.targets.base import Target

Network = Callable[[Tensor], Tensor]
"""States (n, hidden) behind the final norm to (n, heads, hidden)."""


class ParallelHeads(Head):
    """What both kinds share: which token each head is to predict, and its loss."""

    packs = True
    matrix_rate = 0.06
    """Higher than other heads': one layer between the target's state and its LM head, which begins at zero."""

    @property
    def longest_draft(self) -> int:
        return int(self.options.heads)

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003
        return (layers,)

    @abstractmethod
    def predicted(self, normed: Tensor) -> Tensor:
        """From the target's normed states (n, hidden) to the heads' own, ready for the LM head: (n, heads, hidden)."""

    @abstractmethod
    def beside(self, target: Target) -> Network:
        """The same network with its matrices packed as the target's are."""

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        targets, place = teacher.target_probs(batch)
        # A token outside the draft vocabulary cannot be learned, and nothing is drafted after one.
        wanted = batch.answer & (self.draft_vocabulary.t2d(len(teacher.embedding))[batch.tokens] >= 0)
        # A draft begins after a token whose state is not known yet: the first draft token is two positions on.
        first = alive = batch.ahead(wanted, 2)
        normed = teacher.norm(batch.states[teacher.final][first])
        states = self.predicted(normed.to(next(self.parameters()).dtype))
        total, weights = torch.zeros((), device=normed.device), 0.0
        found: dict[str, Tensor] = {}
        for index in range(self.options.heads):
            alive = alive & batch.ahead(wanted, 2 + index)
            places = batch.ahead(place, 1 + index)[alive]
            loss, hits = soft_cross_entropy(states[alive[first], index], self.draft_vocabulary, targets, places)
            weight = self.options.decay**index
            total, weights = total + weight * loss, weights + weight
            found[f"agree_{index + 1}"] = hits
        return {"loss": total / weights, **found}

    @torch.no_grad()
    def measured(self, batches: Iterable[Batch], teacher: Teacher) -> HeadConfig:
        """With ``rank_accuracies``: how often each choice of each head was the target's token."""
        count, weight = self.options.heads, next(self.parameters())
        hits, asked = torch.zeros(count, RANKS), torch.zeros(count)
        for batch in batches:
            here = batch.to(weight.device, weight.dtype)
            for head, ranks in enumerate(self._ranks(here, teacher)):
                hits[head] += torch.bincount(ranks[ranks < RANKS], minlength=RANKS).cpu()
                asked[head] += len(ranks)
        if not bool(asked.all()):
            return self.config
        shares = [falling((hits[head] / asked[head]).tolist()) for head in range(count)]
        rounded = tuple(tuple(round(one, 4) for one in row) for row in shares)
        return self.config.model_copy(update={"rank_accuracies": rounded})

    def _ranks(self, batch: Batch, teacher: Teacher) -> Iterator[Tensor]:
        """For each head: of the answers' tokens that it is to predict, how many tokens it held more likely. (n,) long.

        A token outside of the draft vocabulary has the rank of the last.
        """
        known = self.draft_vocabulary.t2d(len(teacher.embedding))[batch.tokens]
        first = alive = batch.ahead(batch.answer, 2)
        normed = teacher.norm(batch.states[teacher.final][first])
        states = self.predicted(normed.to(next(self.parameters()).dtype))
        for index in range(self.options.heads):
            alive = alive & batch.ahead(batch.answer, 2 + index)
            labels = batch.ahead(known, 2 + index)[alive]
            ranks = []
            for some, label in zip(
                torch.split(states[alive[first], index], ROWS), torch.split(labels, ROWS), strict=True
            ):
                logits = self.draft_vocabulary(some)
                own = logits.gather(-1, label[:, None].clamp_min(0))
                ranks.append(torch.where(label < 0, logits.shape[-1], (logits > own).sum(-1)))
            yield torch.cat(ranks)
