"""Whether batches draft, by what their rounds have shown."""

from __future__ import annotations

import random

import pytest

from outpace.controllers.payoff import FIRST_RUN, REFERENCE, SELDOM, TRIAL, TURNS, Payoff


def spent(gain: float, rounds: int, *, noise: float = 0.0, payoff: Payoff | None = None) -> tuple[float, int]:
    """Seconds a token, and rounds with drafts, where drafts bring ``gain`` times the tokens per second."""
    payoff, chance = payoff or Payoff(), random.Random(3)
    seconds = tokens = 0.0
    drafted = 0
    for _ in range(rounds):
        took = 1.0 + noise * (chance.random() - 0.5)
        drafted += payoff.drafts
        got = 1.3 if payoff.drafts else 1.0
        took *= 1.3 / gain if payoff.drafts else 1.0
        payoff.saw(got, took)
        seconds, tokens = seconds + took, tokens + got
    return seconds / tokens, drafted


def test_drafts_that_lose_are_given_up_and_tried_again_at_little_cost() -> None:
    for gain in (0.97, 0.9, 0.7):
        rate, drafted = spent(gain, 4000)
        assert rate < 1.025  # a hundredth or two for trials, and the beginning
        assert drafted > TURNS * (FIRST_RUN + TRIAL)
    assert spent(0.97, 4000)[1] > 2 * spent(0.7, 4000)[1]  # what loses little is tried more often


def test_drafts_that_gain_go_on() -> None:
    rate, drafted = spent(1.2, 4000)
    assert drafted > 3700
    assert rate < 1.015 / 1.2


def test_without_a_clock_rounds_without_drafts_show_nothing_and_are_not_asked_for() -> None:
    def drafted(steps: float) -> int:
        payoff, found = Payoff(clocked=False), 0
        for _ in range(1000):
            found += payoff.drafts
            payoff.saw(*((1.3, steps, 0.1, 0.0, steps - 0.1) if payoff.drafts else (1.0, 1.0)))
            assert len(payoff._run) <= SELDOM, "of a long run the beginning is not kept"
        return found

    assert drafted(1.1) == 1000
    assert TURNS * FIRST_RUN < drafted(1.5) < 100


def test_a_change_is_noticed() -> None:
    payoff = Payoff()
    spent(0.9, 2000, payoff=payoff)
    assert not payoff.drafts
    _, drafted = spent(1.3, 4000, payoff=payoff)
    assert drafted > 3300


@pytest.mark.parametrize("before", [300, 450, 600])
def test_drafts_that_bring_fewer_tokens_are_given_up_before_the_next_comparison_is_due(before: int) -> None:
    def run(tokens: float, rounds: int) -> int:
        drafted = 0
        for _ in range(rounds):
            drafted += payoff.drafts
            payoff.saw(*((tokens, 1.3) if payoff.drafts else (1.0, 1.0)))
        return drafted

    payoff = Payoff()
    run(1.9, before)
    assert payoff.better
    assert run(1.0, 300) < 130
    assert run(1.9, 2500) > 800, "and tried again after about as long as they paid"


def test_a_machine_that_becomes_slower_is_no_reason_to_compare_again() -> None:
    payoff = Payoff()
    spent(1.5, 100, payoff=payoff)
    drafted = 0
    for _ in range(200):
        drafted += payoff.drafts
        payoff.saw(*((1.3, 2.0 * 1.3 / 1.5) if payoff.drafts else (1.0, 2.0)))
    assert drafted >= 200 - REFERENCE, "one reference was due"


def test_what_costs_expect_of_a_round_is_not_held_against_its_tokens() -> None:
    """Long drafts of a text that is copied, and then short ones: both pay, at any size."""
    payoff = Payoff()
    for number in range(600):
        steps = 2.0 if number % 200 < 100 else 1.2
        drafts = payoff.drafts
        payoff.saw(1.1 * steps if drafts else 1.0, steps if drafts else 1.0, expected=steps if drafts else 1.0)
        assert payoff.better, number


def test_texts_that_suit_drafts_are_noticed_soon() -> None:
    """Tasks of 200 rounds by turns, in which drafts of 1.1 steps bring 1.0 or 1.4 tokens."""
    right, chance = 0, random.Random(9)
    payoff = Payoff()
    for number in range(4000):
        tokens = 1.0 if number // 200 % 2 else 1.4
        right += payoff.drafts == (tokens > 1.2)
        payoff.saw(tokens + 0.2 * (chance.random() - 0.5) if payoff.drafts else 1.0, 1.1 if payoff.drafts else 1.0)
    assert right > 3200, right


def test_one_trial_that_looked_well_does_not_bind_a_batch_that_began_at_rest() -> None:
    larger = Payoff()
    larger.better = False
    payoff = Payoff(like=larger)
    drafted = 0
    for _ in range(120):
        drafted += payoff.drafts
        payoff.saw(*((2.0 if drafted < 5 else 0.9, 1.0) if payoff.drafts else (1.0, 1.0)))
    assert not payoff.better
    assert 8 <= drafted < 60


