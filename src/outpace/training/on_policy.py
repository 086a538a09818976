"""On-policy distillation: some training answers are sampled from the drafter (DistillSpec, Zhou et al. 2024, arXiv
2310.08461, section 4).

At inference a drafter continues its own tokens, and the target's text never has its mistakes in it. So in a share of
the batches the drafter answers the prompts, with as many tokens as the target's answers had (up to ``MOST``). One
forward of the target over each gives the hidden states that the loss compares with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from outpace.heads.base import Batch, Head, Teacher
from outpace.targets.base import Target
from outpace.training.answers import states_of
from outpace.training.dataset import Own, TrainingData, every
from outpace.training.derived_data import DerivedData
from outpace.training.replay import Replaying
from outpace.training.shards import Conversation

MOST = 128
"""Tokens of an answer that is sampled, at most."""


class OnPolicy(DerivedData):
    """Training data of which a ``share`` of the batches has answers of ``head``.

    ``stop_ids``: the tokens that end an answer; ``most``: tokens of one.
    """

    def __init__(
        self,
        data: TrainingData,
        head: Head,
        teacher: Teacher,
        target: Target,
        *,
        share: float,
        stop_ids: frozenset[int] = frozenset(),
        most: int = MOST,
    ) -> None:
        super().__init__(data, head, teacher, target, share)
        self.stop_ids, self.most = stop_ids, most

    def train(self, epoch: int, skip: int = 0, own: Own = every) -> Iterator[Batch]:
        order = random.Random(f"on policy {epoch}")
        for _ in range(skip):
            order.random()
        for number, batch in enumerate(self.data.train(epoch, skip, own), skip):
            wanted = order.random() < self.share
            yield self.rewritten(batch, epoch * 1_000_003 + number) if wanted and own(number) else batch

    def rewritten(self, batch: Batch, seed: int) -> Batch:
        """The batch's prompts with the head's answers, and the target's last hidden states (B, T, hidden) over both."""
        written = self.head.sample_answers(batch, self.teacher, most=self.most, stop_ids=self.stop_ids, seed=seed)
        texts = [[*batch.tokens[row, :start].tolist(), *own] for row, (start, own) in enumerate(written)]
        longest = max(map(len, texts))
        tokens = torch.zeros(len(texts), longest, dtype=torch.long)
        real, answer = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
        states = torch.zeros(len(texts), longest, self.target.hidden_size, dtype=torch.bfloat16)
        final = self.teacher.final
        forwarded = states_of(self.target, [Conversation("", text, []) for text in texts], (final,))
        for row, (text, (start, _)) in enumerate(zip(texts, written, strict=True)):
            tokens[row, : len(text)] = torch.tensor(text)
            real[row, : len(text)] = True
            answer[row, start : len(text)] = True
            states[row, : len(text)] = forwarded[row][final]
        return Batch(tokens, {final: states}, real, answer)


def with_on_policy(
    data: TrainingData, head: Head, teacher: Teacher, target: Target, stop_ids: frozenset[int] = frozenset()
) -> TrainingData:
    """What a head is trained on: ``data``, with what the head wrote or drafted itself where it asks for a share."""
    if head.replay_share:
        return Replaying(data, head, teacher, target, share=head.replay_share)
    share = head.on_policy_share
    return OnPolicy(data, head, teacher, target, share=share, stop_ids=stop_ids) if share else data
