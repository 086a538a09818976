"""Predictions from fixed costs are what enumeration gives; intervals hold what was measured; one method or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outpace.advice.candidates import Shape, candidates
from outpace.advice.prediction import Played, Prediction, machine_noise, of_chains, of_records, plain_rounds, predict
from outpace.advice.recommendation import WORTH, Row, acceptance_for, recommend
from outpace.advice.round_costs import (
    ContextWeights,
    Figures,
    RoundCosts,
    _isotonic,
    fits,
    kept_bytes,
    measure_rounds,
    probed_sizes,
)
from outpace.advice.trial import Indices, Trial, run_trial
from outpace.controllers.predictor import Forecast, Predictor, tokens_per_round
from outpace.core.sampling import SamplingParams
from outpace.engine.known_answers import KnownAnswer, known_answers
from outpace.engine.replay import replay
from outpace.engine.request import Request
from outpace.engine.round_records import UNCOUNTED, RoundRecord
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.registry import Context, build
from outpace.targets.costs import FixedCosts
from outpace.targets.table import TableTarget, random_table

LINE = RoundCosts(1, [0, 1, 2, 4], np.array([[1.0, 1.1, 1.2, 1.4]] * 5))


def known(count: int, length: int = 20) -> tuple[TableTarget, list[KnownAnswer]]:
    target = TableTarget(12, random_table(12, 8))
    plain = build("none", Context(target))
    return target, known_answers(
        target, [Request((one, 2, one), plain, max_new_tokens=length) for one in range(1, 1 + count)]
    )


def test_costs_are_linear_between_sizes_and_beyond_them() -> None:
    relative = LINE.relative_sizes() @ LINE.weights(np.array([0.0, 0.5, 3.0, 8.0]))
    assert relative == pytest.approx([1.0, 1.05, 1.3, 1.8])
    assert LINE.seconds(4) == pytest.approx(1.3)
    assert Predictor(LINE).verification(3) == pytest.approx(1.3)
    batch = RoundCosts(4, [0, 4, 8], np.array([[2.0, 3.0, 4.0]]))
    assert Predictor(batch).verification(2, 4) == pytest.approx(2.0)


def test_more_rows_never_take_less_time() -> None:
    costs = RoundCosts(1, [0, 1, 2], np.array([[1.0, 1.3, 1.2]]))
    assert costs.relative_sizes() == pytest.approx([1.0, 1.25, 1.25])


def test_a_size_that_was_disturbed_makes_no_larger_one_dear() -> None:
    costs = RoundCosts(1, [0, 1, 2, 3, 4], np.array([[1.0, 2.0, 1.1, 1.15, 1.2]]))
    assert costs.relative_sizes()[1:] == pytest.approx([np.mean([2.0, 1.1, 1.15, 1.2])] * 4)
    rising = np.sort(np.random.default_rng(0).uniform(1.0, 2.0, (50, 6)), axis=1)
    assert _isotonic(rising) == pytest.approx(rising)
    shuffled = np.random.default_rng(1).uniform(1.0, 2.0, (50, 6))
    fitted = _isotonic(shuffled)
    assert (np.diff(fitted, axis=1) >= -1e-12).all()
    assert fitted.mean(axis=1) == pytest.approx(shuffled.mean(axis=1))  # as least squares have it


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"num_draft_tokens": 2}])
def test_with_fixed_costs_the_prediction_is_the_sum_over_all_rounds(settings: dict[str, int], at_once: int) -> None:
    target, answers = known(5)
    costs = RoundCosts(at_once, [0, 4], np.array([[1.0, 1.0 + 0.2 * 4 / at_once]] * 3))
    rounds = replay(target, answers, build("pld", Context(target), settings), at_once)
    rounds = [RoundRecord(one.requests, one.drafted, one.committed, 0.05, 0.0) for one in rounds]
    found = predict(of_records(answers, rounds, costs), costs, None)
    seen: set[int] = set()
    steps = time = 0.0
    for one in rounds:
        for number, committed in zip(one.requests, one.committed, strict=True):
            if number == UNCOUNTED:
                continue
            if number in seen:
                time += 1.0 + 0.2 / at_once * one.draft_tokens + 0.05
                steps += committed
            seen.add(number)
    assert found.speedup == pytest.approx(steps / time)
    assert found.forecast.speedup == pytest.approx(found.speedup)
    assert found.interval[0] <= found.speedup <= found.interval[1]


def test_chains_cost_what_their_rounds_cost() -> None:
    ratios = [[1.0, 1.0, 0.0, 1.0, 1.0, 1.0], [0.0] * 4]
    target = TableTarget(12)
    one, params = target.sequence((1,)), SamplingParams()
    answers = [KnownAnswer((1,), (1,) * len(each), (1.0,) * len(each), one, params, 9) for each in ratios]
    played = of_chains(answers, ratios, 2, LINE)
    # After the first round, which is left out: 2 rounds of the first answer; 3 of the second.
    assert played.rounds.sum() == pytest.approx(1.0 + 3.0)
    found = predict(played, LINE, None, draft_steps=0.1)
    each = 1.0 + 0.1 * float(played.sizes[0]) + 0.1
    assert found.speedup == pytest.approx((3 + 3) / (4 * each))  # the first round has three tokens of the first answer


def test_autoregressive_rounds_count_for_the_length_of_the_answer_that_was_decoded() -> None:
    """A method that decodes draws an answer of its own length; each of its tokens is an autoregressive round."""
    _, answers = known(1, length=5)
    rounds = [RoundRecord((0,), (0,), (1,), 0.0, 0.0) for _ in range(3)]
    played = of_records(answers, rounds, LINE, np.array([8.0]))
    assert played.plain == pytest.approx([8.0 * 2 / 4])


def test_the_interval_is_of_prompts_costs_and_trials() -> None:
    alike = simple(np.full(8, 30.0), np.full(8, 15.0))
    sure = predict(alike, LINE, None)
    assert sure.interval == pytest.approx((sure.speedup, sure.speedup))
    differing = simple(alike.steps, np.arange(8.0, 24.0, 2.0))
    assert width(predict(differing, LINE, None)) > 0.2
    generator = np.random.default_rng(1)
    noisy = RoundCosts(1, LINE.sizes.tolist(), LINE.blocks[:1] * generator.normal(1.0, 0.1, (20, 4)))
    assert width(predict(alike, noisy, None)) > 0.01
    of_machine, of_trial = predict(alike, LINE, None, noise=0.1), predict(alike, LINE, None, untried=0.05)
    assert width(of_machine) == pytest.approx(2 * 1.645 * 0.1 * np.sqrt(2 / 8) * sure.speedup, rel=0.1)
    assert width(of_trial) == pytest.approx(2 * 1.645 * 0.05 * sure.speedup, rel=0.1)


def simple(steps: Figures, rounds: Figures, drafting: float = 0.0, early: int = 0) -> Played:
    """Rounds with two draft tokens each, of the usual contexts."""
    spent = np.full(len(steps), drafting)
    return Played(steps, steps, rounds[:, None], rounds, rounds, np.array([2.0]), spent, np.full(early, drafting / 10))


def tried(
    count: int,
    *,
    drafted: float | Figures,
    drafting: float,
    verifying: float | Figures,
    slowdown: float | Figures = 1.0,
) -> Trial:
    """Turns of five rounds, beside autoregressive ones of a second."""
    each = [np.broadcast_to(np.asarray(one, float), count) for one in (1.0, drafted, drafting, verifying)]
    turns: Indices = np.arange(count) // 5
    return Trial(each[0], each[1], each[2], each[3], turns, np.broadcast_to(np.asarray(slowdown, float), count))


def width(one: Prediction) -> float:
    return one.interval[1] - one.interval[0]


def test_a_trial_scales_rounds_and_replayed_drafts() -> None:
    trial = tried(10, drafted=2.0, drafting=0.3, verifying=1.2 * 1.1)
    assert trial.excess(LINE)[0] == pytest.approx([1.0, 1.1 ** (10 / 12)])
    played = simple(np.array([20.0]), np.array([10.0]), drafting=1.0, early=10)
    found = predict(played, LINE, trial)
    # Drafting took 0.1 a round when it was replayed, all of it here, and takes 0.3.
    assert found.speedup == pytest.approx(20.0 / (10.0 * 1.2 * 1.1 ** (10 / 12) + 3.0))


def test_rounds_with_a_draft_are_tried_apart_from_those_without() -> None:
    """Most rounds of what copies draft nothing: their excess says nothing of the others."""
    drafted = np.array([0.0] * 30 + [2.0] * 10)
    verifying = np.array([1.0] * 30 + [1.2 * 0.8] * 10)
    trial = tried(40, drafted=drafted, drafting=0.0, verifying=verifying)
    plain, with_draft = trial.excess(LINE)[0]
    assert plain == pytest.approx(1.0)
    assert with_draft == pytest.approx(0.8 ** (10 / 12))
    each = trial.excess(LINE, trial.resampled(np.random.default_rng(0), 500))
    assert each[:, 0] == pytest.approx(1.0)
    assert set(np.round(each[each[:, 1] < 1.0][:, 1], 6)) <= {round(0.8 ** (n / (n + 2)), 6) for n in range(1, 41)}
    both = replace(
        simple(np.array([40.0]), np.array([30.0])), rounds=np.array([[20.0, 10.0]]), sizes=np.array([0.0, 2.0])
    )
    assert predict(both, LINE, trial).speedup == pytest.approx(40.0 / (20.0 + 10.0 * 1.2 * with_draft))


def test_a_machine_that_is_slow_for_rounds_with_drafts_is_not_the_candidates_doing() -> None:
    slow = np.repeat([1.0, 1.4], 10)
    trial = tried(20, drafted=2.0, drafting=0.0, verifying=1.2 * slow, slowdown=slow)
    assert trial.excess(LINE)[0] == pytest.approx([1.0, 1.0])
    assert trial.slowdowns() == pytest.approx([1.0, 1.0, 1.4, 1.4])
    played = simple(np.full(8, 40.0), np.full(8, 20.0))
    calm = predict(played, LINE, trial)
    assert calm.speedup == pytest.approx(40.0 / (20.0 * 1.2))
    seen = predict(played, LINE, trial, slowdowns=(1.0, 1.4))
    assert seen.speedup == pytest.approx(40.0 / (20.0 * 1.2 * 1.2))
    assert seen.interval[0] < 40.0 / (20.0 * 1.2 * 1.39) and seen.interval[1] > 40.0 / (20.0 * 1.2 * 1.01)
    assert width(calm) < 1e-6
    without = replace(played, sizes=np.array([0.0]))
    assert predict(without, LINE, None, slowdowns=(1.0, 1.4)).speedup == pytest.approx(40.0 / 20.0)


def test_slow_moments_are_seen_when_costs_are_measured_and_change_no_shape() -> None:
    quiet = np.array([1.0, 1.1, 1.2, 1.4])
    blocks = np.tile(quiet, (10, 1))
    blocks[::2, 1:] *= 1.4
    costs = RoundCosts(1, [0, 1, 2, 4], blocks)
    usual = np.median(blocks[:, 1]) / 1.1  # half of the blocks are slow
    assert costs.relative_sizes() == pytest.approx([1.0, *(usual * quiet[1:])])
    assert costs.slowdowns() == pytest.approx([1.4 / usual, 1.0 / usual] * 5)
    drawn = costs.resampled(np.random.default_rng(0), 50)
    assert drawn == pytest.approx(np.tile(costs.relative_sizes(), (50, 1))), "slow moments are counted apart"
    slowed = costs.slowed(1.1)
    assert slowed.step == pytest.approx(costs.step)
    assert slowed.relative_sizes()[1:] == pytest.approx(1.1 * costs.relative_sizes()[1:])
    assert RoundCosts(1, [0], np.ones((3, 1))).slowdowns() == pytest.approx([1.0] * 3)


def test_rounds_of_another_engine_that_differ_make_the_prediction_unsure() -> None:
    """Its costs have one size with drafts, and no trials."""
    generator = np.random.default_rng(2)
    costs = RoundCosts(1, [0, 4], np.array([1.0, 1.4]) * generator.normal(1.0, 0.1, (12, 2)))
    played = simple(np.full(8, 40.0), np.full(8, 20.0))
    assert width(predict(played, costs, None, slowdowns=costs.slowdowns().tolist())) > 0.05


def test_the_probe_drafts_as_many_tokens_as_costs_are_known_for() -> None:
    assert [LINE.nearest_size(tokens) for tokens in (0.0, 1.4, 2.6, 3.2, 60.0)] == [1, 1, 2, 4, 4]


def test_moments_that_lie_beside_each_other_are_drawn_together() -> None:
    played = simple(np.full(8, 40.0), np.full(8, 20.0))
    stretches = predict(played, LINE, None, slowdowns=[1.0] * 6 + [1.4] * 6)
    alternating = predict(played, LINE, None, slowdowns=[1.0, 1.4] * 6)
    assert stretches.speedup == pytest.approx(alternating.speedup)
    assert width(stretches) > 1.3 * width(alternating)


def test_how_long_replayed_drafts_took_is_known_as_well_as_rounds_repeat() -> None:
    trial = tried(40, drafted=2.0, drafting=0.3, verifying=1.2)
    played = simple(np.full(8, 40.0), np.full(8, 20.0), drafting=2.0)
    calm = predict(replace(played, early=np.full(40, 0.1)), LINE, trial)
    differing = predict(replace(played, early=np.random.default_rng(0).lognormal(-2.3, 0.8, 40)), LINE, trial)
    assert width(calm) < 1e-6
    assert width(differing) > 0.02


def test_one_slow_draft_of_a_replay_changes_no_scale() -> None:
    trial = tried(20, drafted=2.0, drafting=0.3, verifying=1.2)
    played = simple(np.array([40.0]), np.array([20.0]), drafting=2.0)
    calm, stalled = np.full(20, 0.1), np.array([3.0, *[0.1] * 19])
    quick = predict(replace(played, early=calm), LINE, trial)
    assert predict(replace(played, early=stalled), LINE, trial).speedup == pytest.approx(quick.speedup)
    assert quick.draft_steps == pytest.approx(0.3)


def test_rounds_in_which_nobody_was_asked_for_drafts_take_none() -> None:
    _, answers = known(2, length=12)
    resting = [RoundRecord((0, 1), (0, 0), (1, 1), 0.0, 0.0, rested=number % 4 > 0) for number in range(12)]
    played = of_records(answers, resting, LINE)
    assert played.count == pytest.approx([11.0, 11.0])  # all but the first
    assert played.asked == pytest.approx([2.0, 2.0])
    trial = tried(10, drafted=0.0, drafting=0.3, verifying=1.0)
    assert predict(played, LINE, trial).draft_steps == pytest.approx(0.3 * 2 / 11)


def test_rounds_are_measured_at_the_sizes_that_are_asked_for() -> None:
    target, answers = known(4, length=40)
    for batch in (1, 4):
        found = measure_rounds(target, answers, batch, 0.01)
        assert tuple(found.sizes) == probed_sizes(batch)
        assert found.step > 0
        assert found.relative_sizes()[0] == 1.0


def test_a_trial_leaves_out_rounds_in_which_a_request_joins() -> None:
    target, answers = known(3, length=12)
    context, costs = Context(target), RoundCosts(2, [0, 4], np.array([[1.0, 1.2]]))
    trial = run_trial(target, answers, build("pld", context), costs, 0.01)
    assert trial is not None
    assert len(trial.slowdowns()) == len(trial.plain_turns()) == trial.turns[-1] - trial.turns[0] + 1
    assert (trial.slowdown > 0).all()
    assert len(trial.plain) == len(trial.drafting) >= 6
    assert (trial.plain > 0).all()


def test_a_trial_ends_where_requests_join_in_every_round() -> None:
    target, answers = known(6, length=2)
    plain = build("none", Context(target))
    shifted = [replace(answers[0], max_new_tokens=3), *answers * 10]
    costs = RoundCosts(2, [0, 4], np.array([[1.0, 1.2]]))
    assert run_trial(target, shifted, plain, costs, 0.0) is None


class ByContext(FixedCosts):
    """A forward takes 100 s and one for every token in the K/V of its sequences, whatever its rows."""

    def forward(self, rows: Sequence[int], contexts: Sequence[int]) -> float:
        return 100.0 + sum(contexts)


def test_rounds_count_by_their_own_contexts_and_not_by_the_mean_one() -> None:
    """A draft that is accepted where the context is long saves a longer round than one where it is short."""
    costs = RoundCosts(1, [0, 1], np.array([[200.0, 200.0]]), ContextWeights(ByContext(), 1, 100))
    _, answers = known(1, length=5)
    contexts = [0, 50, 50, 150, 150]
    plain = [RoundRecord((0,), (0,), (1,), 0.0, 0.0, (context,)) for context in contexts]
    base = plain_rounds(answers, plain, costs)
    assert base == pytest.approx([800 / 200])
    for drafts_at, seconds in ((50, 650), (150, 550)):
        rounds = list(plain)
        del rounds[contexts.index(drafts_at)]
        at = [one.contexts for one in rounds].index((drafts_at,))
        rounds[at] = RoundRecord((0,), (1,), (2,), 0.0, 0.0, (drafts_at,))
        played = of_records(answers, rounds, costs, base)
        found = predict(played, costs, None)
        assert found.speedup == pytest.approx(800 / seconds)
        assert found.forecast.speedup == pytest.approx(found.speedup)
        assert played.tokens_per_round == pytest.approx(4 / 3)


def test_a_machine_that_never_changes_has_no_noise_and_one_that_does_has_its_spread() -> None:
    assert machine_noise([np.full(6, 2.0), np.full(3, 9.0)]) == pytest.approx(0.0)
    assert machine_noise([np.array([1.0])]) == 0.0
    generator = np.random.default_rng(4)
    turns = [scale * np.exp(0.1 * generator.standard_normal(400)) for scale in (1.0, 50.0)]
    assert machine_noise(turns) == pytest.approx(0.1, rel=0.1)


def row(method: str, batch: int, speedup: float, low: float) -> Row:
    shaken = np.full(4, speedup)
    prediction = Prediction(speedup, (low, 2 * speedup - low), Forecast(2.0, 2.0 / speedup), 0.1, shaken)
    return Row(method, Shape({"num_draft_tokens": 3}, chain=3), batch, prediction, "replayed", 2.0)


COSTS = {batch: RoundCosts(batch, [0, batch * 4], np.array([[1.0, 1.0 + 0.1 * batch]] * 3)) for batch in (1, 4, 16)}


def test_none_is_recommended_where_no_lower_end_is_above_the_limit() -> None:
    found = recommend(
        [row("pld", 1, 1.10, 1.01), row("sam", 4, 1.05, 1.02), row("sam", 16, 0.8, 0.7)], COSTS, sorted(COSTS)
    )
    assert found.method == "none"
    public = found.public()
    assert public["method"] == "none"
    assert set(public["batch"]) == {"1", "4", "16"}
    assert "acceptance" in found.words[1]


def test_the_method_that_gains_most_over_all_batches_is_recommended_and_where_it_turns() -> None:
    rows = [row("pld", 1, 1.3, 1.2), row("pld", 4, 1.2, 1.1), row("pld", 16, 0.9, 0.8), row("sam", 1, 1.35, 1.2)]
    found = recommend(rows, COSTS, sorted(COSTS))
    assert found.method == "pld"
    public = found.public()
    assert public["settings"] == {"num_draft_tokens": 3}
    assert public["batch"]["1"]["speedup"] == 1.3
    assert public["batch"]["16"]["use"] == "none"
    assert any("between batch 4 and 16" in line for line in found.words)
    assert any("sam (1.35x)" in line for line in found.words)


def test_another_method_that_pays_at_a_batch_is_said_to() -> None:
    rows = [row("pld", 1, 1.5, 1.4), row("pld", 4, 1.4, 1.3), row("pld", 16, 0.9, 0.8)]
    rows += [row("sam", 1, 1.1, 1.0), row("sam", 4, 1.1, 1.0), row("sam", 16, 1.3, 1.2)]
    [line] = [one for one in recommend(rows, COSTS, sorted(COSTS)).words if one.startswith("Batch 16")]
    assert "not pld" in line and "sam" in line and "lower end" not in line
    unsure = recommend([*rows[:5], row("sam", 16, 1.1, 0.9)], COSTS, sorted(COSTS)).words
    assert any(one.startswith("Batch 16: none") and "lower end is not above" in one for one in unsure)


def test_a_batch_that_was_not_measured_is_said_to_be() -> None:
    found = recommend([row("sam", 1, 1.3, 1.2), row("pld", 4, 0.9, 0.8)], COSTS, sorted(COSTS))
    entries = found.public()["batch"]
    assert [entries[batch]["measured"] for batch in ("1", "4", "16")] == [True, False, False]
    assert entries["16"]["use"] == "none"
    assert any(line.startswith("Batch 16: sam was not measured") for line in found.words)
    nothing = recommend([row("sam", 1, 1.0, 0.9)], COSTS, sorted(COSTS)).public()
    assert nothing["method"] == "none"
    assert [nothing["batch"][batch]["measured"] for batch in ("1", "4", "16")] == [True, False, False]


def test_where_it_begins_to_pay_and_ceases_is_said() -> None:
    rows = [row("sam", 1, 1.0, 0.9), row("sam", 4, 1.5, 1.4), row("sam", 16, 0.9, 0.8)]
    words = " ".join(recommend(rows, COSTS, sorted(COSTS)).words)
    assert "It begins to pay between batch 1 and 4. It ceases to pay between batch 4 and 16, at about 1" in words


def test_why_nothing_pays_is_said() -> None:
    words = " ".join(recommend([row("sam", 1, 0.9, 0.8)], COSTS, [1]).words)
    tokens, steps = row("sam", 1, 0.9, 0.8).prediction.forecast
    assert f"It commits {tokens:.2f} tokens in a round that takes {steps:.2f} autoregressive ones" in words
    assert f"would gain with {WORTH * steps:.2f} tokens, or rounds below {tokens / WORTH:.2f}" in words


def test_a_method_whose_time_was_over_is_compared_at_the_batches_that_it_was_measured_at() -> None:
    everywhere = [row("sam", batch, 1.3, 1.2) for batch in COSTS]
    assert (
        recommend([*everywhere, row("auto", 1, 1.6, 1.4), row("auto", 4, 1.5, 1.4)], COSTS, sorted(COSTS)).method
        == "auto"
    )
    # Not surely better there: what was measured everywhere is safer.
    assert recommend([*everywhere, row("auto", 1, 1.4, 1.25)], COSTS, sorted(COSTS)).method == "sam"


def test_a_batch_whose_rounds_there_was_no_time_for_is_not_measured() -> None:
    for rows in ([row("sam", 1, 1.3, 1.2)], [row("sam", 1, 1.0, 0.9)]):
        found = recommend(rows, {1: COSTS[1]}, [1, 4])
        assert not found.public()["batch"]["4"]["measured"]
        assert any(line.startswith("Batch 4: ") and "the time was over" in line for line in found.words)


def test_the_words_say_up_to_which_acceptance_and_costs_the_method_pays() -> None:
    found = recommend([row("pld", 1, 1.25, 1.2)], {1: COSTS[1]}, [1])
    assert (
        "At batch 1 it would cease to pay below 1.63 tokens a round (2.00 are expected), or if rounds took more than "
        "1.96 autoregressive ones (1.60 are expected)."
    ) in found.words


def test_the_default_is_measured_before_what_may_be_cut_off_by_time() -> None:
    target, _ = known(1)
    assert candidates(Context(target), "outpace", greedy=True).candidates[0].method == DEFAULT_METHOD


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_the_acceptance_that_is_needed_is_that_which_gives_as_many_tokens(rate: float) -> None:
    assert acceptance_for(tokens_per_round(rate, 3), 3) == pytest.approx(rate, abs=1e-6)
    assert acceptance_for(4.5, 3) is None


def test_a_batch_fits_as_long_as_its_keys_and_values_do() -> None:
    class Known(TableTarget):
        def kv_bytes(self, kv: object, rows: int = 0) -> int:
            return 10 * rows

    assert fits(Known(5), 4, 100, 4000)
    assert not fits(Known(5), 5, 100, 4000)


def test_what_is_kept_of_answers_counts_for_memory() -> None:
    class Known(TableTarget):
        def kv_bytes(self, kv: object, rows: int = 0) -> int:
            return 10 * rows

    target = Known(5)
    assert kept_bytes(target, [7, 5], 0) == 120
    assert kept_bytes(target, [7, 5], 2) == 120 + 12 * 2 * target.hidden_size * 4


def test_blocks_in_which_the_machine_was_slow_change_no_ratio() -> None:
    quiet = np.array([1.0, 1.1, 1.2, 1.4])
    slow = np.outer([1.0, 3.0, 1.0, 2.0, 5.0], quiet)
    found = RoundCosts(1, [0, 1, 2, 4], slow)
    assert found.relative_sizes() == pytest.approx(quiet)
    drawn = found.resampled(np.random.default_rng(0), 50)
    assert drawn == pytest.approx(np.tile(quiet, (50, 1)))
    assert list(found.plain_turns()) == [1.0, 3.0, 1.0, 2.0, 5.0], "how slow it was is the machine's noise"
