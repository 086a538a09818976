"""Losses of single rows: the formulas of their papers, and slopes that autograd finds in these."""

import pytest
import torch
from torch import Tensor

from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.row_losses import ROWS, Form, row_losses

HIDDEN, VOCABULARY = 6, 9


def plain(states: Tensor, rows: Tensor, p: Tensor, form: Form, eta: float) -> Tensor:
    """The formulas, written out for autograd."""
    q = (states @ rows.T).softmax(-1)
    cross = -(p * q.log()).sum(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    if form == "ce":
        return cross
    if form == "tv":
        return 1.0 - acceptance
    share = (-eta * acceptance.detach()).exp()
    entropy = -(p * p.log()).sum(-1)
    return share * (cross - entropy) + (1.0 - share) * (1.0 - acceptance)


def given(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    states = torch.randn(count, HIDDEN, requires_grad=True)
    return states, torch.randn(VOCABULARY, HIDDEN), (2 * torch.randn(count, VOCABULARY)).softmax(-1)


@pytest.mark.parametrize("form", ["ce", "tv", "lk"])
@pytest.mark.parametrize("count", [1, 7, ROWS + 3])
def test_losses_and_slopes_are_those_of_the_formulas(form: Form, count: int) -> None:
    states, rows, p = given(count)
    weights = torch.rand(count)
    found = row_losses(states, rows, p, p.argmax(-1), torch.full((count,), -1), form=form, eta=2.0)
    right = plain(states, rows, p, form, 2.0)
    torch.testing.assert_close(found.losses, right, atol=1e-5, rtol=1e-4)
    slopes = [torch.autograd.grad(one @ weights, states)[0] for one in (found.losses, right)]
    torch.testing.assert_close(*slopes, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("form", ["ce", "tv", "lk"])
@pytest.mark.parametrize("how", [{}, {"own": True}])
def test_rows_at_places_have_the_losses_and_slopes_of_rows_side_by_side(
    form: Form, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows are held at once, and where their distributions lie, changes nothing but rounding."""
    states, rows, p = given(70)
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY), rows, **how)
    places, labels = torch.randperm(70)[:50], torch.randint(-1, VOCABULARY, (50,))
    trained = [states, *vocabulary.parameters()]
    found = []
    for at, chosen, best in ((places, p, p.argmax(-1)), (None, p[places], p.argmax(-1)[places])):
        monkeypatch.setattr("outpace.heads.row_losses.ROWS", 7 if at is None else 512)
        one = row_losses(states[:50], vocabulary, chosen, best, labels, places=at, form=form)
        found.append((*one, *torch.autograd.grad(one.losses.sum(), trained)))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["ce", "tv", "lk"])
@pytest.mark.parametrize("how", [{"rank": 4}, {"own": True}])
def test_a_trained_lm_head_has_slopes_too(form: Form, how: dict[str, int]) -> None:
    states, rows, p = given(ROWS + 5)
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY), rows, **how)  # type: ignore[arg-type]
    weights = torch.rand(len(p))
    none = torch.full((len(p),), -1)
    found = row_losses(states, vocabulary, p, p.argmax(-1), none, form=form).losses
    right = plain(states, vocabulary.matrix, p, form, 3.0)
    trained = [states, *vocabulary.parameters()]
    for one, other in zip(
        torch.autograd.grad(found @ weights, trained), torch.autograd.grad(right @ weights, trained), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)


def test_lk_lies_between_kl_and_total_variation() -> None:
    states, rows, p = given(20)
    none = torch.full((20,), -1)

    def loss(form: Form, eta: float = 3.0) -> Tensor:
        return row_losses(states, rows, p, p.argmax(-1), none, form=form, eta=eta).losses

    entropy = -(p * p.log()).sum(-1)
    torch.testing.assert_close(loss("lk", 0.0), loss("ce") - entropy, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss("lk", 1e4), loss("tv"), atol=1e-4, rtol=1e-3)


def test_what_is_right_is_told_from_labels_and_what_agrees_from_the_target() -> None:
    states, rows, p = given(30)
    best = (states @ rows.T).argmax(-1)
    labels = torch.where(torch.arange(30) % 3 == 0, best, (best + 1) % VOCABULARY)
    labels[::5] = -1
    found = row_losses(states, rows, p, p.argmax(-1), labels)
    assert torch.equal(found.right, labels == best)
    assert torch.equal(found.agreed, p.argmax(-1) == best)
    assert len(row_losses(states[:0], rows, p[:0], best[:0], labels[:0]).losses) == 0
