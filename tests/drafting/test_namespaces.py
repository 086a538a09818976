"""What outlives a request: whose it is, how much of it there may be, and what has to leave first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.exact import tiny_context
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.lru import Lru
from outpace.core.metrics import CacheUse
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.namespaces import EarlierRequests, Namespaces
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.none import NoDraft
from outpace.methods.registry import build
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget

TARGET = TableTarget(5)


def sequence(namespace: str = "") -> Sequence:
    return TARGET.sequence([1, 2], namespace=namespace)


# --------------------------------------------------------------------------------------------------- namespaces


def test_one_namespace_has_one_state_and_another_has_another() -> None:
    states = Namespaces[list[str]](list)
    ours, again, theirs = sequence("us"), sequence("us"), sequence("them")
    opened = states.open(ours)
    opened.append("secret")
    assert states.open(again) is opened
    assert states.open(theirs) == []
    assert states.open(sequence("us")) == ["secret"], "it outlives its requests"
    assert states.open(sequence("them")) == []


def test_a_request_without_a_namespace_has_a_state_of_its_own_that_goes_with_it() -> None:
    states = Namespaces[list[int]](list)
    one, other = sequence(), sequence()
    states.open(one).append(1)
    assert states.open(other) == []
    assert states.open(one) == []
    assert len(states) == 0


@given(st.lists(st.sampled_from("abcd")), st.integers(1, 3))
def test_the_least_recently_opened_namespace_leaves_first(names: list[str], most: int) -> None:
    """Against a list: the names in the order of their last opening."""
    states = Namespaces[list[str]](list, most)
    kept: list[str] = []
    for name in names:
        state = states.open(sequence(name))
        assert state == ([name] if name in kept else []), "its own or a new one"
        state[:] = [name]
        kept = [*(old for old in kept if old != name), name][-most:]
        assert len(states) == len(kept)


@dataclass(slots=True, kw_only=True)
class GossipState(DraftState):
    """The answers of the request's namespace."""

    heard: list[int]


class Gossip(Drafter[GossipState]):
    """Drafts the answers that it heard in the namespace before."""

    def __init__(self) -> None:
        self.heard = Namespaces[list[int]](list)

    def begin(self, sequence: Sequence) -> GossipState:
        return GossipState(sequence, heard=self.heard.open(sequence))

    def propose(self, state: GossipState, budget: Budget) -> TokenTree:
        at = len(state.sequence.tokens) - state.sequence.prompt_length
        return TokenTree.chain(state.heard[at : at + budget.depth])

    def observe(self, state: GossipState, verdict: Verdict) -> None:
        answer = state.sequence.tokens[state.sequence.prompt_length :]
        state.heard[: len(answer)] = answer

    def caches(self, state: GossipState) -> tuple[CacheUse, ...]:
        return (CacheUse("heard", len(state.heard), 1000),)


def answer(gossip: Method, *namespaces: str) -> list[Generation]:
    """Answers to one question, side by side, each under a namespace."""
    decoder = Decoder(TARGET)
    running = [decoder.submit(Request((1, 2), gossip, max_new_tokens=9, namespace=name)) for name in namespaces]
    decoder.run()
    return running


def test_a_namespace_reaches_the_drafter_and_nothing_crosses_to_another() -> None:
    gossip = Method("gossip", Gossip(), RecursiveRejection(), Fixed(3))
    [first] = answer(gossip, "ours")
    assert first.metrics.drafted == 0
    assert [one.metrics.drafted > 0 for one in answer(gossip, "ours", "theirs", "", "ours")] == [
        True,
        False,
        False,
        True,
    ]
    [cache] = answer(gossip, "ours")[0].metrics.caches
    assert (cache.entries, cache.bound) == (9, 1000)
    assert answer(gossip, "")[0].metrics.drafted == 0
    assert answer(gossip, "other")[0].metrics.drafted == 0


# ------------------------------------------------------------------------------------------- earlier requests

