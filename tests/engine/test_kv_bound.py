"""The bound on K/V holds for requests, cached beginnings and idle memory together, and admits nobody in vain."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import support
from dense_support import target_of
from outpace.core.sampling import SamplingParams
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.request import Request
from outpace.engine.scheduler import Limits
from outpace.engine.shared_decoder import SharedDecoder, Ticket
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.kv_memory import KVMemory
from test_preemption import ended


class Watched:
    """A target whose K/V memory is new, and what is held of it whenever a block is made: by sequences, idle, cached."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.target: DenseTarget = target_of("heads-of-64-in-threes", "float32")
        self.memory = KVMemory()
        self.cache: PrefixCache | None = None
        self.held: list[int] = []
        take, kv_block = self.memory.take, self.target.kv_block

        def taken(*given: Any) -> Tensor:
            block = take(*given)
            self.note(0)
            return block

        def copied(*given: Any) -> Tensor:
            block: Tensor = kv_block(*given)
            self.note(block.nbytes)
            return block

        patch.setattr(self.target, "_kv_memory", self.memory)
        patch.setattr(self.memory, "take", taken)
        patch.setattr(self.target, "kv_block", copied)

    def note(self, more: int) -> None:
        cached = 0 if self.cache is None else self.cache.bytes
        self.held.append(self.memory._in_use + self.memory.idle_bytes + cached + more)

    def rows(self, count: int) -> int:
        """Bytes of so many rows."""
        return count * self.target.kv_bytes_per_token

    def decoder(self, bound: int, cached: int = 0) -> SharedDecoder:
        self.cache = PrefixCache(self.target, cached) if cached else None
        return SharedDecoder(self.target, limits=Limits(kv_bytes=bound), prefixes=self.cache)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def request(length: int, seed: int = 0, tokens: int = 8, owner: str | None = None) -> Request:
    prompt = tuple(3 + (7 * at + 11 * seed) % 90 for at in range(length))
    return Request(prompt, support.method(None), SamplingParams(temperature=0.0), tokens, prefix_owner=owner)


def preemptions(tickets: list[Ticket]) -> int:
    return sum(one.finished().metrics.preemptions for one in tickets)


def test_what_a_large_request_leaves_makes_no_small_one_wait(watched: Watched) -> None:
    """Its block is longer than theirs have to be: as the K/V of one of them it would leave no room for the other."""
    bound = watched.rows(1024)
    decoder = watched.decoder(bound)
    ended(decoder, [request(700)])
    assert watched.memory.idle_bytes >= watched.rows(768)
    small = ended(decoder, [request(300, 1), request(300, 2)])
    assert preemptions(small) == 0
    admitted = [at for one in small for event, at in one.timeline if event == "admitted"]
    assert max(admitted) < min(at for one in small for event, at in one.timeline if event == "ended")
    assert max(watched.held) <= bound


def test_a_longer_block_is_used_again_where_there_is_room_for_it(watched: Watched) -> None:
    decoder = watched.decoder(watched.rows(8192))
    ended(decoder, [request(700)])
    before = watched.memory.idle_bytes
    ended(decoder, [request(300, 1)])
    assert watched.memory.idle_bytes == before >= watched.rows(768)


def test_cached_beginnings_and_idle_memory_share_what_requests_leave(watched: Watched) -> None:
    bound = watched.rows(1280)
    decoder = watched.decoder(bound, bound // 2)
    for seed in range(4):
        ended(decoder, [request(700, seed, owner="a")])
        found = ended(decoder, [request(length, seed + 9, owner="a") for length in (200, 300, 100)])
        assert preemptions(found) == 0
    assert max(watched.held) <= bound
    assert watched.cache is not None
    assert watched.cache.use.evicted > 0


def test_requests_that_outgrow_the_bound_take_turns(watched: Watched) -> None:
    """Answers are those of a decoder without a bound; one that waits again is not admitted only to wait once more."""
    asked = [request(100, seed, tokens=400) for seed in range(4)]
    expected = [one.finished().tokens for one in ended(SharedDecoder(watched.target), asked)]
    bound, over = watched.rows(1280), list[int]()
    limit = watched.target.limit_kv

    def limited(most: int | None, planned: int = 0) -> None:
        limit(most, planned)
        over.append(watched.memory._in_use + watched.memory.idle_bytes - bound)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watched.target, "limit_kv", limited)
        found = ended(watched.decoder(bound), asked)
    assert [one.finished().tokens for one in found] == expected
    assert 0 < preemptions(found) <= 2 * len(asked)
    assert max(over) <= 0
