"""Copying that keeps its place: against edits of every kind, repeated words, and lookup that forgets where it was."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.certify.exact import certify_exact, matrix, rotating_slice
from outpace.controllers.base import Budget
from outpace.core.sampling import SamplingParams
from outpace.drafting.alignment import SURE, Alignment
from outpace.drafting.base import Drafter
from outpace.drafting.copying import CopyKind
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.lookup.pld import PromptLookup
from outpace.methods.lookup.sad import AlignedCopy
from outpace.methods.registry import Context
from outpace.targets.table import TableTarget

PROMPT = (0,)


class DraftVocabulary:
    """A vocabulary that grows with what it reads; 0 is the prompt."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<prompt>": 0}

    def __call__(self, text: str) -> tuple[int, ...]:
        return tuple(self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\w+|[^\w\s]|\n| +", text))


def writes(answer: Seq[int], start: int = 1, size: int = 500) -> TableTarget:
    """A target that writes this answer after a prompt of ``start`` tokens, whatever it is asked."""

    def table(path: tuple[int, ...]) -> Tensor:
        logits = torch.zeros(size)
        at = len(path) - start
        logits[answer[at] if at < len(answer) else 0] = 20.0
        return logits

    return TableTarget(size, table, context_length=4000)


def decode(
    name: str, source: Seq[int], answer: Seq[int], settings: Mapping[str, bool] | None = None, in_prompt: bool = False
) -> Generation:
    """The answer, decoded greedily with the source as the reference (or within the prompt)."""
    prompt = (*PROMPT, *source, 0) if in_prompt else PROMPT
    target = writes(answer, len(prompt))
    method = registry.build(name, Context(target), {"num_draft_tokens": 8, **(settings or {})})
    decoder = Decoder(target)
    one = decoder.submit(
        Request(prompt, method, max_new_tokens=len(answer), references=() if in_prompt else (tuple(source),))
    )
    decoder.run()
    assert tuple(one.tokens) == tuple(answer)
    return one


def rounds(name: str, source: Seq[int], answer: Seq[int], in_prompt: bool = False, **settings: bool) -> int:
    return decode(name, source, answer, settings, in_prompt=in_prompt).metrics.rounds


# ------------------------------------------------------------------------------------------- finding the place


def place(source: Seq[int], output: Seq[int], **options: object) -> int | None:
    alignment = Alignment([source], **options)  # type: ignore[arg-type]
    alignment.advance(output)
    return alignment.cursor


SOURCE = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("output", "cursor"),
    [
        ([], 0),
        ([10, 11], 2),
        ([10, 11, 99], None),
        ([10, 11, 99, 13], 4),  # replaced
        ([10, 11, 99, 12], 3),  # inserted
        ([10, 11, 13], 4),  # deleted
        ([10, 11, 98, 99, 12], 3),  # two inserted
        ([10, 11, 15], 6),  # three deleted
        ([99, 98, 97, 10], 1),  # a beginning of its own
        ([10, 11, 99, 13, 14, 98, 16], 7),  # one edit after another
        ([15, 16], 7),  # the beginning dropped
    ],
)
def test_after_every_kind_of_edit_copying_resumes(output: list[int], cursor: int | None) -> None:
    assert place(SOURCE, output) == cursor


def test_without_realignment_the_first_edit_ends_it() -> None:
    assert place(SOURCE, [10, 11, 99, 13, 14, 15], realign=False) is None
    assert place(SOURCE, [10, 11], realign=False) == 2


def test_a_place_in_doubt_is_waited_out() -> None:
    source = [1, 2, 7, 3, 7, 4, 7, 5]
    assert place(source, [1, 2, 99]) is None
    assert place(source, [1, 2, 99, 98, 7]) is None  # one word replaced and one inserted, or two inserted
    assert place(source, [1, 2, 99, 98, 7, 4]) == 6
    assert place(source, [1, 2, 99, 98, 7, 3]) == 4


def test_of_words_that_come_again_the_near_one_is_meant() -> None:
    source = [1, 2, 7, 3, *range(100, 108), 7, 4]
    assert place(source, [1, 2, 99, 7]) == 3
    assert place(source, [1, 2, 3, *range(100, 106), 99, 7]) == 13


def test_a_source_that_repeats_itself_is_followed_at_the_nearest_place() -> None:
    line = list(range(20, 20 + SURE + 1))
    source = [1, 2, *line, 3, *line, 4, *line, 5]
    assert place(source, [1, 2, 99, *line]) == 2 + len(line)
    start = len(line) + 3
    assert place(source, [1, 2, *line, 3, 98, *line]) == start + len(line)


