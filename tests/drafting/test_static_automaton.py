"""The static automaton beside the dynamic one: against brute force, shared, bounded, and the paper's bias."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, strategies as st

from outpace.acceptance.base import Verdict
from outpace.certify.exact import certify_exact, matrix, rotating_slice, tiny_context
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.datastore.store import Datastore
from outpace.drafting.copying import CopyKind
from outpace.drafting.static_automaton import StaticAutomaton, shared_automaton
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods import registry
from outpace.methods.lookup.sam import BIAS, SuffixLookup
from outpace.methods.registry import Context
from outpace.targets.table import TableTarget, random_table

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5)
TEXT = st.lists(st.integers(0, 3), max_size=30)


def count(documents: Seq[Seq[int]], word: Seq[int]) -> int:
    n = len(word)
    return sum(list(one[at : at + n]) == list(word) for one in documents for at in range(len(one) - n + 1))


def followers(documents: Seq[Seq[int]], word: Seq[int]) -> Counter[int]:
    n = len(word)
    return Counter(
        one[at + n] for one in documents for at in range(len(one) - n) if list(one[at : at + n]) == list(word)
    )


@given(DOCUMENTS, TEXT)
def test_the_cursor_stands_at_the_longest_match(documents: list[list[int]], text: list[int]) -> None:
    cursor = StaticAutomaton(documents).cursor()
    for end, token in enumerate(text, start=1):
        cursor.advance([token])
        assert cursor.length == max(n for n in range(end + 1) if not n or count(documents, text[end - n : end]))
        _, length = cursor.match()
        assert length == max(n for n in range(end + 1) if not n or followers(documents, text[end - n : end]))


@given(DOCUMENTS, TEXT.filter(bool))
def test_what_is_copied_is_what_most_often_follows(documents: list[list[int]], text: list[int]) -> None:
    automaton = StaticAutomaton(documents)
    cursor = automaton.cursor()
    cursor.advance(text)
    state, length = cursor.match()
    if not length:
        return
    word = text[len(text) - length :]
    for token in automaton.continuation(state, 6):
        after = followers(documents, word)
        assert after[token] == max(after.values())
        word = [*word, token]
    assert len(automaton.continuation(state, 6)) == 6 or not followers(documents, word)


@given(DOCUMENTS)
def test_occurrences_are_counted(documents: list[list[int]]) -> None:
    automaton = StaticAutomaton(documents)
    for one in documents:
        for start in range(len(one)):
            state = 0
            for end in range(start, len(one)):
                state = automaton.next[state][one[end]]
                assert automaton.count[state] == count(documents, one[start : end + 1])


def test_a_token_moves_the_cursor_in_amortised_constant_time() -> None:
    """Links that are followed: never more than tokens, for every one shortens the match that tokens lengthen by one."""
    rng = random.Random(0)
    automaton = StaticAutomaton([[rng.randrange(3) for _ in range(2000)]])
    followed = 0

    class Links(list[int]):
        def __getitem__(self, state: int) -> int:  # type: ignore[override]
            nonlocal followed
            followed += 1
            return super().__getitem__(state)

    automaton.link = Links(automaton.link)
    cursor = automaton.cursor()
    cursor.advance(rng.randrange(3) for _ in range(3000))
    assert 0 < followed <= 3000


# -------------------------------------------------------------------------------------------- beside the dynamic


def draft(static: StaticAutomaton | None, tokens: Seq[int], depth: int = 4, **options: int) -> list[int]:
    drafter = SuffixLookup(base=depth, static=static, **options)  # type: ignore[arg-type]
    return drafter.propose(drafter.begin(TableTarget(200).sequence(tokens)), Budget(depth)).tokens


CORPUS = list(range(50, 90))


@pytest.mark.parametrize("own", range(4))
def test_the_longer_match_wins_with_a_bias_to_the_text_s_own(own: int) -> None:
    static = StaticAutomaton([CORPUS])
    for longer in range(1, 10):
        tail = CORPUS[20 - own - longer : 20]
        tokens = [1, 2, *CORPUS[20 - own : 20], 99, 98, 3, *tail]
        expected = CORPUS[20:22] if longer > BIAS else [99, 98] if own else []
        assert draft(static, tokens, 2) == expected
        assert draft(static, tokens, 2, bias=0) == CORPUS[20:22]
        assert draft(None, tokens, 2) == ([99, 98] if own else [])


def test_matches_in_the_corpus_have_rates_of_their_own() -> None:
    drafter = SuffixLookup(static=StaticAutomaton([CORPUS]), bias=0)
    one = TableTarget(200).sequence(CORPUS[:3])
    state = drafter.begin(one)
    rate = state.calibration.rate
    before = rate(CopyKind("corpus", 3)), rate(CopyKind("", 3))
    drafter.propose(state, Budget(4))
    one.tokens.append(199)
    drafter.observe(state, Verdict((), 199, committed=(199,)))
    after = rate(CopyKind("corpus", 3)), rate(CopyKind("", 3))
    assert after[0] < before[0] and after[1] == before[1]


@given(TEXT.filter(bool), TEXT, st.integers(1, 3))
def test_steps_of_any_size_lead_to_the_same_draft(prompt: list[int], output: list[int], step: int) -> None:
    static = StaticAutomaton([[0, 1, 2, 0, 1, 1, 2, 2, 3], [3, 2, 1, 0]])
    grown, one = SuffixLookup(static=static, bias=0), TableTarget(9).sequence(prompt)
    state = grown.begin(one)
    for start in range(0, len(output), step):
        one.tokens.extend(output[start : start + step])
        grown.match(state)
    whole = SuffixLookup(static=static, bias=0)
    other = whole.begin(TableTarget(9).sequence([*prompt, *output]))
    assert grown.propose(state, Budget(5)).tokens == whole.propose(other, Budget(5)).tokens


# ------------------------------------------------------------------------------------------------ from a datastore


def context(target: TableTarget, store: Datastore | None = None) -> Context:
    if store is None:
        return Context(target)
    return Context(target, datastore=lambda: store)


def test_it_is_built_once_and_goes_with_its_datastore() -> None:
    store = Datastore.of([[1, 2, 3], [4, 5]])
    automaton = shared_automaton(store, 100)
    assert shared_automaton(store, 5) is automaton
    target = TableTarget(6)
    drafters = [registry.build("sam", context(target, store)).drafter for _ in range(2)]
    assert all(isinstance(one, SuffixLookup) and one.static is automaton for one in drafters)


def test_a_corpus_beyond_the_bound_is_refused() -> None:
    store, target = Datastore.of([[1, 2, 3], [4, 5]]), TableTarget(6)
    with pytest.raises(BadInput, match=r"has 5 tokens.*4 at most.*method rest") as caught:
        registry.build("sam", context(target, store), {"corpus": 4})
    assert "\n" not in str(caught.value)
    assert registry.build("sam", context(target, store), {"corpus": 5}).name == "sam"
    for given_store, settings in ((None, {}), (store, {"corpus": 0})):
        drafter = registry.build("sam", context(target, given_store), settings).drafter
        assert isinstance(drafter, SuffixLookup) and drafter.static is None


def test_greedy_decoding_with_a_corpus_is_plain_decoding_in_fewer_rounds() -> None:
    target = TableTarget(12, random_table(12, 3))
    plain = Decoder(target)
    expected = plain.submit(Request((1, 2), registry.build("none", context(target)), max_new_tokens=60))
    plain.run()
    rounds = {}
    for store in (None, Datastore.of([expected.tokens, [1, 1, 1]])):
        decoder = Decoder(target)
        method = registry.build("sam", context(target, store), {"num_draft_tokens": 6, "bias": 0})
        one = decoder.submit(Request((1, 2), method, max_new_tokens=60))
        decoder.run()
        assert one.tokens == expected.tokens
        rounds[store is None] = one.metrics.rounds
    assert rounds[False] < 0.5 * rounds[True]


def test_exactly_lossless_with_a_corpus() -> None:
    def make(context: Context) -> Method:
        return registry.build("sam", context, {"num_draft_tokens": 2, "bias": 0})

    drafter = make(tiny_context(3, 0)).drafter
    assert isinstance(drafter, SuffixLookup) and drafter.static is not None
    certificate = certify_exact("sam", make, rotating_slice(matrix(1), 1, 6))
    assert certificate.lossless is True, certificate.verdict
