"""--max-minutes bounds data and training together: by a clock that moves with the work and not with the machine."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outpace
from cli_support import toy
from outpace.core.errors import BadInput
from outpace.engine.decoder import Decoder
from outpace.heads.head_config import WEIGHTS
from outpace.training.run_state import SPENT, read_state, seconds_spent
from outpace.training.shards import Shards
from outpace.training.time_plan import DATA_SHARE, TimePlan, TrainingSpeed
from outpace.training.trainer import Trainer
from outpace.training.training_progress import TrainingProgress

TOY = toy()


class Worked:
    """A clock: seconds that rounds of decoding and steps of training are said to take, and what they were."""

    def __init__(self, a_round: float, a_step: float) -> None:
        self.a_round, self.a_step = a_round, a_step
        self.now = 0.0
        self.done: list[tuple[str, float]] = []

    def __call__(self) -> float:
        return self.now

    def work(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.done.append((what, self.now))


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], Worked]:
    def make(a_round: float, a_step: float) -> Worked:
        clock = Worked(a_round, a_step)
        step = Decoder.step

        def stepped(self: Decoder) -> bool:
            clock.work("round", clock.a_round)
            return step(self)

        def trained(self: Trainer, batch: Any) -> None:
            clock.work("step", clock.a_step)
            self.progress.step += 1  # when it ends is all that matters here
            self.progress.tokens += int(batch.answer.sum())

        monkeypatch.setattr(Decoder, "step", stepped)
        monkeypatch.setattr(Trainer, "_step", trained)
        return clock

    return make


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    names = ["cat", "dog", "owl", "fox", "bee", "ant", "elk", "hen", "pig", "cow", "emu", "yak", "rat", "bat", "cod"]
    rows = [{"turns": [f"what did the {one} say to the {other}"]} for one in names for other in names if one != other]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def trained(
    folder: Path, clock: Worked, prompts: Path | None, **options: Any
) -> tuple[dict[str, Any], list[TrainingProgress]]:
    told: list[TrainingProgress] = []
    given = {"prompts": None if prompts is None else [prompts], "size": "tiny", "passages": 0.0}
    made = outpace.train(TOY, "medusa", folder, clock=clock, **({"on_progress": told.append} | given | options))
    return made.provenance, told


def ends(clock: Worked) -> float:
    """When the last step of training ended; the trial of the head comes after."""
    return max(at for what, at in clock.done if what == "step")


@pytest.mark.parametrize(
    ("a_round", "a_step"), [(1.0, 1.0), (4.0, 1.0), (1.0, 30.0)], ids=["even", "slow data", "slow steps"]
)
@pytest.mark.parametrize("given", [{}, {"tokens": 10**6, "epochs": 50.0}], ids=str)
def test_data_and_training_end_within_the_bound(
    tmp_path: Path, prompts: Path, working: Callable[..., Worked], a_round: float, a_step: float, given: dict[str, Any]
) -> None:
    clock = working(a_round, a_step)
    about, told = trained(tmp_path / "head", clock, prompts, max_minutes=1.0, **given)
    longest = max(a_round, a_step)
    assert ends(clock) <= 60.0 + longest, "one step more, at most"
    assert about["steps"] >= 1
    assert (tmp_path / "head" / WEIGHTS).exists()
    assert about["data"]["answer_tokens"] == Shards(tmp_path / "head" / "data", {}).answer_tokens() > 0
    stages = [one.stage for one in told]
    assert stages.index("collected") < stages.index("evaluation")
    collected = next(index for index, one in enumerate(told) if one.stage == "collected")
    if "tokens" in given:
        assert "--max-minutes ended it before 1,000,000 tokens" in told[collected].doing
        assert "plan" not in stages
    else:
        [plan] = [one.doing for one in told if one.stage == "plan"]
        assert re.fullmatch(r"about [\d,]+ conversations?, [\d,]+ steps? in 1 minute", plan)
        if not given:
            assert ends(clock) >= 60.0, "all of the time is used"


def test_the_prediction_is_about_what_comes(tmp_path: Path, prompts: Path, working: Callable[..., Worked]) -> None:
    about, told = trained(tmp_path / "head", working(1.0, 2.0), prompts, max_minutes=2.0)
    [plan] = [one.doing.split() for one in told if one.stage == "plan"]
    conversations, steps = int(plan[1].replace(",", "")), int(plan[3].replace(",", ""))
    # Eight prompts measured the speed of answering; more at once are faster, so that there may be more of them.
    assert conversations <= about["data"]["prompts"] <= 10 * conversations
    assert 0.3 * steps <= about["steps"] <= 1.5 * steps


def test_the_models_own_prompts_are_bounded_as_well(tmp_path: Path, working: Callable[..., Worked]) -> None:
    clock = working(1.0, 1.0)
    trained(tmp_path / "head", clock, None, max_minutes=1.0)
    assert ends(clock) <= 61.0


def test_a_run_that_time_ended_does_not_go_on_within_the_same_time_and_goes_on_within_more(
    tmp_path: Path, prompts: Path, working: Callable[..., Worked]
) -> None:
    clock = working(2.0, 1.0)
    folder = tmp_path / "head"
    first, _ = trained(folder, clock, prompts, max_minutes=2.0)
    again, _ = trained(folder, clock, prompts, max_minutes=2.0, resume=True)
    assert again["steps"] == first["steps"]
    before = clock.now
    more, _ = trained(folder, clock, prompts, max_minutes=4.0, resume=True)
    assert more["steps"] > first["steps"]
    assert ends(clock) - before <= 121.0, "two of the four minutes were used before"


def test_a_stop_in_the_middle_is_gone_on_from_and_all_runs_share_the_time(
    tmp_path: Path, prompts: Path, working: Callable[..., Worked]
) -> None:
    clock = working(2.0, 1.0)
    folder = tmp_path / "head"

    def stop(now: TrainingProgress) -> None:
        if now.stage == "training" and now.total and now.done > 0.7 * now.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(folder, clock, prompts, max_minutes=2.0, on_progress=stop)
    state = read_state(folder)
    assert state is not None and state["progress"]["step"] > 0
    spent, before = clock.now, clock.now
    trained(folder, clock, prompts, max_minutes=2.0, resume=True)
    assert spent < 120.0
    assert ends(clock) - before <= 120.0 - spent + 1.0


def test_a_loss_that_rises_early_in_a_long_run_does_not_end_it(
    tmp_path: Path, prompts: Path, working: Callable[..., Worked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near its largest the rate holds the loss up for hours; it falls when the rate does."""
    clock = working(60.0, 60.0)
    losses = itertools.count(1.0)
    monkeypatch.setattr(Trainer, "_held_out", lambda _: {"loss": next(losses)})
    about, _ = trained(tmp_path / "head", clock, prompts, max_minutes=600.0)
    assert ends(clock) >= 0.9 * 36_000.0
    assert 20 <= len(about["history"]) <= 62, "evaluations of long runs are further apart"


