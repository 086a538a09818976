"""Cacheback's tables against a plain reading of the text, and what they forget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from outpace.acceptance.base import Verdict
from outpace.certify.letters import Letters
from outpace.controllers.base import Budget
from outpace.core.tree import ROOT
from outpace.datastore import Datastore
from outpace.datastore.shipped_answers import shipped_answers
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.methods.lookup.cacheback import Cacheback, CachebackState, CorpusTable
from outpace.methods.registry import Context, build
from outpace.prompts.overlap import Overlap
from outpace.prompts.questions import bench_texts
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget, random_table
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
        tree = drafter.propose(state, Budget(state.table.follower, nodes))
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


# ------------------------------------------------------------------------------------------------ the second table


def context(datastore: Datastore | None = None, vocab: int = 12) -> Context:
    target = TableTarget(vocab, random_table(vocab, 8))
    made = Context(target)
    return made if datastore is None else replace(made, datastore=lambda: datastore)


@given(texts=st.lists(TEXT, min_size=1, max_size=5), leader=st.integers(1, 3), branches=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_second_table_has_the_most_frequent_followers(texts: list[list[int]], leader: int, branches: int) -> None:
    table = CorpusTable(texts, leader, 2, branches)
    for text in texts:
        for at in range(1, len(text) + 1):
            tail = tuple(text[max(0, at - leader) : at])
            found: Counter[tuple[int, ...]] = Counter()
            for length in range(len(tail), 0, -1):
                found = Counter(one for each in texts for one in followers_of(each, tail[-length:]))
                if found:
                    break
            length, drafted = table.followers(tail)
            assert sorted(found[one] for one in drafted) == sorted(found.values())[-branches:]
            assert [found[one] for one in drafted] == sorted((found[one] for one in drafted), reverse=True)


def followers_of(text: Seq[int], leader: tuple[int, ...]) -> list[tuple[int, ...]]:
    n = len(leader)
    places = (at for at in range(n, len(text) - 1) if tuple(text[at - n : at]) == leader)
    return [tuple(text[at : at + 2]) for at in places]


def test_the_first_request_drafts_from_the_datastore() -> None:
    datastore = Datastore.of([[7, 8, 9, 10, 11]])
    for corpus, drafted in ((100, [9, 10]), (0, [])):
        made = build("cacheback", context(datastore), {"max_nodes": 2, "corpus": corpus})
        state = made.drafter.begin(sequence([1, 7, 8]))
        assert made.drafter.propose(state, Budget(2, 2)).tokens == drafted


def test_a_cold_start_accepts_more_with_a_datastore_of_the_targets_text() -> None:
    """The first request of a namespace, with and without the second table; the answers are the same."""
    plain = context()
    texts = [generated(plain, "none", (first, second))[0] for first in range(12) for second in range(0, 12, 2)]
    store = Datastore.of(texts)
    answers, rates = [], []
    for corpus in (0, 10_000):
        tokens, rate = generated(context(store), "cacheback", (3, 1), {"max_nodes": 6, "corpus": corpus})
        answers.append(tokens)
        rates.append(rate)
    assert answers[0] == answers[1] == generated(plain, "none", (3, 1))[0]
    assert rates[1] > 1.3 * rates[0]


def generated(
    made: Context, name: str, prompt: tuple[int, ...], given: dict[str, Any] | None = None
) -> tuple[list[int], float]:
    """An answer and the tokens of a round, for which it was decoded."""
    decoder = Decoder(made.target)
    one = decoder.submit(Request(prompt, build(name, made, given), max_new_tokens=24))
    decoder.run()
    return list(one.tokens), len(one.tokens) / one.metrics.rounds


def test_namespaces_share_the_second_table_and_never_write_to_it() -> None:
    table = CorpusTable([[7, 8, 9]], 1, 1, 2)
    before = dict(table.table)
    drafter = Cacheback(leader=1, follower=1, corpus=table)
    mine = drafter.begin(sequence([7, 5, 7], "mine"))
    assert sorted(drafter.propose(mine, Budget(1, 4)).tokens) == [5, 8]
    yours = drafter.begin(sequence([7], "yours"))
    assert drafter.propose(yours, Budget(1, 4)).tokens == [8]
    assert table.table == before


def test_without_a_datastore_the_answers_that_ship_fill_it() -> None:
    words = Letters(["a", "e", "o", "t", "h", " ", "x"])
    made = build("cacheback", replace(context(vocab=7), tokenizer=words), {"max_nodes": 4})
    again = build("cacheback", replace(context(vocab=7), tokenizer=words), {"max_nodes": 4})
    assert isinstance(made.drafter, Cacheback) and isinstance(again.drafter, Cacheback)
    assert made.drafter.corpus is again.drafter.corpus is not None
    state = made.drafter.begin(sequence(words.encode("t")))
    assert words.encode("h")[0] in made.drafter.propose(state, Budget(1, 8)).tokens


def test_the_answers_that_ship_are_none_of_the_benchs_questions() -> None:
    overlap = Overlap(bench_texts())
    lines = shipped_answers(Bytes(), 10**9)
    texts = [bytes(tokens).decode() for tokens in lines]
    assert len(texts) > 100 and sum(map(len, texts)) > 10**5
    assert not any(text in overlap for text in texts)


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_of_the_answers_that_ship_no_more_is_read_than_was_asked_for() -> None:
    assert sum(map(len, shipped_answers(Bytes(), 1000))) == 1000 and not list(shipped_answers(Bytes(), 0))
