"""The trainer: it learns, goes on where it was stopped, ends when it should, and no bad step or full disk hurts it."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.core.errors import BadInput
from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, TargetFacts
from outpace.models.placement import training_dtype
from outpace.training.dataset import Own, every
from outpace.training.mean_losses import mean_losses
from outpace.training.processes import Processes
from outpace.training.run_state import STATE, read_state
from outpace.training.schedule import Schedule
from outpace.training.trainer import Trainer

HIDDEN, VOCABULARY = 8, 12


class Guess(Head):
    """Says the next token of the token alone."""

    def __init__(self, config: HeadConfig, words: DraftVocabulary) -> None:
        super().__init__(config, words)
        self.map = nn.Linear(HIDDEN, HIDDEN, bias=True)
        self.unused = nn.Linear(HIDDEN, HIDDEN)
        self.fail_at: set[int] = set()
        self.calls = 0

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:
        return ()

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        rows = self.draft_vocabulary(self.map(teacher.embedding[batch.tokens[:, :-1]].to(self.map.weight.dtype)))
        loss = nn.functional.cross_entropy(rows.flatten(0, 1).float(), batch.tokens[:, 1:].flatten())
        if self.training:
            self.calls += 1
            if self.calls in self.fail_at:
                loss = loss * math.nan
        return {"loss": loss, "double": 2 * loss.detach()}


class Cycles:
    """Batches of a fixed cycle of tokens, each told from the others by its first token."""

    reading = 0.0

    def __init__(self, count: int = 6, held: int = 1) -> None:
        self.count, self.held = count, held
        self.given: list[tuple[int, int]] = []
        self.cut = [20]

    def answer_tokens(self) -> int:
        return self.count * 20

    def _batch(self, start: int) -> Batch:
        tokens = (torch.arange(20) * 5 + start)[None] % VOCABULARY
        real = torch.ones_like(tokens, dtype=torch.bool)
        return Batch(tokens, {}, real, real)

    def train(self, epoch: int, skip: int = 0, own: Own = every) -> Iterator[Batch]:
        for number in range(skip, self.count):
            self.given.append((epoch, number))
            yield self._batch(number)

    def held_out(self) -> Iterator[Batch]:
        for number in range(self.held):
            yield self._batch(number + 100)

    def all_held_out(self) -> Iterator[Batch]:
        return self.held_out()


def config(**changes: Any) -> HeadConfig:
    facts = TargetFacts(name="t", hidden_size=HIDDEN, vocab_size=VOCABULARY, num_layers=1, fingerprint=[0.5])
    sizes = {"intermediate": 8, "heads": 1, "kv_heads": 1, "head_size": 8}
    given: dict[str, Any] = {"kind": "guess", "target": facts, "taps": (), "vocabulary": VOCABULARY} | sizes
    return HeadConfig(**given | changes)


class Clock:
    """Time that moves by one second whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def made(
    folder: Path,
    data: Cycles | None = None,
    ids: Tensor | None = None,
    processes: Processes | None = None,
    **schedule: Any,
) -> Trainer:
    torch.manual_seed(0)
    rows = torch.randn(VOCABULARY, HIDDEN)
    words = DraftVocabulary(torch.arange(VOCABULARY) if ids is None else ids, rows)
    teacher = Teacher(torch.randn(VOCABULARY, HIDDEN), rows, lambda states: states, 1)
    folder.mkdir(exist_ok=True)
    head = Guess(config(), words)
    made = {"epochs": 3.0, "save_every": 1e9, "evaluate_every": 1e9} | schedule
    given = Processes() if processes is None else processes
    return Trainer(head, teacher, data or Cycles(), folder, Schedule(**made), torch.device("cpu"), Clock(), given)


def guess(trainer: Trainer) -> Guess:
    assert isinstance(trainer.head, Guess)
    return trainer.head


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: copy.detach().clone() for name, (_, copy) in zip("abcdef", trainer.optimiser.copies, strict=False)}


