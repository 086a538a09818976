"""Prompts about passages."""

import itertools
from collections import Counter

from outpace.prompts.passages import SHORTEST, PassagePrompts

TEXTS = [
    " ".join(f"Word{at}a{number} and word{at}b{number} met word{at}c{number} there." for at in range(12))
    for number in range(61)
]


def made(seed: int = 0) -> PassagePrompts:
    found = PassagePrompts(seed)
    for number, text in enumerate(TEXTS):
        found.add(f"question {number}?", text)
    return found


def test_every_text_is_asked_about_and_neighbours_share_one_at_most() -> None:
    prompts = made()
    assert len(prompts) == 30
    used = [{text for text in TEXTS if text in prompts.prompt(number).text} for number in range(len(prompts))]
    assert all(1 <= len(some) <= 3 for some in used)
    assert all(len(one & other) <= 1 for one, other in itertools.pairwise(used))
    assert all(TEXTS[2 * number] in some for number, some in enumerate(used))
    forms = Counter("question" in prompts.prompt(number).text.lower() for number in range(len(prompts)))
    assert min(forms[True], forms[False]) > 3  # questions with passages, and summaries


def test_the_same_number_is_the_same_prompt_and_another_seed_another() -> None:
    first, again, other = made(), made(), made(1)
    assert [first.prompt(at) for at in range(30)] == [again.prompt(at) for at in range(30)]
    assert [first.prompt(at).text for at in range(30)] != [other.prompt(at).text for at in range(30)]
    # More texts change nothing that was there before.
    again.add("one more?", TEXTS[0])
    assert [first.prompt(at) for at in range(30)] == [again.prompt(at) for at in range(30)]


def test_a_question_comes_with_the_text_that_answered_it() -> None:
    prompts = made()
    asks = [prompts.prompt(number).text for number in range(30)]
    questions = [(number, text) for number, text in enumerate(asks) if "question " in text]
    assert questions
    for number, text in questions:
        assert f"question {2 * number}?" in text
        assert TEXTS[2 * number] in text


def test_what_is_short_or_repeats_itself_is_no_text() -> None:
    prompts = PassagePrompts()
    for answer in (TEXTS[0][: SHORTEST - 1], "no sentence ends here " * 40, "The same thing again and again. " * 40):
        for _ in range(4):
            prompts.add("why?", answer)
    assert len(prompts) == 0
    for _ in range(3):
        prompts.add("why?", TEXTS[0] + " And this was cut off in the mid")
    assert len(prompts) == 1
    assert "cut off" not in prompts.prompt(0).text