SAMPLED = SamplingParams(temperature=1.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2))), st.integers(1, 8))
def test_no_request_is_given_the_number_of_an_earlier_one(requests: list[tuple[str, int]], most: int) -> None:
    """However many pairs are kept: a count that was forgotten never begins again."""
    earlier = EarlierRequests(most)
    given_out: set[tuple[str, int, int]] = set()
    for number, (name, seed) in enumerate(requests):
        count = earlier.add(name, SamplingParams(temperature=1.0, seed=seed))
        assert (name, seed, count) not in given_out
        given_out.add((name, seed, count))
        if len(set(requests[: number + 1])) <= most:
            assert count == requests[:number].count((name, seed)), "nothing was forgotten: it is their number"
    assert len(earlier) <= most


def test_requests_without_a_namespace_and_greedy_ones_are_not_counted() -> None:
    earlier = EarlierRequests()
    assert [earlier.add("", SAMPLED), earlier.add("", SAMPLED)] == [0, 0]
    assert [earlier.add("ours", SamplingParams()), earlier.add("ours", SAMPLED), earlier.add("ours", SAMPLED)] == [
        0,
        0,
        1,
    ]


def test_who_keeps_namespaces_remembers() -> None:
    assert Gossip().remembers
    assert not NoDraft().remembers
    for name, expected in (("pld", False), ("cacheback", True), ("lookahead", True), ("eagle3", True)):
        assert build(name, tiny_context(3, 0)).drafter.remembers is expected
    for inner, expected in (("pld", False), ("recycling", True)):
        parts = {"parts": ("pld", inner)} if inner != "pld" else {"parts": ("pld", "sad")}
        assert build("merge", tiny_context(3, 0), parts).drafter.remembers is expected
        assert build("hsd", tiny_context(3, 0), {"levels": 1, "inner": inner}).drafter.remembers is expected


# ------------------------------------------------------------------------------------------------------- tables


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["put", "get", "ask"]), st.integers(0, 6), st.integers(0, 99))),
)
def test_a_table_is_a_list_in_the_order_of_last_use(bound: int, steps: list[tuple[str, int, int]]) -> None:
    table = Lru[int, int](bound)
    model: list[tuple[int, int]] = []  # the least recently used first
    evicted = 0
    for what, key, value in steps:
        held = dict(model)
        if what == "put":
            model = [*(entry for entry in model if entry[0] != key), (key, value)]
            table.put(key, value)
            evicted += len(model) > bound
            model = model[-bound:]
        elif what == "get":
            assert table.get(key) == held.get(key)
            if key in held:
                model = [*(entry for entry in model if entry[0] != key), (key, held[key])]
        else:
            assert (key in table) == (key in held), "asking uses nothing"
        assert len(table) == len(model) <= bound
        assert table.evicted == evicted
    for key, value in model:
        assert table.get(key) == value


@pytest.mark.parametrize("bound", [1, 3])
def test_reading_an_entry_saves_it(bound: int) -> None:
    table = Lru[int, str](bound + 1)
    table.put(0, "read again and again")
    for key in range(1, 10 * bound):
        assert table.get(0) == "read again and again"
        table.put(key, "new")
    assert 0 in table
    assert table.evicted == 10 * bound - 1 - bound


def test_drafters_without_memory_report_none() -> None:
    assert NoDraft().caches(None) == ()


def test_greedy_and_sampled_requests_of_a_name_learn_apart() -> None:
    """What a greedy request drafts goes by the clock, and so what it learns: no seed would reproduce a sampled one."""
    target = TableTarget(5)
    memory: Namespaces[list[int]] = Namespaces(list)
    greedy = target.sequence([0], SamplingParams(), namespace="mine")
    sampled = target.sequence([0], SamplingParams(temperature=1.0), namespace="mine")
    memory.open(greedy).append(1)
    assert memory.open(sampled) == []
    again = target.sequence([0], SamplingParams(), namespace="mine")
    assert memory.open(again) == [1]