def test_a_chance_match_does_not_lose_the_place() -> None:
    """An inserted word that stands once further on is followed for one token, and forgotten."""
    source = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert place(source, [1, 2, 7]) == 7
    assert place(source, [1, 2, 7, 3]) == 3
    assert place(source, [1, 2, 7, 3, 4, 99, 6]) == 6


def test_what_was_moved_is_found_anywhere() -> None:
    first, second = list(range(100, 180)), list(range(200, 280))
    source = [*first, *second]
    assert place(source, second[:1]) is None
    assert place(source, second[:2]) == 82
    assert place(source, [*second, *first[:2]]) == 2
    assert place(source, [*second, first[0]], window=200) == 1


def test_sources_are_never_run_together() -> None:
    alignment = Alignment([[1, 2, 3], [4, 5, 6]])
    alignment.advance([1, 2, 3])
    assert alignment.text[alignment.cursor or 0] < 0
    alignment.advance([4, 5])
    assert alignment.cursor == 6


def test_the_guess_is_the_likeliest_place_in_doubt() -> None:
    source = [1, 2, 7, 3, 7, 4, 7, 5]
    alignment = Alignment([source])
    alignment.advance([1, 2, 99])
    assert alignment.guess() == 3  # as if one word had been replaced
    alignment.advance([7])
    assert alignment.cursor == 3
    assert Alignment([source], realign=False).guess() is None
    assert Alignment([source], started=False).guess() is None


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 3))
def test_the_cursor_always_stands_after_what_was_written(source: list[int], output: list[int], least: int) -> None:
    alignment = Alignment([source], min_match=least)
    for count, token in enumerate(output, start=1):
        alignment.advance([token])
        if alignment.cursor is None:
            continue
        matched = alignment.matched
        assert matched >= 1
        tail, before = output[:count], source[: alignment.cursor]
        assert tail[count - matched :] == before[len(before) - matched :]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_steps_of_any_size_lead_to_the_same_place(source: list[int], output: list[int], step: int) -> None:
    one, other = Alignment([source]), Alignment([source])
    one.advance(output)
    for start in range(0, len(output), step):
        other.advance(output[start : start + step])
    assert (one.cursor, one.matched, one.guess()) == (other.cursor, other.matched, other.guess())


# ------------------------------------------------------------------------------------- grammar and code, edited

GRAMMAR = (
    "The cat sit on the mat and the dog sit on the rug . The cat are happy because the cat have a mat and the dog are "
    "sad because the dog have a rug . Yesterday the cat go to the garden and the dog go to the garden and the cat see "
    "the dog and the dog see the cat . "
)
FIXES = {"sit": "sits", "are": "is", "have": "has", "go": "went", "see": "saw"}
CODE = "".join(
    f"    if kind == {number}:\n        value = table.read(key, {number})\n        total = total + value\n"
    for number in range(6)
)


def corrected(text: str) -> str:
    return " ".join(FIXES.get(word, word) for word in text.split(" "))


def renamed(text: str) -> str:
    return text.replace("value", "entry").replace("table.read(key", "table.fetch(path")


EDITS: list[tuple[str, Callable[[str], str]]] = [(GRAMMAR, corrected), (CODE, renamed)]


@pytest.mark.parametrize(("text", "edit"), EDITS, ids=["grammar", "code"])
@pytest.mark.parametrize("in_prompt", [False, True], ids=["reference", "prompt"])
def test_it_beats_lookup_where_words_come_again(text: str, edit: Callable[[str], str], in_prompt: bool) -> None:
    words = DraftVocabulary()
    source, answer = words(text), words(edit(text))
    assert source != answer
    kept = rounds("sad", source, answer, in_prompt)
    paper = rounds("sad", source, answer, in_prompt, guess=False)
    for name in ("pld", "sam", "llma"):
        assert kept < rounds(name, source, answer, in_prompt)
    assert kept < paper <= rounds("llma", source, answer, in_prompt, align=False)


@pytest.mark.parametrize(("text", "edit"), EDITS, ids=["grammar", "code"])
def test_without_realignment_it_does_not(text: str, edit: Callable[[str], str]) -> None:
    words = DraftVocabulary()
    source, answer = words(text), words(edit(text))
    off = rounds("sad", source, answer, realign=False)
    assert off > rounds("pld", source, answer) > rounds("sad", source, answer)
    assert off > 0.8 * len(answer)


@pytest.mark.parametrize(("text", "edit"), EDITS, ids=["grammar", "code"])
def test_llma_keeps_its_place_too(text: str, edit: Callable[[str], str]) -> None:
    words = DraftVocabulary()
    source, answer = words(text), words(edit(text))
    assert rounds("llma", source, answer) < rounds("llma", source, answer, align=False)
    assert rounds("llma", source, answer, in_prompt=True) < rounds("llma", source, answer, in_prompt=True, align=False)


