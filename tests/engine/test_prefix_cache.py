"""PrefixCache: what it lends is what a prefill computes; owners are apart; the bound holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dense_support import target_of
from outpace.core.tree import TokenTree
from outpace.engine.prefix_cache import BLOCK, PrefixCache
from outpace.targets.base import Sequence, Target
from outpace.targets.states import States
from outpace.targets.table import TableTarget

ROWS = 1 << 40


def table() -> TableTarget:
    return TableTarget(11, seed=3, context_length=4000)


def read(target: Target, tokens: list[int], layers: tuple[int, ...] = ()) -> Sequence:
    sequence = target.sequence(tokens)
    if layers:
        sequence.states = States(layers)
        target.prefill([sequence], layers, lambda one, _, states: one.states.add(states))  # type: ignore[union-attr]
    else:
        target.prefill([sequence])
    return sequence


def lent(cache: PrefixCache, target: Target, owner: str, tokens: list[int], layers: tuple[int, ...] = ()) -> int:
    sequence = target.sequence(tokens)
    cache.lend(owner, sequence, layers)
    return target.length(sequence.kv)


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 11, (length,), generator=generator).tolist()


def test_the_longest_known_beginning_is_lent_and_the_last_token_never() -> None:
    target = table()
    cache = PrefixCache(target, ROWS)
    known = text(3 * BLOCK + 5)
    cache.keep("a", read(target, known))
    assert len(cache) == 3
    assert lent(cache, target, "a", known) == 3 * BLOCK
    assert lent(cache, target, "a", [*known[: 2 * BLOCK + 9], *text(50, 1)]) == 2 * BLOCK
    assert lent(cache, target, "a", known[: 2 * BLOCK + 1]) == 2 * BLOCK
    assert lent(cache, target, "a", known[: 2 * BLOCK]) == BLOCK  # its last token has to be scored
    assert lent(cache, target, "a", text(80, 1)) == 0


def test_owners_share_nothing() -> None:
    target = table()
    cache = PrefixCache(target, ROWS)
    known = text(2 * BLOCK + 5)
    cache.keep("a", read(target, known))
    assert lent(cache, target, "b", known) == 0
    cache.keep("b", read(target, known))
    assert len(cache) == 4
    cache.forget("a")
    assert len(cache) == 2
    assert lent(cache, target, "a", known) == 0
    assert lent(cache, target, "b", known) == 2 * BLOCK


def test_texts_share_their_common_blocks() -> None:
    target = table()
    cache = PrefixCache(target, ROWS)
    start = text(2 * BLOCK)
    for seed in (1, 2):
        cache.keep("a", read(target, [*start, *text(BLOCK + 1, seed)]))
    assert len(cache) == 4


def test_a_drafter_that_reads_states_gets_them_or_nothing() -> None:
    target = table()
    cache = PrefixCache(target, ROWS)
    known = text(2 * BLOCK + 5)
    cache.keep("a", read(target, known))
    assert lent(cache, target, "a", known, (1, 2)) == 0
    cache.keep("a", read(target, known, (1, 2)))
    assert len(cache) == 2
    sequence = target.sequence(known)
    states = cache.lend("a", sequence, (2,))
    assert states is not None
    expected = read(target, known, (2,)).states
    assert expected is not None
    assert torch.equal(states.whole()[2], expected.whole()[2][: 2 * BLOCK])
    assert lent(cache, target, "a", known, (3,)) == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int4", "bfloat16/int8"])
def test_scores_behind_lent_blocks_are_the_same_bits(precision: str) -> None:
    target = target_of("heads-of-64-in-threes", precision)
    cache = PrefixCache(target, ROWS)
    tokens = [(7 * at + 3) % target.vocab_size for at in range(2 * BLOCK + 9)]
    whole = read(target, tokens)
    cache.keep("a", whole)
    other = target.sequence(tokens)
    cache.lend("a", other)
    assert target.length(other.kv) == 2 * BLOCK
    target.prefill([other])
    tree = TokenTree.chain([5, 6, 7])
    one, two = (target.score([(sequence, tree)])[0].logits for sequence in (whole, other))
    assert torch.equal(one, two)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=20))
def test_the_bound_holds_and_what_is_lent_is_right(asked: list[tuple[int, int, int]]) -> None:
    target = table()
    one = PrefixCache(target, ROWS)
    one.keep("a", read(target, text(BLOCK + 1)))
    cache = PrefixCache(target, 5 * one.bytes)
    for seed, blocks, tail in asked:
        tokens = [*text(4 * BLOCK, seed // 2)[: blocks * BLOCK], *text(BLOCK, seed), *text(tail, 9), 1]
        sequence = target.sequence(tokens)
        cache.lend("a", sequence)
        assert sequence.kv == tokens[: len(sequence.kv)]
        target.prefill([sequence])
        cache.keep("a", sequence)
        assert cache.bytes <= cache.most_bytes
        assert len(cache) <= 5
        # What stays is a tree: every block can be reached.
        assert _reachable(cache) == len(cache)
    cache.shrink(0)
    assert (cache.bytes, len(cache), cache._roots) == (0, 0, {})


def test_the_bound_holds_while_a_long_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("heads-of-64-in-threes", "bfloat16")  # it knows how large its blocks are
    cache = PrefixCache(target, 3 * BLOCK * target.kv_bytes_per_token)
    honest, held = target.kv_block, list[int]()

    def noted(kv: Any, start: int, stop: int) -> Any:
        block = honest(kv, start, stop)
        held.append(cache.bytes + block.nbytes)
        return block

    monkeypatch.setattr(target, "kv_block", noted)
    for seed in (1, 2, 2):
        cache.keep("a", read(target, text(6 * BLOCK + 1, seed)))
        assert len(cache) == _reachable(cache) == 3
    assert max(held) == cache.most_bytes
    assert len(held) == 6  # what is kept is not copied again
    assert lent(cache, target, "a", text(6 * BLOCK + 1, 2)) == 3 * BLOCK


@pytest.mark.parametrize("states", [False, True])
def test_a_copy_that_fails_leaves_blocks_that_can_be_lent_and_evicted(
    monkeypatch: pytest.MonkeyPatch, states: bool
) -> None:
    target = table()
    cache = PrefixCache(target, ROWS)
    known = text(6 * BLOCK)
    sequence = read(target, known, (1,) if states else ())
    owner, name = (torch.Tensor, "clone") if states else (target, "kv_block")
    honest, calls = getattr(owner, name), 0

    def copy(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError
        return honest(*given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, copy)
        with pytest.raises(MemoryError):
            cache.keep("a", sequence)
    layers = (1,) if states else ()
    assert lent(cache, target, "a", known, layers) == 3 * BLOCK
    assert _reachable(cache) == len(cache)
    cache.keep("a", sequence)
    assert lent(cache, target, "a", known, layers) == 5 * BLOCK
    cache.shrink(0)
    assert (cache.bytes, len(cache), cache._roots) == (0, 0, {})


def _reachable(cache: PrefixCache) -> int:
    nodes, found = list(cache._roots.values()), 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        found += len(node.children)
    return found
