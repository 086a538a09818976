"""REST: the trie of continuations against brute force, what is drafted of it, and what it learns."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from outpace.acceptance.base import Verdict
from outpace.certify.exact import certify_exact, matrix, rotating_slice
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.datastore.build import build_datastore
from outpace.datastore.corpus import TokenPiece
from outpace.datastore.store import Datastore, open_datastore
from outpace.drafting.best_first import CandidateState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods import registry
from outpace.methods.lookup.rest import SHARES, Rest, prior
from outpace.methods.registry import Context
from outpace.targets.table import TableTarget, random_table

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=6).filter(any)
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=10)


def begun(drafter: Rest, tokens: Seq[int], namespace: str = "") -> CandidateState:
    return drafter.begin(TableTarget(200).sequence(tokens, namespace=namespace))


def commit(state: CandidateState, *tokens: int) -> Verdict:
    """The verdict of a round that committed these tokens."""
    state.sequence.tokens.extend(tokens)
    return Verdict((), tokens[-1], committed=tokens)


def draft(drafter: Rest, tokens: Seq[int], budget: Budget | None = None) -> TokenTree:
    return drafter.propose(begun(drafter, tokens), budget or Budget(8, max_nodes=64))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(len(tree))}


def continuations(documents: Seq[Seq[int]], tail: Seq[int]) -> list[list[int]]:
    n = len(tail)
    return [list(one[at:]) for one in documents for at in range(n, len(one)) if list(one[at - n : at]) == list(tail)]


@given(DOCUMENTS, TEXT)
def test_every_path_followed_the_match_or_half_of_it(documents: list[list[int]], text: list[int]) -> None:
    tree = draft(Rest(Datastore.of(documents), depth=3), text, Budget(3, max_nodes=500))
    longest = max((n for n in range(1, len(text) + 1) if continuations(documents, text[len(text) - n :])), default=0)
    lengths = {longest, longest // 2, longest // 4} - {0}
    rows = [row for n in lengths for row in continuations(documents, text[len(text) - n :])]
    expected = {tuple(row[:depth]) for row in rows for depth in range(1, 1 + min(3, len(row)))}
    assert paths(tree) <= expected
    if longest:  # nothing that followed the longest match is left out, but what is too unlikely to look at
        best = continuations(documents, text[len(text) - longest :])
        assert {tuple(row[:1]) for row in best} <= paths(tree)
    assert tree.is_deterministic


def test_frequent_branches_come_first() -> None:
    documents = [[1, 2, 7, 8], [1, 2, 7, 9], [1, 2, 7, 8], [1, 2, 5, 6]]
    rest = Rest(Datastore.of(documents))
    whole = draft(rest, [1, 2])
    assert paths(whole) == {(7,), (5,), (7, 8), (7, 9), (5, 6)}
    order = [tuple(whole.path_tokens(node)) for node in range(len(whole))]
    assert order[0] == (7,) and order.index((7, 8)) < order.index((7, 9))
    assert whole.path_acceptance_probs == sorted(whole.path_acceptance_probs, reverse=True)
    for nodes in range(len(whole)):
        assert draft(rest, [1, 2], Budget(8, max_nodes=nodes)).tokens == whole.tokens[:nodes]
    assert paths(draft(rest, [1, 2], Budget(1, max_nodes=64))) == {(7,), (5,)}


def test_the_longest_match_decides_and_shorter_ones_add() -> None:
    documents = [[1, 2, 3, 4, 50], *([9, 3, 4, 60], [8, 3, 4, 61])]
    tree = draft(Rest(Datastore.of(documents)), [1, 2, 3, 4])
    assert tree.tokens[0] == 50
    assert set(tree.tokens) == {50, 60, 61}
    assert set(draft(Rest(Datastore.of(documents), occurrences=1), [1, 2, 3, 4]).tokens) == {50}


def test_many_occurrences_are_sampled_over_all_of_them() -> None:
    documents = [[100 + number, 7, 1 + number % 3] for number in range(80)]
    tree = draft(Rest(Datastore.of(documents), occurrences=8), [7])
    assert paths(tree) == {(1,), (2,), (3,)}


def test_short_matches_are_left_alone_on_demand() -> None:
    store = Datastore.of([[1, 2, 3]])
    assert draft(Rest(store, min_match=2), [9, 2]).tokens == []
    assert draft(Rest(store, min_match=2), [1, 2]).tokens == [3]
    assert draft(Rest(store), [9]).tokens == []
    assert draft(Rest(store), [1], Budget(0)).tokens == []


def test_only_what_pays_is_drafted() -> None:
    store = Datastore.of([[*range(1, 30)], [15, 99], [15, 98]])
    free = tuple([1.0] * 65)
    everything = len(draft(Rest(store), [1, 2, 3], Budget(16)))
    assert len(draft(Rest(store), [1, 2, 3], Budget(16, relative_costs=free))) == everything > 3
    dear = tuple(1.0 + 3.0 * count for count in range(65))
    assert len(draft(Rest(store), [1, 2, 3], Budget(16, relative_costs=dear))) == 0
    fair = tuple(1.0 + 0.2 * count for count in range(65))
    assert 0 < len(draft(Rest(store), [1, 2, 3], Budget(16, relative_costs=fair))) < everything


def test_what_fails_is_believed_less() -> None:
    rest = Rest(Datastore.of([list(range(1, 100))]))
    state = begun(rest, [1, 2, 3])
    before = rest.propose(state, Budget(1)).path_acceptance_probs[0]
    for _ in range(20):
        rest.observe(state, commit(state, 150, 1, 2, 3))
        after = rest.propose(state, Budget(1)).path_acceptance_probs[0]
    assert after < 0.5 * before


def test_rates_stay_within_their_namespace() -> None:
    """Only rates are learned, and even these would show, through how fast a text is drafted, what others accept."""
    rest = Rest(Datastore.of([list(range(1, 100))]))
    first = begun(rest, [1, 2, 3], "a")
    for _ in range(20):
        rest.propose(first, Budget(1))
        rest.observe(first, commit(first, 150, 1, 2, 3))
    seen = {}
    for name in ("a", "b", ""):
        seen[name] = rest.propose(begun(rest, [1, 2, 3], name), Budget(1)).path_acceptance_probs[0]
    assert seen["a"] < seen["b"] == seen[""]


def test_priors_ascend_with_what_speaks_for_a_branch() -> None:
    for level in range(3):
        for match in range(1, 5):
            for occurrences in range(1, 5):
                rates = [prior((level, match, occurrences, share)) for share in range(SHARES + 1)]
                assert rates == sorted(rates) and rates[0] > 0 and rates[-1] < 1
                assert prior((level, match, occurrences, 4)) < prior((level, match + 1, occurrences, 4))


# ---------------------------------------------------------------------------------------------------- the method


def context(target: TableTarget, store: Datastore | None) -> Context:
    if store is None:
        return Context(target)
    return Context(target, datastore=lambda: store)


def test_it_asks_for_a_datastore() -> None:
    with pytest.raises(BadInput, match="outpace datastore build"):
        registry.build("rest", context(TableTarget(6), None))


def test_greedy_decoding_is_plain_decoding_in_fewer_rounds(tmp_path: Path) -> None:
    """The corpus holds what the target says, from a file, among texts that begin alike and go on otherwise."""
    target = TableTarget(12, random_table(12, 3))
    plain = Decoder(target)
    expected = plain.submit(Request((1, 2), registry.build("none", context(target, None)), max_new_tokens=80))
    plain.run()
    others = [[*expected.tokens[at : at + 3], 0, 1] for at in range(0, 60, 4)]
    path = tmp_path / "store"
    build_datastore(path, (TokenPiece(one, True) for one in [expected.tokens, *others]), "toy")
    decoder = Decoder(target)
    method = registry.build("rest", context(target, open_datastore(path, "toy")), {"max_nodes": 12, "depth": 6})
    running = [decoder.submit(Request((1, 2), method, max_new_tokens=80)) for _ in range(2)]
    decoder.run()
    for one in running:
        assert one.tokens == expected.tokens
        assert one.metrics.rounds < 25
        assert one.metrics.figures()["mean_acceptance_length"] > 3


def test_it_differs_from_a_chain() -> None:
    """One round tries both ways to go on, which copying the latest cannot."""
    tree = draft(Rest(Datastore.of([[1, 2, 3], [1, 2, 4]])), [1, 2])
    assert set(tree.tokens) == {3, 4} and not tree.is_chain


@pytest.mark.parametrize("settings", [{"max_nodes": 3, "depth": 2, "occurrences": 4}, {"max_nodes": 5, "depth": 1}])
def test_exactly_lossless(settings: dict[str, int]) -> None:
    def make(context: Context) -> Method:
        return registry.build("rest", context, settings)

    certificate = certify_exact("rest", make, rotating_slice(matrix(2), 2, 6))
    assert certificate.lossless is True, certificate.verdict


def test_settings_are_checked() -> None:
    store = Datastore.of([[1, 2]])
    for name in ("max_nodes", "depth", "min_match", "occurrences"):
        with pytest.raises(BadInput, match=name):
            registry.build("rest", context(TableTarget(6), store), {name: -1})
