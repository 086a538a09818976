"""Replay from error positions: a drafter learns from what it drafts itself where its drafts fail.

As in Draft-OPD (Lei et al. 2026, arXiv 2605.29343): the text is the target's, so rounds can be played over it
(:mod:`outpace.heads.simulated_rounds`). From rows where a round's draft fails the drafter drafts its own chain, and one
forward of the target over each chain gives the distributions that it should have had after its own tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from outpace.core.tree import TokenTree
from outpace.heads.base import Batch, Head, Replay, Teacher
from outpace.heads.simulated_rounds import answer_spans, played
from outpace.targets.base import Sequence, Target
from outpace.training.dataset import Own, TrainingData, every
from outpace.training.derived_data import DerivedData

MOST = 64
"""Chains that are replayed in a batch, at most."""


class Replaying(DerivedData):
    """Training data of which a ``share`` of the batches carries chains of ``head``, and the target's states after them.

    ``most``: chains of a batch, drawn at random from its failed drafts.
    """

    def __init__(
        self, data: TrainingData, head: Head, teacher: Teacher, target: Target, *, share: float, most: int = MOST
    ) -> None:
        super().__init__(data, head, teacher, target, share)
        self.most = most

    def train(self, epoch: int, skip: int = 0, own: Own = every) -> Iterator[Batch]:
        for number, batch in enumerate(self.data.train(epoch, skip, own), skip):
            order = random.Random(f"replay {epoch} {number}")
            wanted = order.random() < self.share
            yield self.replayed(batch, order) if wanted and own(number) else batch

    def replayed(self, batch: Batch, order: random.Random) -> Batch:
        """The batch with chains from rows where drafts fail; as it is where none does."""
        weight = next(self.head.parameters())
        on_device = batch.to(weight.device, weight.dtype)
        drafted, accepted = (one.cpu() for one in self.head.own_drafts(on_device, self.teacher))
        rows = self.failed(batch, accepted, drafted.shape[1])
        if len(rows) > self.most:
            rows = sorted(order.sample(rows, self.most))
        after = self._after(batch, rows, drafted)
        if not after:
            return batch
        steps, count = drafted.shape[1], batch.tokens.numel()
        tokens = torch.full((steps - 1, count), -1, dtype=torch.long)
        places = torch.zeros(steps - 1, count, dtype=torch.long)
        for number, row in enumerate(after):
            tokens[:, row] = drafted[row, :-1]
            places[:, row] = torch.arange(steps - 1) + number * (steps - 1)
        return replace(batch, replay=Replay(tokens, torch.cat(list(after.values())), places))

    def failed(self, batch: Batch, accepted: Tensor, steps: int) -> list[int]:
        """Rows from which rounds begin whose drafts are not accepted as far as the answer goes, in conversations that
        are whole. Without those of which nothing is learned: the token that the draft should begin with is none that
        can be drafted."""
        offsets = batch.offsets or [0] * len(batch.conversations())
        whole = {start for (start, _), offset in zip(batch.conversations(), offsets, strict=True) if not offset}
        spans = [span for span in answer_spans(batch) if span[0] in whole]
        known = self.head.draft_vocabulary.t2d(self.target.vocab_size).cpu()[batch.tokens] >= 0
        learned = batch.ahead(batch.answer & known, 2).flatten()
        return [
            row
            for first, begin, end in spans
            for row in played([(first, begin, end)], accepted.tolist())
            if int(accepted[row]) < min(steps, end - row - 2) and bool(learned[row])
        ]

    def _after(self, batch: Batch, rows: list[int], drafted: Tensor) -> dict[int, Tensor]:
        """By row: the target's last states (steps - 1, hidden) after the tokens of its chain but the last."""
        flat, final = batch.tokens.flatten().tolist(), self.target.num_layers
        left = {start: [row for row in rows if start <= row < stop] for start, stop in batch.conversations()}
        open_ones: dict[int, Sequence] = {}
        found: dict[int, Tensor] = {}
        try:
            while any(left.values()):
                asked: list[tuple[int, Sequence]] = []
                for start, waiting in left.items():
                    if not waiting:
                        continue
                    row = waiting.pop(0)
                    text = flat[start : row + 2]  # the row reads the token after it, the last that is committed
                    if len(text) + drafted.shape[1] > self.target.context_length:
                        continue
                    if start not in open_ones:
                        open_ones[start] = self.target.sequence(text)
                    sequence = open_ones[start]
                    sequence.tokens += text[len(sequence.tokens) :]
                    asked.append((row, sequence))
                self.target.prefill([sequence for _, sequence in asked])
                if not asked:
                    continue
                trees = [(sequence, TokenTree.chain(drafted[row, :-1].tolist())) for row, sequence in asked]
                scores = self.target.score(trees, (final,))
                for index, (row, _) in enumerate(asked):
                    rows_after = scores[index].hidden_states[final][1:]
                    found[row] = rows_after.to("cpu", batch.states[final].dtype, copy=True)
        finally:
            for sequence in open_ones.values():
                self.target.close(sequence.kv)
        return found
