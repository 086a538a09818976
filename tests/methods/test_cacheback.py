"""Cacheback's tables against a plain reading of the text, and what they forget."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.tree import ROOT
from outpace.methods.lookup.cacheback import Cacheback, CachebackState
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget
from support import greedy_is_plain

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def sequence(tokens: Seq[int], namespace: str = "") -> Sequence:
    return TableTarget(100).sequence(tokens, namespace=namespace)


def followers(text: Seq[int], leader: Seq[int], follower: int, branches: int) -> list[tuple[int, ...]]:
    """What followed ``leader``, most recent first, each once."""
    n, found = len(leader), list[tuple[int, ...]]()
    for at in range(len(text) - follower, n - 1, -1):
        one = tuple(text[at : at + follower])
        if list(text[at - n : at]) == list(leader) and one not in found:
            found.append(one)
    return found[:branches]


def first_level(drafter: Cacheback, state: CachebackState, nodes: int = 64) -> list[list[int]]:
    """Drafted paths that are one follower long or end earlier."""
    with patch("outpace.drafting.best_first.FLOOR", 0.0):
        tree = drafter.propose(state, Budget(state.tables.follower, nodes))
    return [tree.path_tokens(node) for node in tree.leaves() if node != ROOT]


@given(text=TEXT, leader=st.integers(1, 3), follower=st.integers(1, 3), branches=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_branches_are_the_followers_of_the_longest_leader(
    text: list[int], leader: int, follower: int, branches: int
) -> None:
    drafter = Cacheback(leader, follower, branches)
    state = drafter.begin(sequence(text))
    expected: list[tuple[int, ...]] = []
    for length in range(min(leader, len(text)), 0, -1):
        expected = followers(text, text[len(text) - length :], follower, branches)
        if expected:
            break
    assert sorted(map(tuple, first_level(drafter, state))) == sorted(expected)


@given(prompt=TEXT, output=TEXT, step=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_tables_that_grow_are_those_built_at_once(prompt: list[int], output: list[int], step: int) -> None:
    grown, one = Cacheback(2, 2, 2), sequence(prompt)
    state = grown.begin(one)
    for start in range(0, len(output), step):
        one.tokens.extend(output[start : start + step])
        grown.propose(state, Budget(4))
    whole = Cacheback(2, 2, 2)
    other = whole.begin(sequence(one.tokens))
    assert grown.propose(state, Budget(6)).tokens == whole.propose(other, Budget(6)).tokens


def test_branches_go_on_where_followers_end() -> None:
    drafter = Cacheback(leader=2, follower=2, branches=2)
    state = drafter.begin(sequence([1, 2, 3, 4, 5, 6, 1, 2]))
    assert drafter.propose(state, Budget(4, 4)).tokens == [3, 4, 5, 6]


def test_the_follower_that_was_not_seen_longest_leaves_its_leader() -> None:
    text = [1, 2, 9, 1, 3, 9, 1, 2, 9, 1, 4, 9, 1]  # after 1: 2, 3, 2 again, 4
    for branches, kept in ((1, {4}), (2, {2, 4}), (3, {2, 3, 4})):
        drafter = Cacheback(leader=1, follower=1, branches=branches)
        assert {path[0] for path in first_level(drafter, drafter.begin(sequence(text)))} == kept


def test_the_leader_that_was_not_met_longest_leaves_the_table() -> None:
    drafter = Cacheback(leader=1, follower=1, entries=5)
    one = sequence([0, 10, 1, 11, 2, 12, 0, 10, 3])  # leaders 0 10 1 11 2 12, then 0 and 10 once more
    state = drafter.begin(one)
    drafter.propose(state, Budget(0))
    for tail, known in ((0, True), (10, True), (12, True), (1, False)):
        one.tokens.append(tail)
        assert bool(first_level(drafter, state)) is known, tail
    use = drafter.caches(state)[0]
    assert use.entries == use.bound == 5 and use.evicted > 0


@pytest.mark.parametrize("namespace", ["", "mine"])
def test_names_keep_apart_and_no_name_forgets(namespace: str) -> None:
    drafter = Cacheback()
    drafter.propose(drafter.begin(sequence([1, 2, 3, 4, 5], namespace)), Budget(1))
    for other, known in (("mine", namespace == "mine"), ("yours", False), ("", False)):
        pupil = drafter.begin(sequence([2], other))
        assert bool(drafter.propose(pupil, Budget(1)).tokens) is known


def test_recent_followers_that_prove_wrong_are_asked_less() -> None:
    """After 1 came 2, nine times, and 3 once, last. By recency alone 3 would go on being tried first."""
    text = [1, 2] * 9 + [1, 3]
    drafter, one = Cacheback(leader=1, follower=1, branches=2), sequence([0])
    state = drafter.begin(one)
    priced = Budget(1, 2, relative_costs=(1.0, 1.3, 1.6))
    right = 0
    for token in [*text, *text, *text]:
        drafted = drafter.propose(state, priced).tokens
        one.tokens.append(token)
        drafter.observe(state, Verdict((), token, committed=(token,)))
        right += token in drafted
    assert right > 40


def test_greedy_answers_are_plain_decodings() -> None:
    greedy_is_plain("cacheback", {"max_nodes": 8})