@pytest.mark.parametrize("fast_first", [True, False])
def test_a_run_goes_on_on_a_processor_of_the_other_precision(
    fast_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.models.placement.fast_bfloat16", lambda: fast_first)
    first = made(tmp_path, epochs=1.0)
    first.run()
    monkeypatch.setattr("outpace.models.placement.fast_bfloat16", lambda: not fast_first)
    second = made(tmp_path, epochs=40.0)
    assert second.resume()
    assert {first.dtype, second.dtype} == {torch.float32, torch.bfloat16}
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())
    assert second.run().step == 40 * first.progress.step
    assert guess(second).map.weight.dtype == second.dtype
    assert second.progress.best < first.progress.best
    assert all(torch.isfinite(value).all() for value in weights(second).values())


def test_it_learns_and_ends_with_the_data(tmp_path: Path) -> None:
    data = Cycles()
    trainer = made(tmp_path, data, epochs=20.0)
    before = trainer.evaluate()["loss"]
    progress = trainer.run()
    assert progress.step == 120
    assert progress.tokens == 20 * data.answer_tokens()
    assert [epoch for epoch, number in data.given if number == 0] == list(range(20))
    assert progress.history[-1][1] < 0.7 * before
    assert progress.figures["double"] == pytest.approx(2 * progress.figures["loss"], rel=1e-4)
    assert guess(trainer).map.weight.dtype == trainer.dtype == training_dtype(torch.device("cpu"))


class Stop(BaseException):
    pass


@pytest.mark.parametrize("at", [1, 5, 6, 7, 13])
def test_a_run_that_was_stopped_goes_on_at_the_next_batch(tmp_path: Path, at: int) -> None:
    whole = made(tmp_path / "whole")
    whole.run()
    first = made(tmp_path / "d")

    def stop(progress: Any, share: float) -> None:
        if progress.step == at:
            raise Stop

    with pytest.raises(Stop):
        first.run(stop)
    first.save()
    steps: list[int] = []
    second = made(tmp_path / "d")
    assert second.resume()
    second.run(lambda progress, share: steps.append(progress.step))
    assert steps == list(range(at + 1, 19))
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name
    assert second.progress.history == whole.progress.history
    assert second.progress.epoch == whole.progress.epoch


def test_a_kill_in_the_middle_of_a_step_or_of_saving_loses_what_was_not_saved_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(tmp_path / "whole")
    whole.run()
    for place in ("step", "save"):
        folder = tmp_path / place
        first = made(folder, save_every=0.0)
        with monkeypatch.context() as patch:
            count = 0

            def killed() -> bool:
                nonlocal count
                count += 1
                if count == 9:
                    raise Stop
                return False

            patch.setattr(
                *(
                    (first.optimiser, "round", lambda real=first.optimiser.round: killed() or real())
                    if place == "step"
                    else (torch, "save", lambda state, path, real=torch.save: killed() or real(state, path))
                )
            )
            with pytest.raises(Stop):
                first.run()
        second = made(folder)
        second.resume()
        assert second.progress.step == 8
        second.run()
        for name, value in weights(whole).items():
            assert torch.equal(value, weights(second)[name]), (place, name)


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    first = made(tmp_path)
    first.run()
    again = made(tmp_path)
    again.resume()
    assert again.run().step == first.progress.step
    assert again.progress.history == first.progress.history
    more = made(tmp_path, epochs=4.0)
    more.resume()
    assert more.run().step == first.progress.step + 6


@pytest.mark.parametrize(("watched", "best"), [(20_000, 1.0), (0, 5.0)])
def test_losses_on_other_held_out_text_are_not_compared(
    watched: int, best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that is watched now may be harder: no later weights would ever be better than the best before."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_held_out", lambda _: {"loss": 1.0})
        made(tmp_path, watched=20_000).run()
    monkeypatch.setattr(Trainer, "_held_out", lambda _: {"loss": 5.0})
    again = made(tmp_path, epochs=4.0, watched=watched)
    again.resume()
    assert (again.progress.best, again.progress.lowest, again.progress.worse) == (best, math.inf, 0)


