"""Cacheback's tables against a plain reading of the text, and what they forget."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.controllers.base import Budget
from outpace.core.tree import ROOT
from outpace.methods.lookup.cacheback import Cacheback
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


def first_level(drafter: Cacheback, one: Sequence, nodes: int = 64) -> list[list[int]]:
    """Drafted paths that are one follower long or end earlier."""
    with patch("outpace.drafting.best_first.FLOOR", 0.0):
        tree = drafter.propose([one], [Budget(drafter._memories[one].follower, nodes)])[0]
    return [tree.path_tokens(node) for node in tree.leaves() if node != ROOT]


@given(text=TEXT, leader=st.integers(1, 3), follower=st.integers(1, 3), branches=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_branches_are_the_followers_of_the_longest_leader(
    text: list[int], leader: int, follower: int, branches: int
) -> None:
    drafter, one = Cacheback(leader, follower, branches), sequence(text)
    drafter.begin(one)
    expected: list[tuple[int, ...]] = []
    for length in range(min(leader, len(text)), 0, -1):
        expected = followers(text, text[len(text) - length :], follower, branches)
        if expected:
            break
    assert sorted(map(tuple, first_level(drafter, one))) == sorted(expected)


@given(prompt=TEXT, output=TEXT, step=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_tables_that_grow_are_those_built_at_once(prompt: list[int], output: list[int], step: int) -> None:
    grown, one = Cacheback(2, 2, 2), sequence(prompt)
    grown.begin(one)
    for start in range(0, len(output), step):
        one.tokens.extend(output[start : start + step])
        grown.propose([one], [Budget(4)])
    whole, other = Cacheback(2, 2, 2), sequence(one.tokens)
    whole.begin(other)
    assert grown.propose([one], [Budget(6)])[0].tokens == whole.propose([other], [Budget(6)])[0].tokens


def test_branches_go_on_where_followers_end() -> None:
    drafter, one = Cacheback(leader=2, follower=2, branches=2), sequence([1, 2, 3, 4, 5, 6, 1, 2])
    drafter.begin(one)
    assert drafter.propose([one], [Budget(4, 4)])[0].tokens == [3, 4, 5, 6]


def test_the_follower_that_was_not_seen_longest_leaves_its_leader() -> None:
    text = [1, 2, 9, 1, 3, 9, 1, 2, 9, 1, 4, 9, 1]  # after 1: 2, 3, 2 again, 4
    for branches, kept in ((1, {4}), (2, {2, 4}), (3, {2, 3, 4})):
        drafter, one = Cacheback(leader=1, follower=1, branches=branches), sequence(text)
        drafter.begin(one)
        assert {path[0] for path in first_level(drafter, one)} == kept


def test_the_leader_that_was_not_met_longest_leaves_the_table() -> None:
    drafter = Cacheback(leader=1, follower=1, entries=5)
    one = sequence([0, 10, 1, 11, 2, 12, 0, 10, 3])  # leaders 0 10 1 11 2 12, then 0 and 10 once more
    drafter.begin(one)
    drafter.propose([one], [Budget(0)])
    for tail, known in ((0, True), (10, True), (12, True), (1, False)):
        one.tokens.append(tail)
        assert bool(first_level(drafter, one)) is known, tail
    use = drafter.caches(one)[0]
    assert use.entries == use.bound == 5 and use.evicted > 0


@pytest.mark.parametrize("namespace", ["", "mine"])
def test_names_keep_apart_and_no_name_forgets(namespace: str) -> None:
    drafter = Cacheback()
    teacher = sequence([1, 2, 3, 4, 5], namespace)
    drafter.begin(teacher)
    drafter.propose([teacher], [Budget(1)])
    drafter.end(teacher)
    for other, known in (("mine", namespace == "mine"), ("yours", False), ("", False)):
        pupil = sequence([2], other)
        drafter.begin(pupil)
        assert bool(drafter.propose([pupil], [Budget(1)])[0].tokens) is known
        drafter.end(pupil)


def test_recent_followers_that_prove_wrong_are_asked_less() -> None:
    """After 1 came 2, nine times, and 3 once, last. By recency alone 3 would go on being tried first."""
    text = [1, 2] * 9 + [1, 3]
    drafter, one = Cacheback(leader=1, follower=1, branches=2), sequence([0])
    drafter.begin(one)
    priced = Budget(1, 2, relative_costs=(1.0, 1.3, 1.6))
    right = 0
    for token in [*text, *text, *text]:
        drafted = drafter.propose([one], [priced])[0].tokens
        one.tokens.append(token)
        drafter.observe([one], [], [])
        right += token in drafted
    assert right > 40


def test_greedy_answers_are_plain_decodings() -> None:
    greedy_is_plain("cacheback", {"nodes": 8})
