"""Batches of several methods in slices of time: the same answers, each with its own time, and one fault costs one."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.bench import slices
from outpace.bench.records import Answer, AnswerBatch, answer_together
from outpace.bench.slices import in_slices
from outpace.core.sampling import SamplingParams
from outpace.engine.populations.beam_options import BeamOptions
from outpace.targets.costs import FixedCosts
from support import Releasing
from test_records import LENGTHS, Watched, requests


class Clock:
    """Every reading is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def turns(target: Any, names: list[str]) -> tuple[dict[str, Any], list[str]]:
    order = list[str]()
    batches = {name: AnswerBatch(target, requests(LENGTHS), 2) for name in names}
    return in_slices(batches, order.append), order


@pytest.fixture
def one_round_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 0.0)


@pytest.mark.usefixtures("one_round_a_slice")
def test_batches_alternate_and_their_answers_are_those_of_each_alone() -> None:
    target = Watched()
    found, order = turns(target, ["a", "b", "c"])
    alone = [one.tokens for one in answer_together(Watched(), requests(LENGTHS), 2)]
    assert all([one.tokens for one in answers] == alone for answers in found.values())
    assert order == ["a", "b", "c"] * (len(order) // 3), "equally far: each has its turn"
    assert len(order) > 3 * len(LENGTHS)
    assert not target.held


@pytest.mark.usefixtures("one_round_a_slice")
def test_whoever_has_fewest_tokens_goes_on() -> None:
    target = Watched()
    batches = {"two": AnswerBatch(target, requests([8, 8]), 2), "one": AnswerBatch(target, requests([8, 8]), 1)}
    order = list[str]()
    in_slices(batches, order.append)
    assert order[:6] == ["two", "one", "one", "two", "one", "one"], "two requests at once have twice the tokens"


def test_a_slice_is_as_long_as_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "perf_counter", Clock())
    monkeypatch.setattr(slices, "SLICE", 3.0)
    target = Watched()
    batches = {name: AnswerBatch(target, requests([9]), 1) for name in "ab"}
    order = list[str]()
    in_slices(batches, order.append)
    assert order == list("ababab"), "three rounds each"


@pytest.mark.usefixtures("one_round_a_slice")
def test_time_of_others_turns_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that others' rounds move on by an hour."""
    alone = answer_together(Watched(), requests(LENGTHS), 2)

    class Slow(Watched):
        def score(self, *args: Any, **kwargs: Any) -> Any:
            late[0] += 3600.0
            return super().score(*args, **kwargs)

    late = [0.0]
    real = time.perf_counter
    for module in ("outpace.bench.records", "outpace.engine.decoder", "outpace.engine.round"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: real() + late[0])
    found = in_slices(
        {"slow": AnswerBatch(Slow(), requests(LENGTHS), 2), "a": AnswerBatch(Watched(), requests(LENGTHS), 2)}
    )
    slow, quick = found["slow"], found["a"]
    assert not isinstance(slow, Exception) and not isinstance(quick, Exception)
    assert [one.tokens for one in quick] == [one.tokens for one in alone]
    assert all(0 < one.ttft < 60 and 0 < one.wall < 60 and one.ttft <= one.wall for one in quick)
    assert all(one.ttft >= 3600 and one.wall >= 3600 * len(one.tokens) for one in slow)
    rounds = sum(one.metrics.seconds for one in quick)
    assert rounds < 60


@pytest.mark.usefixtures("one_round_a_slice")
def test_a_batch_that_fails_ends_alone() -> None:
    failing, sound = Watched(fail_at=3), Watched()
    order = list[str]()
    found = in_slices(
        {"failing": AnswerBatch(failing, requests(LENGTHS), 2), "sound": AnswerBatch(sound, requests(LENGTHS), 2)},
        order.append,
    )
    assert isinstance(found["failing"], RuntimeError)
    assert order.count("failing") == 3
    sound_answers = found["sound"]
    assert not isinstance(sound_answers, Exception)
    assert [len(one.tokens) for one in sound_answers] == LENGTHS
    assert not failing.held and not sound.held


class Elsewhere(Releasing):
    """On a device with a memory of its own."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


@pytest.mark.usefixtures("one_round_a_slice")
@pytest.mark.parametrize("reason", ["device", "memory"])
def test_batches_run_whole_where_their_memory_could_be_too_much(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(temperature=0)
    asked = [replace(one, params=greedy) for one in requests(LENGTHS)]
    target: Any = Elsewhere(16, seed=3, context_length=200) if reason == "device" else Watched()
    if reason == "memory":
        target.kv_bytes_per_token = 1000
        needed = 2 * 3 * 1000 * (3 + max(LENGTHS))
        monkeypatch.setattr("outpace.core.machine.free_memory", lambda: 4 * needed - 1)
    order = list[str]()
    in_slices({name: AnswerBatch(target, asked, 3) for name in "ab"}, order.append)
    assert order == ["a", "b"]
    if reason == "memory":
        monkeypatch.setattr("outpace.core.machine.free_memory", lambda: 4 * needed)
        in_slices({name: AnswerBatch(target, asked, 3) for name in "cd"}, order.append)
        assert len(order) > 6


def test_no_batches_give_no_answers() -> None:
    assert in_slices({}) == {}


@pytest.mark.usefixtures("one_round_a_slice")
def test_groups_whose_tokens_are_known_at_their_end_run_whole() -> None:
    target = Watched()
    grouped = [replace(one, beams=BeamOptions(2)) for one in requests(LENGTHS)]
    order = list[str]()
    found = in_slices(
        {"beams": AnswerBatch(target, grouped, 2), "plain": AnswerBatch(target, requests(LENGTHS), 2)}, order.append
    )
    assert order == ["beams", "plain"]
    answers = found["beams"]
    assert not isinstance(answers, Exception)
    assert all(0 < one.ttft <= one.wall for one in answers)
    assert not target.held


@pytest.mark.usefixtures("one_round_a_slice")
def test_what_fails_when_answers_are_read_costs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, sound = AnswerBatch(Watched(), requests(LENGTHS), 2), AnswerBatch(Watched(), requests(LENGTHS), 2)

    def answers() -> list[Answer]:
        raise ValueError("no such state")

    monkeypatch.setattr(bad, "answers", answers)
    found = in_slices({"bad": bad, "sound": sound})
    assert isinstance(found["bad"], ValueError)
    assert not isinstance(found["sound"], Exception)


@pytest.mark.usefixtures("one_round_a_slice")
def test_a_batch_in_whose_turns_costs_were_measured_says_so() -> None:
    class Measuring(Watched):
        def score(self, *args: Any, **kwargs: Any) -> Any:
            measured.measurements += len(self.sizes) == 4
            return super().score(*args, **kwargs)

    class Counted(FixedCosts):
        measurements = 0

    measured = Counted()

    batches = {"a": AnswerBatch(Measuring(), requests(LENGTHS), 2), "b": AnswerBatch(Watched(), requests(LENGTHS), 2)}
    batches["a"].decoder.target.costs = measured
    in_slices(batches)
    assert [batches[name].disturbed for name in "ab"] == [True, False]
