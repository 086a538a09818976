"""What the training of gates computes: outcomes of thresholds, classifiers and their thresholds, made-up tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace.core.errors import BadInput
from outpace.gates.gate import random_gate
from outpace.prompts.task import ExactAnswer
from outpace.training.gates.classifier import Fitted, Labels, auc, fit, held_out, passing_threshold, stopping_threshold
from outpace.training.gates.kinds.bild import DraftToken, best_thresholds, outcome
from outpace.training.gates.tasks import tasks

pytestmark = pytest.mark.usefixtures("one_thread")


def test_outcomes_of_thresholds_by_hand() -> None:
    draft = [DraftToken(0.9, 0.1, 0.0, True), DraftToken(0.8, 2.0, 1.5, False), DraftToken(0.4, 0.2, 0.0, True)]
    costs = [1.0, 1.5, 2.0, 2.5].__getitem__
    found = outcome([draft], 0.0, 0.0, costs)
    assert (found.tokens, found.seconds, found.excess) == (2, 2.5, 0.0)
    found = outcome([draft], 0.0, 2.0, costs)
    assert (found.tokens, found.seconds, found.excess) == (4, 2.5, 1.5)
    found = outcome([draft], 0.5, 2.0, costs)
    assert (found.tokens, found.seconds, found.excess) == (3, 2.0, 1.5)
    found = outcome([draft], 0.95, 2.0, costs)
    assert (found.tokens, found.seconds) == (1, 1.0)
    assert best_thresholds([draft], 10.0, costs)[1] == 2.0
    assert best_thresholds([draft], 0.1, costs) == (0.9, 0.0)


def test_a_classifier_separates_what_can_be_separated() -> None:
    draw, data = torch.Generator().manual_seed(0), Labels()
    for number in range(400):
        row = torch.randn(5, generator=draw)
        data.add(row, bool(row[0] + row[1] > 0.0), f"prompt {number % 80}")
    fitted = fit(data, 8, 0, lambda: False, "true")
    assert fitted.figures["auc"] > 0.97
    assert fitted.figures["labels"] == 400
    error = passing_threshold(fitted, 0.05)
    stands = fitted.probs > error
    assert float(fitted.labels[stands].mean()) >= 0.95
    assert 0.3 < float(stands.float().mean()) < 0.7
    stopping = stopping_threshold(fitted, 0.1)
    assert float((fitted.probs[fitted.labels > 0.5] < stopping).float().mean()) <= 0.1


def test_pivots_that_are_certain_do_not_stand() -> None:
    """The classifier's float32 rounds to 1, and a threshold of 1 would let everything stand."""
    fitted = Fitted(random_gate(5), torch.ones(400), torch.ones(400), {})
    assert stopping_threshold(fitted, 0.1) < 1.0
    assert stopping_threshold(fitted, 1.0) == 1.0


def test_thresholds_where_nothing_can_be_told() -> None:
    data = Labels()
    for number in range(400):
        data.add(torch.zeros(2), number % 2 == 0, f"prompt {number % 80}")
    fitted = fit(data, 2, 0, lambda: False, "true")
    assert fitted.figures["auc"] == pytest.approx(0.5)
    assert passing_threshold(fitted, 0.05) == 1.0  # no token would stand


def test_auc_counts_ties_half() -> None:
    truth = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert auc(torch.tensor([0.9, 0.1, 0.8, 0.2]), truth) == 1.0
    assert auc(torch.tensor([0.1, 0.9, 0.2, 0.8]), truth) == 0.0
    assert auc(torch.tensor([0.5, 0.5, 0.5, 0.5]), truth) == 0.5


@pytest.mark.parametrize("labels", [[True] * 200, [False] * 200, [True, False] * 5])
def test_labels_that_do_not_suffice_are_refused(labels: list[bool]) -> None:
    data = Labels()
    for number, label in enumerate(labels):
        data.add(torch.zeros(2), label, f"prompt {number}")
    with pytest.raises(BadInput, match="draft tokens are pivots: a gate needs at least 20, of both kinds"):
        fit(data, 2, 0, lambda: False, "pivots")


def test_made_up_tasks_have_known_numbers_and_a_seed() -> None:
    def first(seed: int) -> list[tuple[str, Any]]:
        made = tasks(seed)
        return [(one.text, one.task) for one in (next(made) for _ in range(200))]

    assert first(1) == first(1) != first(2)
    for text, task in first(3):
        assert isinstance(task, ExactAnswer)
        assert int(task.accepted[0]) >= 1
        assert text.endswith((".", "?"))
    assert {held_out(text) for text, _ in first(3)} == {True, False}