def test_what_a_trial_reads_keeps_the_next_one_away() -> None:
    """Unless it was but once: something else held that draft up."""

    def trials(reading: float, times: int) -> int:
        payoff, begun, drafted = Payoff(), 0, False
        for _ in range(2000):
            begins = payoff.drafts and not drafted
            spent = 0.1 + (reading if begins and 5 < begun < 6 + times else 0.0)
            begun, drafted = begun + begins, payoff.drafts
            payoff.saw(*((1.0, 1.05 + spent, spent) if payoff.drafts else (1.0, 1.0)))
        return begun

    usual = trials(0.0, 0)
    assert trials(30.0, 1) > 0.9 * usual
    assert trials(3.0, 1000) < 0.5 * usual


@pytest.mark.parametrize("stalls", [0.02, 0.1])
@pytest.mark.parametrize("gain", [0.85, 1.15])
def test_noise_and_stalls_do_not_decide(gain: float, stalls: float) -> None:
    payoff, chance = Payoff(), random.Random(5)
    better = 0
    for _ in range(3000):
        took = (1.3 / gain if payoff.drafts else 1.0) * (1.0 + 0.2 * (chance.random() - 0.5))
        if chance.random() < stalls:
            took *= 20.0
        better += payoff.drafts == (gain > 1.0)
        payoff.saw(1.3 if payoff.drafts else 1.0, took)
    assert better > (2700 if stalls < 0.05 else 2400)


def test_prompts_that_drafts_read_first_are_a_part_of_what_drafting_takes() -> None:
    """A few rounds hold all of that time: left out as outliers, drafts that lose would seem to gain."""
    payoff, seconds, tokens = Payoff(), 0.0, 0.0
    for number in range(6000):
        reading = 8.0 if payoff.drafts and number % 16 == 0 else 0.0
        took = 1.1 + reading if payoff.drafts else 1.0
        got = 1.3 if payoff.drafts else 1.0
        payoff.saw(got, took, reading)
        seconds, tokens = seconds + took, tokens + got
    assert not payoff.better
    assert seconds / tokens < 1.04


@pytest.mark.parametrize("gain", [0.9, 1.1, 1.3])
def test_a_machine_that_changes_its_speed_does_not_decide(gain: float) -> None:
    """It is half as fast again for some 40 rounds, then for as long not, on and on: as beside other users."""
    right = rounds = 0
    for seed in range(40):
        payoff, chance = Payoff(), random.Random(seed)
        slow, left = 1.0, 0.0
        for _ in range(1000):
            if left <= 0.0:
                slow, left = 2.5 - slow, chance.expovariate(1 / 40)
            left -= 1.0
            took = slow * (1.0 + 0.1 * (chance.random() - 0.5)) * (1.3 / gain if payoff.drafts else 1.0)
            right += payoff.drafts == (gain > 1.0)
            rounds += 1
            payoff.saw(1.3 if payoff.drafts else 1.0, took, 0.2 * took if payoff.drafts else 0.0)
    assert right > 0.85 * rounds, right / rounds


@pytest.mark.parametrize(("least", "most", "gains"), [(0.95, 1.2, True), (0.97, 1.3, True), (0.8, 0.95, False)])
def test_drafters_that_learn_from_their_drafts_are_given_time(least: float, most: float, gains: bool) -> None:
    """They bring ``least`` times the tokens per second after a rest, and nearly ``most`` after a hundred drafts."""
    drafted = rounds = 0
    for seed in range(30):
        payoff, chance, learned = Payoff(), random.Random(seed), 0.0
        for _ in range(1500):
            learned += ((1.0 if payoff.drafts else 0.0) - learned) / 40
            gain = least + learned * (most - least)
            got = 1.3 * (0.5 + chance.random()) if payoff.drafts else 1.0
            took = (1.3 / gain if payoff.drafts else 1.0) * (1.0 + 0.1 * (chance.random() - 0.5))
            drafted, rounds = drafted + payoff.drafts, rounds + 1
            payoff.saw(got, took)
    assert drafted > 0.75 * rounds if gains else drafted < 0.15 * rounds, drafted / rounds


@pytest.mark.parametrize(("answer", "gains"), [(60, True), (6, False)])
def test_what_a_trial_reads_counts_as_often_as_requests_join(answer: int, gains: bool) -> None:
    """Four requests of ``answer`` rounds each, whose prompts take half a round to read when they are first drafted for.

    After a rest a trial reads four in sixteen rounds. Where answers are long, drafting always would read fewer.
    """
    larger = Payoff()
    larger.better = False
    payoff = Payoff(like=larger)
    assert not payoff.drafts
    read = [False] * 4
    drafted = 0
    for number in range(12_000):
        slot = number * 4 // answer % 4 if number * 4 % answer < 4 else None
        if slot is not None:
            read[slot] = False
        reading = 0.0
        if payoff.drafts:
            reading, read = 0.5 * read.count(False), [True] * 4
        drafted += payoff.drafts
        payoff.saw(
            1.2 if payoff.drafts else 1.0, (1.1 if payoff.drafts else 1.0) + reading, reading, (slot is not None) / 4
        )
    assert (drafted > 9000) == gains, drafted
