"""Where rounds of speculative decoding would begin in a stored text, told from what a drafter gets right.

A round begins after the token that the target itself gave when the draft before failed, so drafts begin where drafting
is hard: a drafter that agrees with 72 % of a text's tokens may get 47 % of its first draft tokens right. A target that
decodes greedily commits the text that it has written before, and a draft is accepted as far as it is that text; so the
rounds of a chain of the likeliest tokens can be played without the target. Where an answer was sampled, an accepted
token is one that the sample has: what a target that draws the same sample accepts of a deterministic draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outpace.heads.base import Batch


def answer_spans(batch: Batch) -> list[tuple[int, int, int]]:
    """(first row of the conversation, begin, end) of every answer, in the flattened (B, T) of a batch."""
    asked = batch.answer.flatten().tolist()
    found = []
    for start, stop in batch.conversations():
        at = start
        while at < stop:
            if not asked[at]:
                at += 1
                continue
            end = at
            while end < stop and asked[end]:
                end += 1
            found.append((start, at, end))
            at = end
    return found


def played(spans: Iterable[tuple[int, int, int]], accepted: Sequence[int]) -> list[int]:
    """The rows from which the rounds' drafts begin: row t has read token t + 1 and drafts token t + 2 first.

    ``accepted[t]``: how many tokens of a draft that begins at row t are the text's.
    """
    found = []
    for first, begin, end in spans:
        row = begin - 2  # the last token of the prompt has no hidden state yet
        while row + 2 < end:
            if row < first:  # a prompt of one token: the first round drafts nothing
                row += 1
                continue
            found.append(row)
            row += accepted[row] + 1
    return found


def round_starts(batch: Batch, accepted: Tensor) -> Tensor:
    """(B * T,) bool: the rows of :func:`played`, of ``accepted`` (B * T,) long."""
    found = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
    found[torch.tensor(played(answer_spans(batch), accepted.tolist()), dtype=torch.long)] = True
    return found.to(batch.tokens.device)


def leading(steps: Sequence[tuple[Tensor, Tensor]], count: int) -> Tensor:
    """(count,) long: in how many steps from the first on each row was right.

    ``steps``: the rows (n,) that were run, and (n,) bool: which of them were right.
    """
    found = torch.zeros(count, dtype=torch.long, device=steps[0][0].device)
    for step, (rows, right) in enumerate(steps):
        found[rows] += right & (found[rows] == step)
    return found
