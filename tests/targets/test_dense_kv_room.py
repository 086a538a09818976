"""Room for K/V: taken once for a whole prompt, and in large pages where there is much of it."""

from __future__ import annotations

import pytest
import torch

import outpace
from outpace.engine.prefix_cache import BLOCK, PrefixCache
from outpace.targets.dense import dense_kv, kv_memory
from outpace.targets.dense.kv_memory import KVMemory

pytestmark = pytest.mark.model


def test_no_chunk_of_a_prompt_moves_the_one_before(smollm2: outpace.Model) -> None:
    target = smollm2.target
    sequence = target.sequence([5 + at % 90 for at in range(1200)])
    places = set()
    while sequence.kv.length < len(sequence.tokens) - 1:
        target.prefill([sequence], most=100)
        places.add(sequence.kv.data.data_ptr())
    assert len(places) == 1
    # Nor does the answer's first token.
    assert sequence.kv.capacity >= len(sequence.tokens) + 64
    target.close(sequence.kv)


def test_a_lent_beginning_is_copied_once(smollm2: outpace.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    target, made = smollm2.target, []
    first = target.sequence([7 + at % 80 for at in range(20 * BLOCK)])
    target.prefill([first])
    cache = PrefixCache(target, 1 << 30)
    cache.keep("somebody", first)
    second = target.sequence(list(first.tokens))
    reserve = type(second.kv).reserve

    def noted(kv: dense_kv.DenseKV, rows: int) -> None:
        reserve(kv, rows)
        made.append(kv.data.data_ptr())

    monkeypatch.setattr(type(second.kv), "reserve", noted)
    cache.lend("somebody", second)
    assert target.length(second.kv) == 19 * BLOCK
    assert len(set(made)) == 1
    for one in (first, second):
        target.close(one.kv)


def test_large_pages_hold_the_same_numbers(smollm2: outpace.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokens, found = smollm2.target, [9 + at % 70 for at in range(300)], []
    for large in (1 << 40, 0):
        monkeypatch.setattr(kv_memory, "_LARGE", large)
        monkeypatch.setattr(target, "_kv_memory", KVMemory())
        sequence = target.sequence(tokens)
        target.prefill([sequence])
        assert (sequence.kv.data.untyped_storage().resizable()) is (large > 0)
        copy = target.fork(sequence.kv, 200)
        found.append((target.keys(sequence.kv, 0, 299), target.keys(copy, 0, 200)))
        target.close(sequence.kv)
        target.close(copy)
    for small, large in zip(*found, strict=True):
        assert torch.equal(small, large)


def test_memory_of_ended_requests_is_used_again_whatever_it_holds(smollm2: outpace.Model) -> None:
    target, tokens = smollm2.target, [9 + at % 70 for at in range(100)]
    first = target.sequence(tokens)
    target.prefill([first])
    expected, data = target.keys(first.kv, 0, 99), first.kv.data
    target.close(first.kv)
    data.fill_(float("nan"))
    second = target.sequence(tokens)
    target.prefill([second])
    assert second.kv.data.data_ptr() == data.data_ptr()
    assert torch.equal(target.keys(second.kv, 0, 99), expected)
    target.close(second.kv)


def test_idle_memory_and_used_memory_are_never_more_than_was_used_at_once() -> None:
    memory, kind = KVMemory(), torch.float32
    small, large = memory.take((2, 100), kind), memory.take((4, 100), kind)
    memory.give(small)
    memory.give(large)
    assert memory.idle_bytes == 2400
    again = memory.take((2, 150), kind)  # the smallest that has room for it, and is not much too large
    assert again.data_ptr() == large.data_ptr()
    assert again.shape == (2, 200)
    other = memory.take((2, 3), kind)
    assert other.shape == (2, 3)
    assert memory.idle_bytes == 0  # the small one would have been 24 bytes too many
    memory.give(again)
    assert memory.idle_bytes <= 2400 - 24
    memory.take((400,), torch.bfloat16)  # another kind
    assert memory.idle_bytes <= 2400 - 24 - 800


def test_memory_that_lies_idle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "_MOST", 1000)
    memory = KVMemory()
    blocks = [memory.take((100,), torch.float32) for _ in range(5)]
    for one in blocks:
        memory.give(one)
    assert memory.idle_bytes == 800
    assert memory.take((100,), torch.float32).data_ptr() == blocks[-1].data_ptr()


def test_idle_memory_leaves_when_a_bound_is_reached() -> None:
    memory, kind = KVMemory(), torch.float32
    blocks = [memory.take((100,), kind) for _ in range(4)]
    for one in blocks:
        memory.give(one)
    memory.limit(1200, 800)
    assert memory.idle_bytes == 1200
    memory.take((150,), kind)
    assert memory.idle_bytes == 400
    memory.limit(900)
    assert memory.idle_bytes == 0


def test_within_a_bound_a_longer_block_takes_little_of_what_is_spare() -> None:
    memory, kind = KVMemory(), torch.float32
    large, long = memory.take((1000,), kind), memory.take((160,), kind)
    memory.give(large)
    memory.give(long)
    memory.limit(1040, 400)
    assert memory.take((100,), kind).shape == (100,)  # 240 bytes too long, of 640 that are spare
    assert memory.idle_bytes == long.nbytes
    memory.limit(1400, 400)
    again = memory.take((100,), kind)
    assert again.shape == (160,)
    memory.give(again)
    assert memory.take((100,), kind).shape == (100,)  # of 1000 that were spare, 240 are taken until the next plan
