"""Prompt lookup and the suffix automaton against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.drafting.base import Drafter
from outpace.drafting.copying import continuation, separated
from outpace.drafting.ngram_index import NgramIndex, Prefer
from outpace.drafting.suffix_automaton import SuffixAutomaton
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request, check_references
from outpace.methods import registry
from outpace.methods.lookup.pld import PromptLookup
from outpace.methods.lookup.sam import SuffixLookup
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget, random_table

TEXT = st.lists(st.integers(0, 2), max_size=40)
SMALL = settings(max_examples=150, deadline=None)


def sequence(tokens: Seq[int], references: Seq[Seq[int]] = ()) -> Sequence:
    return TableTarget(100).sequence(tokens, references=tuple(tuple(one) for one in references))


def draft(drafter: Drafter[Any], tokens: Seq[int], depth: int = 4, references: Seq[Seq[int]] = ()) -> list[int]:
    tree = drafter.propose(drafter.begin(sequence(tokens, references)), Budget(depth))
    assert tree.is_chain and tree.is_deterministic
    return tree.tokens


# ------------------------------------------------------------------------------------------------- brute force


def occurrences(text: Seq[int], tail: Seq[int]) -> list[int]:
    """Positions after every occurrence of ``tail`` in ``text`` that is followed by a token."""
    n = len(tail)
    return [
        i + n for i in range(len(text) - n) if list(text[i : i + n]) == list(tail) and text[i + n] >= 0
    ]  # fmt: skip


def longest_repeated_suffix(text: Seq[int]) -> tuple[int, list[int]]:
    """Length of the longest suffix that occurs earlier, and the positions after those occurrences."""
    for n in range(len(text) - 1, 0, -1):
        if found := occurrences(text, text[len(text) - n :]):
            return n, found
    return 0, []


# ------------------------------------------------------------------------------------------------ continuation


@given(TEXT.filter(bool), st.data())
@SMALL
def test_a_periodic_continuation_reads_what_it_just_wrote(text: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    count = data.draw(st.integers(0, 60))
    written = list(text)
    for index in range(count):
        written.append(written[start + index])
    assert continuation(text, start, count, periodic=True) == written[start : start + count]
    assert continuation(text, start, count, periodic=False) == text[start : start + count]


def test_a_continuation_ends_before_a_separator() -> None:
    text = separated([[1, 2, 3], [4, 5]])
    assert text == [1, 2, 3, -1, 4, 5, -2]
    assert continuation(text, 1, 10, periodic=True) == [2, 3]
    assert continuation(text, 4, 10, periodic=True) == [4, 5]


# ----------------------------------------------------------------------------------------------- prompt lookup


@pytest.mark.parametrize("prefer", ["latest", "earliest"])
@given(
    references=st.lists(TEXT, max_size=2),
    text=TEXT.filter(bool),
    ngrams=st.tuples(st.integers(1, 4), st.integers(0, 3)),
)
@SMALL
def test_lookup_is_the_longest_ngram_by_brute_force(
    prefer: Prefer, references: list[list[int]], text: list[int], ngrams: tuple[int, int]
) -> None:
    low, high = ngrams[0], ngrams[0] + ngrams[1]
    whole = [*separated(references), *text]
    expected = None
    for n in range(min(high, len(text)), low - 1, -1):
        if found := occurrences(whole, text[len(text) - n :]):
            expected = ((max if prefer == "latest" else min)(found), n)
            break
    index = NgramIndex(low, high, prefer)
    index.extend(whole)
    assert index.find(text) == expected


@given(TEXT.filter(bool), TEXT, st.integers(1, 3))
@SMALL
def test_a_growing_index_equals_one_built_at_once(prompt: list[int], output: list[int], step: int) -> None:
    makers: list[Callable[[], Drafter[Any]]] = [
        lambda: PromptLookup(1, 3),
        SuffixLookup,
        lambda: SuffixLookup(prefer="earliest"),
    ]
    for make in makers:
        grown, one = make(), sequence(prompt, [[0, 1, 2, 0]])
        state = grown.begin(one)
        for start in range(0, len(output), step):
            one.tokens.extend(output[start : start + step])
            tree = grown.propose(state, Budget(5))
            assert tree.tokens == draft(make(), one.tokens, 5, [[0, 1, 2, 0]])


def test_lookup_prefers_the_longest_match_then_the_latest() -> None:
    tokens = [1, 2, 3, 9, 8, 2, 3, 5, 1, 2, 3]
    assert draft(PromptLookup(1, 3), tokens, 2) == [9, 8]
    assert draft(PromptLookup(1, 2), tokens, 2) == [5, 1]
    assert draft(PromptLookup(1, 2, "earliest"), tokens, 2) == [9, 8]
    assert draft(PromptLookup(4, 4), tokens) == []


def test_loops_are_drafted_past_the_end_of_the_text() -> None:
    for drafter in (PromptLookup(1, 3), SuffixLookup(base=8)):
        assert draft(drafter, [7, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
        assert draft(drafter, [5, 5], 4) == [5, 5, 5, 5]


def test_references_are_copied_from_and_never_across() -> None:
    references = [[10, 11, 12], [20, 21]]
    for drafter in (PromptLookup(1, 3), PromptLookup(1, 3, own_text=False), SuffixLookup(base=8)):
        assert draft(drafter, [1, 10], 8, references) == [11, 12]
        assert draft(drafter, [1, 12], 8, references) == []  # what follows 12 is another text
        assert draft(drafter, [1, 21], 8, references) == []  # the prompt does not continue a reference


def test_llma_reads_references_only_and_the_prompt_without_them() -> None:
    assert draft(PromptLookup(1, 3, own_text=False), [1, 2, 1], 1, [[9, 9]]) == []
    drafter, one = PromptLookup(1, 3, own_text=False), sequence([1, 2, 3, 1])
    state = drafter.begin(one)
    assert drafter.propose(state, Budget(9)).tokens == [2, 3, 1]  # the prompt's end is not the text's end
    one.tokens.extend([5, 6, 5])
    assert len(drafter.propose(state, Budget(9))) == 0  # the output is not searched


# -------------------------------------------------------------------------------------------- suffix automaton


@given(TEXT)
@SMALL
def test_the_automaton_accepts_exactly_the_substrings(text: list[int]) -> None:
    sam = SuffixAutomaton()
    sam.extend(text)
    n = len(text)
    assert len(sam.length) <= max(1, 2 * n)
    assert sum(len(one) for one in sam.next) <= max(0, 3 * n)
    substrings = {tuple(text[i:j]) for i in range(n) for j in range(i, n + 1)} or {()}
    # Distinct paths from the start are distinct substrings, and each state holds length - length(link) of them.
    assert sum(sam.length[s] - sam.length[sam.link[s]] for s in range(1, len(sam.length))) + 1 == len(substrings)
    for word in substrings:
        state = 0
        for token in word:
            state = sam.next[state][token]
        if word:
            assert sam.length[sam.link[state]] < len(word) <= sam.length[state]
            end = sam.end[state] + 1
            assert tuple(text[end - len(word) : end]) == word


@pytest.mark.parametrize("prefer", ["latest", "earliest"])
@given(text=TEXT)
@SMALL
def test_the_match_is_the_longest_repeated_suffix(prefer: Prefer, text: list[int]) -> None:
    sam = SuffixAutomaton(prefer)
    for count, token in enumerate(text, start=1):
        sam.extend([token])
        length, ends = longest_repeated_suffix(text[:count])
        assert sam.match_length == length
        if length:
            assert sam.match_end + 1 in ends
            if prefer == "earliest":
                assert sam.match_end + 1 == min(ends)


@given(TEXT.filter(bool))
@SMALL
def test_rivals_are_the_other_tokens_that_followed_the_match(text: list[int]) -> None:
    sam = SuffixAutomaton()
    sam.extend(text)
    length, places = longest_repeated_suffix(text)
    assert sam.rivals == (len({text[at] for at in places}) - 1 if length else 0)


def test_a_copy_after_an_ambiguous_match_is_expected_to_be_right_less_often() -> None:
    def stated(tokens: list[int]) -> float:
        drafter = SuffixLookup()
        return drafter.propose(drafter.begin(sequence(tokens)), Budget(1)).path_acceptance_probs[0]

    assert stated([7, 1, 8, 1]) > 1.5 * stated([7, 1, 8, 1, 9, 1]) > 1.5 * 1.1 * stated([1, 6, 1, 8, 1, 9, 1, 5, 1])


def test_the_latest_match_is_the_latest_in_random_text() -> None:
    rng = random.Random(0)
    text = [rng.randrange(4) for _ in range(150)]
    sam = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        sam.extend([token])
        length, ends = longest_repeated_suffix(text[:count])
        assert not length or sam.match_end + 1 == max(ends)


def test_longer_matches_draft_more() -> None:
    rng = random.Random(1)
    source = [rng.randrange(50, 90) for _ in range(60)]
    drafter = SuffixLookup(min_match=2, base=1, slope=2.0)
    for match in range(8):
        tokens = [*source, 99, *source[20 : 20 + match]]
        drafted = draft(drafter, tokens, 12)
        expected = 0 if match < 2 else min(12, 1 + 2 * match)
        assert drafted == source[20 + match : 20 + match + expected]


# ------------------------------------------------------------------------------------------------- as methods


def context(target: TableTarget) -> Context:
    return Context(target)


@pytest.mark.parametrize("name", ["pld", "llma", "sam"])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_decoding_is_plain_decoding(name: str, seed: int) -> None:
    target = TableTarget(6, random_table(6, seed))
    plain = Method("none", NoDraft(), RecursiveRejection(), Fixed(0))
    # By measured costs a table need not draft at all.
    copying = registry.build(name, context(target), {"num_draft_tokens": 6})
    prompts = [(seed, 1, 2, 1, last) for last in range(3)]

    def decode(method: Method, references: tuple[tuple[int, ...], ...]) -> list[Generation]:
        decoder = Decoder(target)
        running = [
            decoder.submit(Request(prompt, method, max_new_tokens=40, references=references and (references[index],)))
            for index, prompt in enumerate(prompts)
        ]
        decoder.run()
        return running

    expected = [tuple(one.tokens) for one in decode(plain, ())]
    drafted = decode(copying, tuple(tokens[5:] for tokens in expected))
    assert [tuple(one.tokens) for one in drafted] == expected
    assert all(one.metrics.accepted > 0 and one.metrics.rounds < 40 for one in drafted)


def test_settings_are_checked() -> None:
    target = TableTarget(6)
    with pytest.raises(BadInput, match="must not exceed"):
        registry.build("pld", context(target), {"min_ngram": 4, "max_ngram": 3})
    with pytest.raises(BadInput, match="min_match"):
        registry.build("sam", context(target), {"min_match": 0})
    with pytest.raises(BadInput, match="num_draft_token"):
        registry.build("llma", context(target), {"num_draft_token": 3})


def test_nothing_is_drafted_beyond_the_budget() -> None:
    def drafted(drafter: Drafter[Any], budget: Budget) -> int:
        return len(drafter.propose(drafter.begin(sequence([1, 1, 1])), budget))

    for drafter in (PromptLookup(1, 3), SuffixLookup(base=50)):
        for budget, count in ((Budget(0), 0), (Budget(9, max_nodes=4), 4), (Budget(3), 3)):
            assert drafted(drafter, budget) == count


def test_references_beyond_memory_are_refused() -> None:
    check_references([], 0)
    check_references([(1, 2), (3,)], 1800)
    with pytest.raises(BadInput, match=r"the references have 3 tokens.*outpace datastore build") as caught:
        check_references([(1, 2), (3,)], 1799)
    assert "\n" not in str(caught.value)


def test_a_request_with_too_many_references_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableTarget(6)
    decoder, method = Decoder(target), registry.build("pld", context(target), {"num_draft_tokens": 2})
    first = decoder.submit(Request((1, 2), method, max_new_tokens=3, references=((1, 2, 3),)))
    monkeypatch.setattr("outpace.core.machine.free_memory", lambda: 600)
    with pytest.raises(BadInput, match="references"):
        decoder.submit(Request((1, 2), method, max_new_tokens=3, references=((1, 2, 3),)))
    decoder.run()
    assert len(first.tokens) == 3


def test_a_reference_file_beyond_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.cli.session import read_texts

    path = tmp_path / "long.txt"
    path.write_text("x" * 1000)
    assert read_texts([path]) == ("x" * 1000,)
    monkeypatch.setattr("outpace.cli.session.free_memory", lambda: 15_999)
    with pytest.raises(BadInput, match="does not fit into memory"):
        read_texts([path])


@pytest.mark.parametrize("match", [1, 3, 14, 15, 16, 40])
def test_a_copied_path_is_as_likely_as_its_tokens_kinds(match: int) -> None:
    text = [*range(match), *range(50, 90), *range(match)]
    drafter = SuffixLookup()
    state = drafter.begin(sequence(text))
    tree = drafter.propose(state, Budget(30, relative_costs=(1.0,) * 31))
    expected = 1.0
    for kind, token, drafted, prob in zip(*state.copied, tree.tokens, tree.path_acceptance_probs, strict=True):
        expected *= state.calibration.rate(kind)
        assert (token, prob) == (drafted, expected)
    lengths = [kind.length for kind in state.copied[0]]
    assert lengths == [min(match + behind, 16) for behind in range(30)]
