"""A head's words in every form, as they are trained and as they are scored; and what losses say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from dense_support import PRECISIONS, target_of
from outpace.heads.base import Head
from outpace.heads.checkpoint import save
from outpace.heads.draft_vocabulary import DraftVocabulary, factored
from outpace.heads.head_config import HeadConfig, TargetFacts
from outpace.heads.head_folder import open_head
from outpace.heads.kinds import find_kind
from outpace.heads.lm_head import LmHead, Product
from outpace.heads.losses import (
    DIVERGENCES,
    TeacherTargets,
    soft_cross_entropy,
    soft_divergence,
    weighted_cross_entropy,
)
from outpace.heads.row_losses import ROWS
from outpace.heads.untrained import random_head
from outpace.targets.base import Target
from outpace.targets.table import TableTarget
from support import Row

HIDDEN, VOCAB = 16, 40
FORMS: dict[str, dict[str, Any]] = {"borrowed": {}, "own": {"own": True}, "low rank": {"rank": 5}}


def rows_of(seed: int, count: int = VOCAB, width: int = HIDDEN) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def words_of(form: str, seed: int = 0) -> DraftVocabulary:
    return DraftVocabulary(torch.arange(VOCAB), rows_of(seed), **FORMS[form])


# ------------------------------------------------------------------------------------------------------ the forms


def test_borrowed_rows_are_neither_trained_nor_stored_and_the_others_are_both() -> None:
    names = {form: {name for name, _ in words_of(form).named_parameters()} for form in FORMS}
    assert names == {"borrowed": set(), "own": {"rows"}, "low rank": {"down", "up"}}
    assert {form: words_of(form).own for form in FORMS} == {"borrowed": False, "own": True, "low rank": True}
    stored = {form: {*words_of(form).state_dict()} - {"d2t"} for form in FORMS}
    assert stored == names


def test_own_rows_are_a_copy() -> None:
    rows = rows_of(0)
    words = DraftVocabulary(torch.arange(VOCAB), rows, own=True)
    with torch.no_grad():
        words.rows += 1.0
    assert torch.equal(rows, rows_of(0))


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_the_matrix_times_the_state(form: str) -> None:
    words, states = words_of(form), rows_of(1, 7)
    assert len(words) == VOCAB
    assert words.matrix.shape == (VOCAB, HIDDEN)
    torch.testing.assert_close(words(states), states @ words.matrix.T, atol=1e-4, rtol=1e-4)
    narrow, matrix = words.factors(states)
    assert torch.equal(narrow @ matrix.T, words(states))
    assert narrow.shape[1] == (5 if form == "low rank" else HIDDEN)


@given(
    st.integers(1, 30), st.integers(1, 20), st.integers(1, 20), st.integers(0, 99), st.sampled_from([0.01, 1.0, 30.0])
)
def test_factors_are_the_best_approximation_of_their_rank(
    count: int, width: int, rank: int, seed: int, size: float
) -> None:
    rank = min(rank, width)
    rows = size * rows_of(seed, count, width)
    down, up = factored(rows, rank)
    assert (down.shape, up.shape) == ((rank, width), (count, rank))
    left = torch.linalg.svdvals(rows.double())[rank:].square().sum().sqrt()  # Eckart and Young
    assert float((up @ down - rows).norm()) == pytest.approx(float(left), rel=1e-2, abs=2e-3 * float(rows.norm()))


def test_factors_share_the_size_evenly() -> None:
    down, up = factored(rows_of(3), 6)
    torch.testing.assert_close(down.norm(dim=1), up.norm(dim=0), rtol=1e-3, atol=1e-3)


@given(st.lists(st.integers(0, 59), unique=True, min_size=1))
def test_places_say_which_word_a_token_is(ids: list[int]) -> None:
    places = DraftVocabulary(torch.tensor(ids), rows_of(0, len(ids))).t2d(60).tolist()
    assert [places[token] for token in ids] == list(range(len(ids)))
    assert all(places[token] == -1 for token in set(range(60)) - set(ids))


def test_a_low_rank_head_is_stored_and_loaded_whole(tmp_path: Path) -> None:
    target = TableTarget(12, seed=1)
    head = random_head(["medusa"], target, vocabulary=9, rank=4)
    head.config.target.fingerprint = _fingerprint(target)
    save(head, tmp_path, {})
    again, states = open_head(tmp_path).load(target), torch.randn(3, 12)
    torch.testing.assert_close(
        again.draft_vocabulary(states), head.draft_vocabulary(states), atol=0.05, rtol=0.05
    )  # stored in bfloat16
    assert torch.equal(again.draft_vocabulary.d2t, head.draft_vocabulary.d2t)


def _fingerprint(target: Target) -> list[float]:
    from outpace.heads.fingerprint import probe

    return probe(target)


# ------------------------------------------------------------------------------------------- beside a real target


def head_for(target: Target, words: DraftVocabulary) -> Head:
    facts = TargetFacts(
        name="t", hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=3, fingerprint=[]
    )
    sizes: dict[str, Any] = {"intermediate": 8, "heads": 1, "kv_heads": 1, "head_size": 2, "vocabulary": len(words)}
    config = HeadConfig(
        kind="medusa", target=facts, aux_hidden_state_layers=(3,), rank=words.rank, epsilon=1e-3, **sizes
    )
    return find_kind("medusa")(config, words)


def norm_of(width: int, epsilon: float | None) -> nn.RMSNorm:
    norm = nn.RMSNorm(width, epsilon)
    norm.weight.data = 0.5 + torch.rand(width, generator=torch.Generator().manual_seed(5))
    return norm


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rank", [0, 7, 32])
@pytest.mark.parametrize("precision", [*PRECISIONS, "table"])
def test_words_are_scored_beside_a_target_as_they_were_trained(precision: str, rank: int, normed: bool) -> None:
    target: Target = TableTarget(48) if precision == "table" else target_of("heads-of-16-alone", precision)
    width = target.hidden_size
    words = DraftVocabulary(torch.arange(VOCAB), rows_of(0, VOCAB, width), rank=rank)
    norm = norm_of(width, 0.1) if normed else None
    states = 0.3 * rows_of(2, 5, width)  # small: a norm's epsilon counts
    expected = words(states if norm is None else norm(states)).detach()
    found = LmHead(head_for(target, words), target, norm=norm)(states)
    close = {"float32": 1e-5, "table": 1e-5, "bfloat16": 0.01}.get(precision, 0.02)
    assert float((found - expected).abs().max()) < close * float(expected.abs().max())


def test_a_norm_without_an_epsilon_has_the_heads() -> None:
    target = TableTarget(HIDDEN)
    states = 0.02 * rows_of(2, 5)
    for rank in (0, 5):
        words = DraftVocabulary(torch.arange(VOCAB), rows_of(0), rank=rank)
        found = LmHead(head_for(target, words), target, norm=norm_of(HIDDEN, None))(states)
        expected = words(norm_of(HIDDEN, 1e-3)(states)).detach()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_product_takes_any_width() -> None:
    for width in (1, 5, 33):
        weight, rows = rows_of(1, 17, width), rows_of(2, 3, width)
        for target in (TableTarget(6), target_of("heads-of-16-alone", "float32")):
            product = Product(head_for(target, words_of("borrowed")).config, weight, target)
            torch.testing.assert_close(product(rows), rows @ weight.T, atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS, 2 * ROWS + 3])
def test_said_is_what_the_target_says(count: int) -> None:
    states, rows = rows_of(1, count), rows_of(2)
    said, logits = TeacherTargets(states, rows), states @ rows.T
    torch.testing.assert_close(said.p.float(), logits.softmax(-1), atol=4e-3, rtol=4e-3)
    assert torch.equal(said.best, logits.argmax(-1))


def plain_mean(words: DraftVocabulary, states: Tensor, said: TeacherTargets, places: Tensor) -> Tensor:
    q: Tensor = words(states).log_softmax(-1)
    return -(said.p[places].float() * q).sum(-1).mean()


def gradients(loss: Tensor, weights: Seq[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(weights))


def assert_alike(found: Seq[Tensor], expected: Seq[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("way", ["words", "matrix"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, ROWS + 5, 2 * ROWS + 90])
def test_the_gradient_is_the_means(form: str, count: int, way: str) -> None:
    words, said = words_of(form), TeacherTargets(rows_of(1, 60), rows_of(2))
    places = torch.arange(count) * 7 % 60
    states = rows_of(4, count).requires_grad_()
    weights = [states, *words.parameters()]
    expected = plain_mean(words, states, said, places)
    mean, hits = soft_cross_entropy(states, words if way == "words" else words.matrix, said, places)
    assert mean.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_alike(gradients(5.0 * mean, weights), gradients(5.0 * expected, weights))
    assert hits.item() == pytest.approx(agreed(words, states, said, places))


@pytest.mark.parametrize("form", FORMS)
def test_weights_count_in_every_gradient(form: str) -> None:
    count = ROWS + 5
    words, said, places = words_of(form), TeacherTargets(rows_of(1, 60), rows_of(2)), torch.arange(count) % 60
    states = rows_of(4, count).requires_grad_()
    shares = 3.0 * torch.rand(count, generator=torch.Generator().manual_seed(1))
    shares[7] = 0.0
    losses = -(said.p[places].float() * words(states).log_softmax(-1)).sum(-1)
    expected = (shares * losses).sum() / shares.sum()
    found, hits = weighted_cross_entropy(states, words, said, places, shares)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(hits, words(states).argmax(-1) == said.best[places])
    weights = [states, *words.parameters()]
    assert_alike(gradients(found, weights), gradients(expected, weights))


def agreed(words: DraftVocabulary, states: Tensor, said: TeacherTargets, places: Tensor) -> float:
    return float((words(states).argmax(-1) == said.best[places]).float().mean())


def test_gradients_of_several_losses_over_the_same_rows_add_up() -> None:
    words, said = words_of("own"), TeacherTargets(rows_of(1, 60), rows_of(2))

    def both(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        parts = [loss(rows_of(seed, count), torch.arange(count) % 60) for seed, count in ((5, 30), (6, 7))]
        return gradients(parts[0] + 0.8 * parts[1], [words.rows])

    found = both(lambda states, places: soft_cross_entropy(states, words, said, places)[0])
    assert_alike(found, both(lambda states, places: plain_mean(words, states, said, places)))


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_are_no_loss(form: str) -> None:
    states = torch.zeros(0, HIDDEN, requires_grad=True)
    nowhere = torch.zeros(0, dtype=torch.long)
    mean, hits = soft_cross_entropy(states, words_of(form), TeacherTargets(rows_of(1, 3), rows_of(2)), nowhere)
    assert (mean.item(), hits.item()) == (0.0, 0.0)
    assert gradients(mean, [states])[0].shape == states.shape


def explicit(name: str, target: list[float], draft: list[float]) -> float:
    """The divergences from their definitions, in float64."""
    p, q = (np.exp(np.array(one) - np.max(one)) for one in (target, draft))
    p, q = p / p.sum(), q / q.sum()
    mixed = (p + q) / 2
    if name == "fkl":
        return -float((p * np.log(q)).sum())
    if name == "rkl":
        return _kl(q, p)
    return 0.5 * (_kl(p, mixed) + _kl(q, mixed)) if name == "jsd" else 1.0 - float(np.minimum(p, q).sum())


def _kl(p: Row, q: Row) -> float:
    return float((p * (np.log(p) - np.log(q))).sum())


LOGITS = st.lists(st.floats(-8.0, 8.0, width=32), min_size=5, max_size=5)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(target=LOGITS, draft=LOGITS)
def test_divergences_are_what_their_definitions_say(name: str, target: list[float], draft: list[float]) -> None:
    found = DIVERGENCES[name](torch.tensor([target, target]), torch.tensor([draft, target]))
    assert float(found[0]) == pytest.approx(explicit(name, target, draft), rel=1e-4, abs=1e-5)
    assert float(found[1]) == pytest.approx(explicit(name, target, target), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_a_few_rows_at_a_time(name: str, form: str) -> None:
    count = ROWS + 9
    words, said = words_of(form), TeacherTargets(rows_of(1, 60), rows_of(2))
    places, states = torch.arange(count) % 60, rows_of(4, count).requires_grad_()
    expected = DIVERGENCES[name](said.p[places].float().clamp_min(1e-9).log(), words(states)).mean()
    found, hits = soft_divergence(name, states, words.matrix, said, places)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert hits.item() == pytest.approx(agreed(words, states, said, places))
    weights = [states, *words.parameters()]
    assert_alike(gradients(found, weights), gradients(expected, weights))
