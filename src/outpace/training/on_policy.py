"""On-policy distillation: the draft LM writes, and the target says what it would have said (DistillSpec, Zhou et al.
2024, arXiv 2310.08461, section 4).

A drafter is asked to go on from its own tokens, and the target's text never shows it its own mistakes. So a share of
the batches keep their prompts and get other answers: sampled from the draft LM as it is at that moment, at temperature
1, as many tokens as the target's answers had (up to ``MOST``). The target runs once over each, and its states there are
what the loss compares with. An answer ends with the draft LM's end token; what comes after it is not asked for.

Costs: a batch's answers are sampled token by token by the network being trained, some hundred forwards of one token a
row; and the target prefills the whole batch. A resumed run makes the batches again that it skips.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from outpace.heads.base import Batch, Teacher
from outpace.methods.learned.distill.network import DraftLm
from outpace.targets.base import Sequence, Target
from outpace.training.dataset import Dataset

MOST = 128
"""Tokens of an answer that is sampled."""


class OnPolicy:
    """A dataset of which a share of the training batches is the draft LM's own. Stands in for a :class:`Dataset`.

    ``stop_ids``: the tokens that end an answer.
    """

    def __init__(
        self,
        data: Dataset,
        head: DraftLm,
        teacher: Teacher,
        target: Target,
        *,
        share: float,
        stop_ids: frozenset[int] = frozenset(),
        most: int = MOST,
    ) -> None:
        self.data, self.head, self.teacher, self.target = data, head, teacher, target
        self.share, self.stop_ids, self.most = share, stop_ids, most

    def answer_tokens(self) -> int:
        """How many of the target's tokens a pass goes through."""
        return self.data.answer_tokens()

    def held_out(self) -> Iterator[Batch]:
        """The held-out split: the target's own text."""
        return self.data.held_out()

    def train(self, epoch: int) -> Iterator[Batch]:
        """One pass, the same choice of batches for the same ``epoch``."""
        order = random.Random(f"on policy {epoch}")
        for number, batch in enumerate(self.data.train(epoch)):
            own = order.random() < self.share
            yield self.rewritten(batch, epoch * 1_000_003 + number) if own else batch

    @torch.no_grad()
    def rewritten(self, batch: Batch, seed: int) -> Batch:
        """The batch's prompts with the draft LM's answers, and the target's states over both."""
        written = self.sampled(batch, seed)
        texts = [[*batch.tokens[row, :start].tolist(), *own] for row, (start, own) in enumerate(written)]
        longest = max(map(len, texts))
        tokens = torch.zeros(len(texts), longest, dtype=torch.long)
        real, answer = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
        states = torch.zeros(len(texts), longest, self.target.hidden_size, dtype=torch.bfloat16)
        for row, (text, (start, _)) in enumerate(zip(texts, written, strict=True)):
            tokens[row, : len(text)] = torch.tensor(text)
            real[row, : len(text)] = True
            answer[row, start : len(text)] = True
        for row, found in enumerate(self._states(texts)):
            states[row, : len(found)] = found
        return Batch(tokens, {self.teacher.final: states}, real, answer)

    def sampled(self, batch: Batch, seed: int) -> list[tuple[int, list[int]]]:
        """For each row where its answer begins, and what the draft LM writes there: all rows together."""
        head, ids = self.head, self.head.draft_vocabulary.d2t
        device, dtype = head.norm.weight.device, head.norm.weight.dtype
        draws = torch.Generator(device).manual_seed(seed)
        starts = batch.answer.int().argmax(1).clamp_min(1).to(device)
        limits = [min(self.most, size) for size in batch.answer.sum(1).tolist()]
        prompts = batch.tokens[:, : int(starts.max())].to(device)
        states, before = head(self.teacher.embedding[prompts].to(dtype))
        states = states[torch.arange(len(starts)), starts - 1]
        seen = torch.arange(prompts.shape[1], device=device) < starts[:, None]
        texts: list[list[int]] = [[] for _ in limits]
        going = [limit > 0 for limit in limits]
        where = starts[:, None]
        while any(going):
            shares = head.draft_vocabulary(states).float().softmax(-1)
            tokens = ids[torch.multinomial(shares, 1, generator=draws)]
            for row, token in enumerate(tokens[:, 0].tolist()):
                if going[row]:
                    texts[row].append(token)
                    going[row] = token not in self.stop_ids and len(texts[row]) < limits[row]
            if any(going):
                seen = torch.cat([seen, seen.new_ones(len(texts), 1)], 1)
                found, before = head(self.teacher.embedding[tokens].to(dtype), before, where, seen)
                states, where = found[:, -1], where + 1
        return list(zip(starts.tolist(), texts, strict=True))

    def _states(self, texts: list[list[int]]) -> list[Tensor]:
        """The last layer's output after every token but the last of each text."""
        pieces: dict[Sequence, list[Tensor]] = {}

        def keep(sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
            pieces[sequence].append(hidden_states[self.teacher.final].to("cpu", torch.bfloat16, copy=True))

        sequences = [self.target.sequence(text) for text in texts]
        pieces.update({sequence: [] for sequence in sequences})
        self.target.prefill(sequences, (self.teacher.final,), keep)
        for sequence in sequences:
            self.target.close(sequence.kv)
        return [torch.cat(pieces[one]) if pieces[one] else torch.zeros(0, 0) for one in sequences]


def with_on_policy(
    data: Dataset, head: object, teacher: Teacher, target: Target, stop_ids: frozenset[int] = frozenset()
) -> Dataset | OnPolicy:
    """What a head is trained on: ``data``, or where it asks for that, data of which a share is its own."""
    share = getattr(getattr(head, "options", None), "on_policy", 0.0)
    if not share or not isinstance(head, DraftLm):
        return data
    return OnPolicy(data, head, teacher, target, share=share, stop_ids=stop_ids)
