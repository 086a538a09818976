"""Batches, samples and seeds: list in, list out, in order; what is drawn is reported and repeats."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from cli_support import Failing, toy
from outpace.api import batch_progress
from outpace.api.requests import ask
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.scheduler import Limits
from outpace.model import Model

TEXTS = ["abc", "the end", "hello there", "x", "why"]


def test_a_batch_gives_each_prompts_own_answer_in_order() -> None:
    model = toy()
    alone = [model.generate(text, max_new_tokens=9).tokens for text in TEXTS]
    found = model.generate(TEXTS, max_new_tokens=9)
    assert [one.tokens for one in found] == alone
    assert [one.tokens for one in model.generate(tuple(TEXTS), max_new_tokens=9)] == alone
    assert isinstance(model.generate(["abc"], max_new_tokens=2), list)


def test_at_most_so_many_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[int] = []
    honest = Decoder.round

    def spy(self: Decoder, running: Any) -> None:
        active.append(len(running))
        honest(self, running)

    monkeypatch.setattr(Decoder, "round", spy)
    model = toy()
    model.shared.limits = Limits(max_batch=3)
    found = model.generate([f"{text} {number}" for text in TEXTS for number in range(4)], max_new_tokens=5)
    assert len(found) == 20
    assert max(active) == 3


def test_a_bad_prompt_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "submit", lambda *_: pytest.fail("something ran"))
    with pytest.raises(BadInput, match="prompt 2 of 3: the prompt must be"):
        toy().generate(["abc", object(), "x"])


def test_what_fails_on_the_way_names_its_prompt() -> None:
    with pytest.raises(BadInput, match=r"prompt \d of 2: logits processor 'Failing' raised ValueError"):
        toy().generate(["abc", "x"], max_new_tokens=9, processors=Failing())
    with pytest.raises(BadInput, match=r"^logits processor 'Failing' raised ValueError"):
        toy().generate("abc", max_new_tokens=9, processors=Failing())


def test_samples_come_in_groups() -> None:
    model = toy()
    one = model.generate("abc", n=3, temperature=1.0, max_new_tokens=9, method="none", seed=5)
    assert [sample.seed for sample in one] == [5, 6, 7]
    assert len({tuple(sample.tokens) for sample in one}) > 1
    both = model.generate(["abc", "x"], n=2, temperature=1.0, max_new_tokens=9, method="none", seed=5)
    assert [[sample.seed for sample in group] for group in both] == [[5, 6], [5, 6]]
    assert [sample.tokens for sample in both[0]] == [sample.tokens for sample in one[:2]]
    assert len(model.generate("abc", n=1, max_new_tokens=2)) == 1
    other: Any = {"num_return_sequences": 2}
    assert len(model.generate("abc", do_sample=True, max_new_tokens=2, **other)) == 2


@pytest.mark.parametrize("n", [0, -1, "2", 2.0, True])
def test_samples_are_counted_in_whole_numbers(n: Any) -> None:
    with pytest.raises(BadInput, match="n must be a whole number of samples"):
        toy().generate("abc", n=n, temperature=1.0)


def test_samples_need_a_temperature() -> None:
    with pytest.raises(BadInput, match="n=2 at temperature 0 would give one answer 2 times"):
        toy().generate("abc", n=2)
    with pytest.raises(BadInput, match="only generate and agenerate"):
        toy().stream("abc", n=2)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="stream takes one prompt, not a batch"):
        toy().stream(["abc", "x"])


def test_seeds_are_random_reported_and_repeat() -> None:
    model = toy()
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 20, "method": "none"}
    drawn = [model.generate("abc", **options) for _ in range(4)]
    assert len({one.seed for one in drawn}) == 4
    assert len({one.text for one in drawn}) > 1
    for one in drawn:
        assert one.metrics["seed"] == one.seed is not None
        assert model.generate("abc", seed=one.seed, **options).text == one.text
        assert f"seed={one.seed}" in repr(one)
    alike = model.generate(["abc"] * 4, **options)
    assert len({one.seed for one in alike}) == 4, "equal prompts of a batch are different draws"
    given = model.generate(["abc"] * 2, seed=3, **options)
    assert [one.seed for one in given] == [3, 3]
    assert given[0].text == given[1].text


def test_greedy_answers_have_no_seed() -> None:
    found = toy().generate("abc", max_new_tokens=3, seed=5)
    assert found.seed is None
    assert found.metrics["seed"] is None


def test_params_without_a_seed_are_drawn_too_and_those_of_benchmarks_are_not() -> None:
    [first], [second] = (ask(toy(), "abc", None, {"params": SamplingParams(1.0)}).requests for _ in range(2))
    assert first.params.seed != second.params.seed
    from outpace.bench.settings import BenchSettings

    assert BenchSettings(params=SamplingParams(1.0)).params.seed == 0
    assert SamplingParams().fixed_seed == 0
    assert {one.name: one.default for one in fields(SamplingParams)}["seed"] is None


def test_sampled_batches_of_a_benchmark_draft_as_those_of_a_server() -> None:
    """Where no seed is given, what rounds have shown decides whether they draft."""
    from dataclasses import replace

    from outpace.bench.settings import BenchSettings

    without = BenchSettings(params=SamplingParams(1.0))
    assert without.repeats is False and replace(without, batch_size=4).repeats is False
    assert BenchSettings(params=SamplingParams(1.0, seed=0)).repeats is True


def test_results_are_short_to_look_at() -> None:
    found = toy().generate("abc", max_new_tokens=9)
    assert repr(found).startswith(f"Result({found.text!r}, tokens=9, finish_reason='length'")
    assert str(found) == found.text
    assert found.prompt_tokens == len(toy().tokenizer.chat([{"role": "user", "content": "abc"}]))


def test_progress_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model: Model = toy()
    model.generate(TEXTS, max_new_tokens=2)
    assert capsys.readouterr().err == ""
    counted: list[int] = []
    honest = batch_progress.BatchProgress.advance

    def spy(self: batch_progress.BatchProgress) -> None:
        honest(self)
        assert self._bar is not None
        counted.append(int(self._bar.tasks[0].completed))

    monkeypatch.setattr(batch_progress.BatchProgress, "advance", spy)
    model.generate(TEXTS, max_new_tokens=2, progress=True)
    assert counted == [1, 2, 3, 4, 5]
    with pytest.raises(BadInput, match="progress must be"):
        model.generate("abc", progress=3)  # type: ignore[call-overload]
