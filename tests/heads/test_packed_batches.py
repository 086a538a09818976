"""Conversations packed into one row: each is as it would be alone."""

from typing import Any

import pytest
import torch

from eagle_support import batch_of, head_of, packed_of, table, teacher_for
from outpace.heads.base import Batch
from outpace.heads.kinds import kinds
from outpace.heads.unrolled import plainly, unrolled

ROWS, PROMPTS = [[3, 1, 4, 11, 5, 9, 2, 6], [5, 3], [5, 3, 5, 8, 9], [7, 9, 3, 2, 3, 8, 4]], [3, 1, 1, 2]
PACKING = sorted(name for name, kind in kinds().items() if kind.packs)


def alone(batch: Batch, row: int) -> Batch:
    """One conversation of a padded batch."""
    size = int(batch.real[row].sum())
    states = {layer: rows[row : row + 1, :size] for layer, rows in batch.states.items()}
    here = slice(row, row + 1)
    return Batch(batch.tokens[here, :size], states, batch.real[here, :size], batch.answer[here, :size])


def test_the_kinds_that_pack() -> None:
    assert PACKING == ["bpd", "eagle", "eagle3", "medusa"]


def test_a_packed_row_moves_and_counts_each_conversation_by_itself() -> None:
    packed = packed_of(batch_of(table(12), [[1, 2, 3], [4], [5, 6]], [1, 1, 1], ()))
    assert packed.positions().tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed.ahead(packed.tokens, 1).tolist() == [[2, 3, 0, 0, 6, 0]]
    assert packed.ahead(packed.tokens, 2).tolist() == [[3, 0, 0, 0, 0, 0]]
    assert packed.ahead(packed.tokens, 7).tolist() == [[0] * 6]
    assert packed.ahead(packed.real, 1).tolist() == [[True, True, False, False, True, False]]
    assert packed.conversations() == [(0, 3), (3, 4), (4, 6)]
    padded = batch_of(table(12), [[1, 2, 3], [4], [5, 6]], [1, 1, 1], ())
    assert padded.conversations() == [(0, 3), (3, 4), (6, 8)]
    assert padded.ahead(padded.tokens, 1)[0].tolist() == [2, 3, 0]


@pytest.mark.parametrize("later", [0, 2])
def test_attention_of_packed_conversations_is_that_of_each(later: int) -> None:
    torch.manual_seed(later)
    sizes = [4, 1, 6]
    queries = torch.randn(1, 4, 11, 8, requires_grad=True)
    pairs = [
        (torch.randn(1, 2, 11, 8, requires_grad=True), torch.randn(1, 2, 11, 8, requires_grad=True))
        for _ in range(later + 1)
    ]
    found = unrolled(queries, pairs[0], pairs[1:], sizes)
    wide = [one.repeat_interleave(2, 1) for pair in pairs for one in pair]
    start = 0
    for size in sizes:
        here = slice(start, start + size)
        right = plainly(queries[:, :, here], [one[:, :, here] for one in wide])
        torch.testing.assert_close(found[:, :, here], right, atol=1e-5, rtol=1e-4)
        start += size


@pytest.mark.parametrize("kind", PACKING)
def test_a_packed_batch_has_the_losses_and_slopes_of_a_padded_one(kind: str) -> None:
    target = table(12)
    head = head_of(kind, target, 10).requires_grad_(True)
    padded = batch_of(target, ROWS, PROMPTS, head.config.aux_hidden_state_layers)
    teacher = teacher_for(target, head)
    found: list[tuple[dict[str, Any], list[torch.Tensor | None]]] = []
    for batch in (padded, packed_of(padded)):
        losses = head.losses(batch, teacher)
        slopes = torch.autograd.grad(losses["loss"], list(head.parameters()), allow_unused=True)
        found.append(({name: float(value.detach()) for name, value in losses.items()}, list(slopes)))
    (first, one_way), (second, other_way) = found
    assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    assert first["loss"] > 0.0
    for one, other in zip(one_way, other_way, strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_packed_loss_is_the_sum_over_its_conversations(kind: str) -> None:
    target = table(12)
    head = head_of(kind, target, **({"steps": 1} if kind == "eagle3" else {"heads": 1}))
    padded, teacher = batch_of(target, ROWS, PROMPTS, head.config.aux_hidden_state_layers), teacher_for(target, head)
    total, count = 0.0, 0
    for row in range(len(ROWS)):
        one = alone(padded, row)
        asked = int(one.ahead(one.answer, 2).sum())
        total += asked * float(head.losses(one, teacher)["loss"])
        count += asked
    assert float(head.losses(packed_of(padded), teacher)["loss"]) == pytest.approx(total / count, rel=1e-4)