def test_a_kill_while_data_is_collected_does_not_begin_the_time_anew(
    tmp_path: Path, prompts: Path, working: Callable[..., Worked]
) -> None:
    clock = working(2.0, 1.0)
    folder = tmp_path / "head"

    class Killed(BaseException):
        pass

    def kill(now: TrainingProgress) -> None:
        if now.stage == "data" and clock.now > 40.0:
            raise Killed

    with pytest.raises(Killed):
        trained(folder, clock, prompts, max_minutes=2.0, on_progress=kill)
    assert read_state(folder) is None
    noted, killed = seconds_spent(folder), clock.now
    assert noted == pytest.approx(killed, abs=32.0)
    trained(folder, clock, prompts, max_minutes=2.0, resume=True)
    assert ends(clock) - killed <= 120.0 - noted + 1.0
    (folder / SPENT).write_text('{"seconds": "many"}')
    with pytest.raises(BadInput, match=r"spent\.json is damaged; delete it"):
        trained(folder, clock, prompts, max_minutes=2.0, resume=True)


def test_too_little_time_is_said_in_words(tmp_path: Path, working: Callable[..., Worked]) -> None:
    with pytest.raises(BadInput, match=r"no prompt was answered in the time for data; give more --max-minutes"):
        trained(tmp_path / "head", working(1000.0, 1.0), None, max_minutes=0.1)


def test_the_plan_divides_the_time() -> None:
    now = 0.0
    plan = TimePlan(1000.0, lambda: now)
    assert plan.data_left == DATA_SHARE * 1000.0
    plan.divide(0.0, answering=10.0, training=TrainingSpeed(1000.0, 100.0))
    assert plan.data_left == DATA_SHARE * 1000.0, "training is fast: several passes"
    plan.divide(0.0, answering=300.0, training=TrainingSpeed(100.0, 100.0))
    assert plan.data_left == pytest.approx(250.0), (
        "training is slow: one pass over what 250 seconds give fills the rest"
    )
    plan.divide(60_000.0, answering=300.0, training=TrainingSpeed(100.0, 100.0))
    assert plan.data_left == pytest.approx(100.0), "one pass over the 60,000 tokens that there are takes 600 seconds"
    plan.divide(110_000.0, answering=300.0, training=TrainingSpeed(100.0, 100.0))
    assert plan.data_over(), "and over 110,000 more than there is"
    now = 2000.0
    assert (plan.left, plan.data_left, plan.data_over()) == (0.0, 0.0, True)
    endless = TimePlan(clock=lambda: now)
    assert not endless.bounded and not endless.data_over()
