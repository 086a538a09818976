"""Networks of the EAGLE family: training asks of them exactly what decoding has them do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from eagle_support import Written, batch_of, drafted_logits, head_of, table, teacher_for, true_states
from outpace.heads.unrolled import gathered, plainly, spread, unrolled
from outpace.methods.learned.eagle.drafter import EagleNet
from outpace.methods.learned.eagle.feature_method import FeatureMethod
from outpace.methods.learned.eagle.feature_settings import FeatureSettings
from outpace.methods.learned.eagle3.drafter import Eagle3Net
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from target_suite import tiny_model

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {"norms": "eagle3"}),
    ("eagle3", {"norms": "attdrift"}),
    ("eagle3", {"residual": "normed"}),
    ("eagle3", {"qk_norm": True}),
    ("eagle", {}),
    ("eagle", {"bias": True}),
]


@pytest.mark.parametrize("later", [0, 1, 3])
def test_unrolled_attention_and_its_slopes_are_those_of_one_softmax(later: int) -> None:
    torch.manual_seed(later)
    queries = torch.randn(2, 6, 9, 8, requires_grad=True)
    pairs = [
        (torch.randn(2, 2, 9, 8, requires_grad=True), torch.randn(2, 2, 9, 8, requires_grad=True))
        for _ in range(later + 1)
    ]
    slope = torch.randn(2, 6, 9, 8)
    inputs = [queries, *(one for pair in pairs for one in pair)]
    fast = unrolled(queries, pairs[0], pairs[1:])
    plain = plainly(queries, [one.repeat_interleave(3, 1) for pair in pairs for one in pair])
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-4)
    for one, other in zip(
        torch.autograd.grad(fast, inputs, slope), torch.autograd.grad(plain, inputs, slope), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("begin", [0, 4, 8, 9])
@pytest.mark.parametrize("later", [0, 2])
def test_rows_behind_a_prompt_see_it_whole(begin: int, later: int) -> None:
    torch.manual_seed(begin)
    queries = torch.randn(2, 6, 9, 8)
    queries[:, :, :begin] = 0.0
    queries.requires_grad_()
    pairs = [
        (torch.randn(2, 2, 9, 8, requires_grad=True), torch.randn(2, 2, 9, 8, requires_grad=True))
        for _ in range(later + 1)
    ]
    slope = torch.randn(2, 6, 9, 8)
    slope[:, :, :begin] = 0.0
    inputs = [queries, *(one for pair in pairs for one in pair)]
    found = unrolled(queries, pairs[0], pairs[1:], begins=[begin])
    whole = unrolled(queries, pairs[0], pairs[1:])
    assert not found[:, :, :begin].any()
    torch.testing.assert_close(found[:, :, begin:], whole[:, :, begin:], atol=1e-5, rtol=1e-4)
    for one, other in zip(
        torch.autograd.grad(found, inputs, slope), torch.autograd.grad(whole, inputs, slope), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_rows_find_their_places_and_come_back() -> None:
    rows = torch.randn(1, 3, 4, 2)
    places = torch.tensor([1, 4, 5, 9])
    grid = spread(rows, places, torch.Size([2, 5]))
    assert grid.shape == (2, 3, 5, 2)
    assert gathered(grid, places).equal(rows[0].transpose(0, 1).flatten(1))
    assert grid[1, :, 4].equal(rows[0, :, 3])
    assert not grid[0, :, [0, 2, 3]].any()


def expected(head: Any, target: Target, rows: list[list[int]], prompts: list[int], steps: int) -> list[float]:
    """Cross entropy of every step, decoding row by row."""
    written, words = Written(head, target), set(head.draft_vocabulary.d2t.tolist())
    losses: list[list[float]] = [[] for _ in range(steps)]
    for row, prompt in zip(rows, prompts, strict=True):
        states = true_states(target, row, sorted({*head.config.aux_hidden_state_layers, target.num_layers}))
        fused = written.fused(states)
        for last in range(prompt - 1, len(row) - 1):  # the last committed token
            if last < 1:
                continue
            drafted = row[last + 1 : last + steps]
            logits = written.rows(row[: last + 1], fused[:last], drafted)
            for step, one in enumerate(logits):
                if last + 1 + step >= len(row) or row[last + 1 + step] not in words:
                    break  # nothing to be asked for, or nothing that could be drafted
                said = target.lm_head_rows(head.draft_vocabulary.d2t) @ states[target.num_layers][last + step]
                losses[step].append(float(-(said.softmax(-1) * one.log_softmax(-1)).sum()))
    return [sum(one) / max(len(one), 1) for one in losses]


@pytest.mark.parametrize(
    "placed", [{"norms": "eagle3"}, {"norms": "attdrift"}, {"residual": "normed"}, {"qk_norm": True}]
)
@pytest.mark.parametrize("vocabulary", [12, 9])
def test_training_unrolls_what_decoding_runs(placed: dict[str, Any], vocabulary: int) -> None:
    target = table(12)
    head = head_of("eagle3", target, vocabulary, steps=3, decay=0.7, **placed)
    rows, prompts = [[3, 1, 4, 11, 5, 9, 2, 6], [5, 3, 5, 8, 9], [7, 9, 3, 2, 3, 8, 4]], [3, 1, 2]
    batch = batch_of(target, rows, prompts, head.config.aux_hidden_state_layers)
    got = head.losses(batch, teacher_for(target, head))
    each = expected(head, target, rows, prompts, 3)
    weights = [0.7**step for step in range(3)]
    right = sum(w * one for w, one in zip(weights, each, strict=True)) / sum(weights)
    assert float(got["loss"]) == pytest.approx(right, rel=2e-3)  # what the target says is kept in bfloat16


def test_eagle_is_asked_for_features_and_words() -> None:
    target = table(12)
    head = head_of("eagle", target, 9, feature_weight=0.0, word_weight=1.0)
    rows, prompts = [[3, 1, 4, 11, 5, 9, 2, 6], [5, 3, 5, 8, 9]], [3, 2]
    batch, teacher = batch_of(target, rows, prompts, head.config.aux_hidden_state_layers), teacher_for(target, head)
    each = expected(head, target, rows, prompts, 1)
    assert float(head.losses(batch, teacher)["loss"]) == pytest.approx(each[0], rel=2e-3)
    # A head whose layer adds nothing and whose joint is the feature before: the distance is known.
    whole = head_of("eagle", target, feature_weight=1.0, word_weight=0.0)
    for weight in whole.parameters():
        weight.data.zero_()
    whole.fc.weight.data[:, 12:] = torch.eye(12)
    kept = [(row, at) for row, prompt in enumerate(prompts) for at in range(prompt - 2, len(rows[row]) - 2)]
    features = batch.states[target.num_layers]
    here = torch.stack([features[row, at] for row, at in kept])
    there = torch.stack([features[row, at + 1] for row, at in kept])
    teacher = teacher_for(target, whole)
    assert float(whole.losses(batch, teacher)["loss"]) == pytest.approx(float(functional.smooth_l1_loss(here, there)))


def test_noise_is_for_training_alone() -> None:
    target = table(12)
    head = head_of("eagle", target)
    batch, teacher = (
        batch_of(target, [[3, 1, 4, 1, 5, 9]], [2], head.config.aux_hidden_state_layers),
        teacher_for(target, head),
    )
    assert head.losses(batch, teacher)["loss"] == head.losses(batch, teacher)["loss"]
    head.train()
    assert head.losses(batch, teacher)["loss"] != head.losses(batch, teacher)["loss"]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_batch_without_answers_has_no_loss_and_slopes(kind: str) -> None:
    target = table(12)
    head = head_of(kind, target).requires_grad_(True)
    loss = head.losses(
        batch_of(target, [[3, 1, 4]], [3], head.config.aux_hidden_state_layers), teacher_for(target, head)
    )["loss"]
    loss.backward()
    assert float(loss.detach()) == 0.0


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_training_moves_towards_what_the_target_says(kind: str) -> None:
    target = table(12)
    head = head_of(kind, target).requires_grad_(True)
    rows = [[(3 * at + step * step) % 12 for step in range(9)] for at in range(6)]
    batch, teacher = batch_of(target, rows, [2] * 6, head.config.aux_hidden_state_layers), teacher_for(target, head)
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-2)
    losses = []
    for _ in range(30):
        found = head.losses(batch, teacher)
        found["loss"].backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(found["loss"].detach()))
    assert losses[-1] < 0.8 * losses[0]


# ------------------------------------------------------------------------------------------------- beside targets


@pytest.fixture(scope="module", params=["table", "dense", "generic"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "table":
        return table(12)
    model = tiny_model("llama")
    return DenseTarget(read_decoder_spec(model)) if request.param == "dense" else HFTarget(model)


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_decoding_runs_the_network(target: Target, kind: str, options: dict[str, Any]) -> None:
    head = head_of(kind, target, target.vocab_size - 3, **options)
    net = (EagleNet if kind == "eagle" else Eagle3Net)(head, target)
    drafter = FeatureMethod(net, FeatureSettings.model_validate({}), confident=True)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    sequence = target.sequence(tokens)
    state = drafter.begin(sequence)
    target.prefill([sequence], drafter.aux_hidden_state_layers, lambda _, *shown: drafter.on_prefill(state, *shown))
    written = Written(head, target)
    fused = written.fused(true_states(target, tokens, drafter.aux_hidden_state_layers))
    for drafted in ([8, 9, 7], [4], [11, 3, 3, 5]):
        right = written.rows(tokens, fused[: len(tokens) - 1], drafted)
        torch.testing.assert_close(drafted_logits(drafter, state, drafted), right, atol=2e-3, rtol=2e-3)
    drafter.end(state)