def test_most_rounds_draft_and_most_of_it_is_accepted() -> None:
    words = DraftVocabulary()
    one = decode("sad", words(GRAMMAR), words(corrected(GRAMMAR)))
    assert one.metrics.figures()["mean_acceptance_length"] > 3
    assert one.metrics.accepted > 0.4 * one.metrics.drafted


def test_an_unchanged_text_is_copied_whole() -> None:
    source = DraftVocabulary()(GRAMMAR)
    assert rounds("sad", source, source) == -(-len(source) // 9)


def edited(source: Seq[int], rng: random.Random) -> list[int]:
    """One word in ten dropped, replaced or followed by another."""
    answer: list[int] = []
    for token in source:
        kind = rng.random()
        if kind >= 0.033:
            answer.append(token if kind >= 0.066 else rng.randrange(1, 12))
        if kind > 0.966:
            answer.append(rng.randrange(1, 12))
    return answer


def test_random_edits_of_random_texts() -> None:
    """Texts of few words, so that every n-gram comes again."""
    took = dict.fromkeys(("pld", "llma", "sad"), 0)
    for seed in range(5):
        rng = random.Random(seed)
        source = [rng.randrange(1, 12) for _ in range(300)]
        answer = edited(source, rng)
        for name in took:
            took[name] += rounds(name, source, answer)
    assert took["sad"] < 0.9 * took["pld"]
    assert took["llma"] < 0.9 * took["pld"]


# ---------------------------------------------------------------------------------------------------- the method


def draft(drafter: Drafter[Any], source: Seq[int], output: Seq[int], depth: int = 4) -> list[int]:
    sequence = TableTarget(100).sequence(PROMPT, references=(tuple(source),))
    state = drafter.begin(sequence)
    sequence.tokens.extend(output)
    tree = drafter.propose(state, Budget(depth))
    assert tree.is_chain and tree.is_deterministic
    return tree.tokens


def test_the_draft_is_the_source_from_the_cursor_on() -> None:
    assert draft(AlignedCopy(), SOURCE, []) == [10, 11, 12, 13]
    assert draft(AlignedCopy(), SOURCE, [10, 99, 12]) == [13, 14, 15, 16]
    assert draft(AlignedCopy(), SOURCE, SOURCE) == []
    assert draft(AlignedCopy(), SOURCE, [10, 99]) == [12, 13, 14, 15]
    assert draft(AlignedCopy(guess=False), SOURCE, [10, 99]) == []
    assert draft(AlignedCopy(realign=False), SOURCE, [10, 99, 12]) == []


def test_it_differs_from_its_neighbours() -> None:
    """Where the source repeats itself each lookup has its own favourite; the alignment knows where it is."""
    source = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6]
    assert draft(AlignedCopy(), source, [1, 2, 3, 4, 1, 2, 3], 1) == [5]
    assert draft(PromptLookup(1, 3), source, [1, 2, 3, 4, 1, 2, 3], 1) == [4]  # its own output, lately
    assert draft(PromptLookup(1, 3, own_text=False), source, [1, 2, 3, 4, 1, 2, 3], 1) == [6]


def test_guesses_have_a_rate_of_their_own() -> None:
    drafter = AlignedCopy()
    sequence = TableTarget(100).sequence(PROMPT, references=(tuple(range(1, 60)),))
    state = drafter.begin(sequence)
    sequence.tokens.extend([1, 2, 99])
    rates = state.calibration.rate
    before = rates(CopyKind("guess", 0)), rates(CopyKind("", 1))
    for _ in range(5):
        drafter.propose(state, Budget(1))
        sequence.tokens.append(99)
        drafter.observe(state, Verdict((), 99, committed=(99,)))
    assert rates(CopyKind("guess", 0)) < before[0] and rates(CopyKind("", 1)) == before[1]


@pytest.mark.parametrize("name", ["sad", "llma"])
def test_exactly_lossless(name: str) -> None:
    def make(context: Context) -> Method:
        return registry.build(name, context, {"num_draft_tokens": 2})

    certificate = certify_exact(name, make, rotating_slice(matrix(3), 4, 6))
    assert certificate.lossless is True, certificate.verdict


def test_sampled_answers_are_drafted_too() -> None:
    words = DraftVocabulary()
    source = words(GRAMMAR)
    target = writes(source)
    method = registry.build("sad", Context(target), {"num_draft_tokens": 4})
    decoder = Decoder(target)
    one = decoder.submit(
        Request(PROMPT, method, SamplingParams(temperature=1.0), max_new_tokens=60, references=(source,))
    )
    decoder.run()
    assert one.metrics.accepted > 40