def test_a_step_without_a_finite_loss_changes_nothing(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    guess(trainer).fail_at = {2, 3, 6}
    seen: list[dict[str, Tensor]] = []
    progress = trainer.run(lambda *_: seen.append(weights(trainer)))
    assert progress.skipped == 3
    assert progress.step == 18
    for step, changed in ((2, False), (3, False), (4, True), (6, False)):
        same = all(torch.equal(value, seen[step - 2][name]) for name, value in seen[step - 1].items())
        assert same is not changed, step
    assert all(math.isfinite(value) for value in progress.figures.values())


def test_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.save()
    guess(trainer).fail_at = {4, 5, 6}
    with pytest.raises(BadInput, match=r"not a finite number 3 steps in a row \(up to step 6\)"):
        trainer.run()
    assert (read_state(tmp_path) or {})["progress"]["step"] == 0


def test_gradients_that_are_not_finite_are_no_step_either(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    before = weights(trainer)
    guess(trainer).map.weight.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(BadInput, match="3 steps in a row"):
        trainer.run()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("epochs", [1000.0, math.inf])
def test_minutes_end_a_run_before_its_data(tmp_path: Path, epochs: float) -> None:
    shares: list[float] = []
    first = made(tmp_path, epochs=epochs, seconds=60.0)
    first.run(lambda progress, share: shares.append(share))
    assert 10 < first.progress.step < 60
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert first.progress.seconds >= 60.0
    again = made(tmp_path, epochs=epochs, seconds=60.0)
    again.resume()
    assert again.run().step == first.progress.step
    longer = made(tmp_path, epochs=epochs, seconds=90.0)
    longer.resume()
    assert first.progress.step < longer.run().step < 90


def test_the_rate_rises_and_falls_towards_the_end(tmp_path: Path) -> None:
    trainer = made(tmp_path, epochs=40.0)
    rates: list[float] = []
    trainer.run(lambda *_: rates.append(trainer.optimiser.parts[0].param_groups[0]["lr"]))
    top = rates.index(max(rates))
    assert 2 < top < 0.1 * len(rates)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)
    assert max(rates) == pytest.approx(trainer.head.matrix_rate, rel=0.1)


def test_training_ends_early_and_the_head_holds_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(tmp_path, epochs=100.0, evaluate_every=-1.0, patience=3)
    losses = iter([3.0, 2.0, 2.5, 2.1, 2.2, 9.0])
    best: dict[str, Tensor] = {}
    real = Head.eval

    def losses_of(batch: Batch) -> dict[str, Tensor]:
        if trainer.head.training:
            return Trainer._losses(trainer, batch)
        value = next(losses)
        if value == 2.0:
            best.update({name: weight.detach().clone() for name, weight in trainer._trained()})
        return {"loss": torch.tensor(value)}

    monkeypatch.setattr(trainer, "_losses", losses_of)
    progress = trainer.run()
    assert [loss for _, loss in progress.history] == [3.0, 2.0, 2.5, pytest.approx(2.1), pytest.approx(2.2)]
    assert progress.step == 5
    assert all(torch.equal(weight, best[name]) for name, weight in trainer._trained())
    again = made(tmp_path, epochs=100.0, patience=3)
    again.resume()
    assert again.run().step == 5
    assert real is Head.eval


def test_patience_counts_where_the_rate_has_fallen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(tmp_path, epochs=10.0, evaluate_every=-1.0, patience=3, patient_until=0.5)
    losses = iter(range(100))
    monkeypatch.setattr(trainer, "_held_out", lambda: {"loss": float(next(losses))})
    assert trainer.run().step == 32  # the third of 60 steps from the 30th on


def test_a_run_that_has_ended_goes_on_with_more_data_or_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that rises again lifts the loss at first, and other held-out text has another loss."""
    first = made(tmp_path, epochs=100.0, evaluate_every=-1.0, patience=2)
    given = iter([2.0, 2.5, 2.6])
    monkeypatch.setattr(first, "_held_out", lambda: {"loss": next(given)})
    assert first.run().step == 3
    kept = {name: weight.clone() for name, weight in first.best.items()}
    longer = made(tmp_path, epochs=200.0, evaluate_every=-1.0, patience=2)
    assert longer.resume()
    assert (longer.progress.best, longer.progress.worse) == (2.0, 0)
    given = iter([2.9, 2.8, 2.7, 2.75, 2.76])
    monkeypatch.setattr(longer, "_held_out", lambda: {"loss": next(given)})
    assert longer.run().step == 8
    assert all(torch.equal(kept[name], weight) for name, weight in longer.best.items())
    more = made(tmp_path, Cycles(8), epochs=200.0, evaluate_every=-1.0, patience=2)
    measured: list[dict[str, Tensor]] = []

    def held_out(trainer: Trainer) -> dict[str, float]:
        measured.append({name: weight.clone() for name, weight in trainer._trained()})
        return {"loss": 3.5}

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_held_out", held_out)
        assert more.resume()
    assert more.progress.best == 3.5  # of the best weights, on the data that there are now
    assert all(torch.equal(kept[name], weight) for name, weight in measured[0].items())
    for (_, weight), (_, copy) in zip(more._trained(), more.optimiser.copies, strict=True):
        assert torch.equal(weight, copy.to(weight.dtype))  # and the run goes on from where it was
    given = iter([3.0, 3.1, 3.2])
    monkeypatch.setattr(more, "_held_out", lambda: {"loss": next(given)})
    assert more.run().best == 3.0


def test_nothing_held_out_leaves_the_last_weights(tmp_path: Path) -> None:
    trainer = made(tmp_path, Cycles(held=0))
    assert trainer.run().history == []
    for (_, weight), (_, copy) in zip(trainer._trained(), trainer.optimiser.copies, strict=True):
        assert torch.equal(weight, copy.to(weight.dtype))


def test_a_full_disk_keeps_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(tmp_path)
    trainer.save()
    before = (tmp_path / STATE).read_bytes()

    def full(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(BadInput, match=r"No space left.*--resume"):
        trainer.run()
    assert (tmp_path / STATE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [STATE]


def test_states_of_other_runs_and_damaged_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not made(tmp_path).resume()
    made(tmp_path).save()
    other = made(tmp_path)
    other.head.config = config(intermediate=16)
    with pytest.raises(BadInput, match="other settings"):
        other.resume()
    with pytest.raises(BadInput, match="other words"):
        made(tmp_path, ids=torch.arange(VOCABULARY).flip(0)).resume()
    rounded = made(tmp_path)
    rounded.head.config = config(target=config().target.model_copy(update={"fingerprint": [0.49999], "name": "again"}))
    assert rounded.resume()
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:500])
    with pytest.raises(BadInput, match=r"damaged.*delete it") as caught:
        made(tmp_path).resume()
    assert "\n" not in str(caught.value)
    torch.save({"head": {}}, tmp_path / STATE)
    with pytest.raises(BadInput, match=r"damaged.*it lacks best"):
        made(tmp_path).resume()


def test_training_needs_data_and_time(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to train on"):
        made(tmp_path, Cycles(count=0)).run()
    schedules: list[dict[str, Any]] = [{"seconds": 0.0}, {"epochs": -1.0}, {"seconds": math.nan}]
    for wrong in schedules:
        with pytest.raises(BadInput, match="above 0"):
            Schedule(**wrong)


def test_an_older_torch_trains_by_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    trainer = made(tmp_path, epochs=20.0)
    assert [type(one) for one in trainer.optimiser.parts] == [torch.optim.AdamW]
    before = trainer.evaluate()["loss"]
    assert trainer.run().history[-1][1] < before


class Doubled(Cycles):
    """Batches that are two of ``Cycles``'s each."""

    def answer_tokens(self) -> int:
        return super().answer_tokens()

    def train(self, epoch: int, skip: int = 0, own: Own = every) -> Iterator[Batch]:
        singles = list(super().train(epoch, 2 * skip))
        for first, second in zip(singles[::2], singles[1::2], strict=True):
            tokens, real = torch.cat([first.tokens, second.tokens]), torch.cat([first.real, second.real])
            yield Batch(tokens, {}, real, real)


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    large, small = made(tmp_path / "large", Doubled()), made(tmp_path / "small", accumulate=2)
    large.run()
    small.run()
    assert large.progress.step == small.progress.step == 9
    assert large.progress.tokens == small.progress.tokens
    for name, value in weights(large).items():
        torch.testing.assert_close(value, weights(small)[name], atol=2e-2, rtol=2e-2)  # slopes are in bfloat16


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_run_that_accumulates_goes_on_with_whole_steps(tmp_path: Path, at: int) -> None:
    whole = made(tmp_path / "whole", accumulate=2)
    whole.run()
    first = made(tmp_path / "d", accumulate=2)
    batches = 0
    real = Trainer._losses

    def losses(batch: Batch) -> dict[str, Tensor]:
        nonlocal batches
        if first.head.training:
            batches += 1
            if batches > at:
                raise Stop
        return real(first, batch)

    first._losses = losses  # type: ignore[method-assign]
    with pytest.raises(Stop):
        first.run()
    first.save()
    second = made(tmp_path / "d", accumulate=2)
    assert second.resume()
    assert second.progress.step == at // 2
    assert second.progress.batch == (at - at % 2) % 6
    second.run()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


def test_the_loss_is_watched_on_a_sample_and_measured_on_all(tmp_path: Path) -> None:
    class Sampled(Cycles):
        def all_held_out(self) -> Iterator[Batch]:
            for number in range(5):
                yield self._batch(number + 100)

    trainer = made(tmp_path, Sampled())
    trainer.run()
    assert trainer.progress.history[-1][1] == pytest.approx(trainer.evaluate()["loss"])
    assert trainer.measure()["loss"] != pytest.approx(trainer.evaluate()["loss"])


def test_a_low_rank_lm_head_is_no_matrix_of_the_network(tmp_path: Path) -> None:
    """Muon's steps are as large for every matrix; rows of an LM head are used as seldom as their tokens."""
    torch.manual_seed(0)
    rows = torch.randn(VOCABULARY, HIDDEN)
    head = Guess(config(rank=2), DraftVocabulary(torch.arange(VOCABULARY), rows, rank=2))
    teacher = Teacher(torch.randn(VOCABULARY, HIDDEN), rows, lambda states: states, 1)
    trainer = Trainer(head, teacher, Cycles(), tmp_path, Schedule(), torch.device("cpu"))
    adam = next(one for one in trainer.optimiser.parts if isinstance(one, torch.optim.AdamW))
    shapes = [tuple(one.shape) for group in adam.param_groups for one in group["params"]]
    assert (VOCABULARY, 2) in shapes and (2, HIDDEN) in shapes


class Two(Processes):
    """The first of two processes that agree."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 2


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, first: int, then: int) -> None:
    """Batches that were trained on are not trained on again, and none is left out."""

    def of(count: int, data: Cycles) -> Trainer:
        return made(tmp_path, data, processes=Two() if count == 2 else None, epochs=1.0)

    before = of(first, Cycles(8))
    for batch in list(before.processes.deal(before.data.train(0)))[: 4 // first]:
        before._step(batch)
        before.progress.batch += 1
    before.save()
    data = Cycles(8)
    after = of(then, data)
    assert after.resume()
    next(after._batches())
    assert data.given[0] == (0, 4)


def test_a_pass_with_other_batches_begins_anew(tmp_path: Path) -> None:
    before = made(tmp_path, epochs=2.0)
    before.progress.batch = 3
    before.save()
    data = Cycles()
    data.cut = [40]
    after = made(tmp_path, data, epochs=2.0)
    assert after.resume()
    assert after.progress.batch == 0


def test_patience_goes_on_where_the_time_is_as_it_was(tmp_path: Path) -> None:
    before = made(tmp_path, asked_seconds=600.0)
    before.progress.worse, before.progress.lowest = 2, 1.5
    before.schedule = replace(before.schedule, seconds=480.0)  # what data has left
    before.save()
    after = made(tmp_path, asked_seconds=600.0)
    assert after.resume()
    assert (after.progress.worse, after.progress.lowest) == (2, 1.5)
    longer = made(tmp_path, asked_seconds=900.0)
    assert longer.resume()
    assert longer.progress.worse == 0


def test_a_run_on_other_conversations_is_another_run(tmp_path: Path) -> None:
    before = made(tmp_path)
    before.source = "part-1"
    before.save()
    after = made(tmp_path, Cycles(9))
    after.source = "part-2"
    with pytest.raises(BadInput, match=r"conversations of part-1; .* --from"):
        after.resume()


def test_means_over_rounds_weigh_rounds() -> None:
    head = made_head()
    batches = [Cycles()._batch(0), Cycles()._batch(1)]
    given = iter([{"loss": 1.0, "accept_1": 0.5, "rounds": 10.0}, {"loss": 2.0, "accept_1": 1.0, "rounds": 2.0}])

    def losses(batch: Batch) -> dict[str, Tensor]:
        return {name: torch.tensor(value) for name, value in next(given).items()}

    means = mean_losses(head, iter(batches), losses, lambda _: nullcontext())
    assert means == {"loss": pytest.approx(1.5), "accept_1": pytest.approx(7 / 12)}


def made_head() -> Guess:
    return Guess(config(), DraftVocabulary(torch.arange(VOCABULARY), torch.randn(VOCABULARY, HIDDEN)))
