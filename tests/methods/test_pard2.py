"""PARD-2: exact laws, the same network in training and beside a target, masks and weights, with states and without."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distill_support import PARAMS, TARGETS, answers, aux_layers_of, context, law_error, text, trained
from outpace.controllers.base import Budget
from outpace.core.sampling import SamplingParams
from outpace.heads.base import parameters, teacher_of
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import TargetFacts
from outpace.heads.kinds import find_kind, plan
from outpace.heads.losses import TeacherTargets, weighted_cross_entropy
from outpace.heads.untrained import random_head
from outpace.methods.learned.pard2.drafter import CATCH_UP, RECENT, Pard2Drafter, Pard2State
from outpace.methods.learned.pard2.network import FLOOR, Masks, Pard2, reach
from outpace.methods.registry import build
from outpace.targets.base import Target
from outpace.targets.table import TableTarget, random_table
from target_suite import near

MODES: dict[str, dict[str, Any]] = {
    "tree": {"max_nodes": 4, "depth": 2, "topk": 2},
    "chain": {"max_nodes": 2, "depth": 2, "topk": 1},
    "without states": {"max_nodes": 4, "depth": 2, "topk": 2, "features": False},
    "sampled": {"max_nodes": 2, "depth": 2, "sampled": True, "topk": 1},
}


def pard2(target: Target, vocabulary: int = 60, rank: int = 0, **options: Any) -> Pard2:
    head = random_head(["pard2"], target, seed=4, vocabulary=vocabulary, rank=rank, options=options)
    assert isinstance(head, Pard2)
    return head


# --------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PARAMS)
def test_every_mode_keeps_the_law(mode: str, name: str) -> None:
    assert law_error("pard2", "pard2", MODES[mode], PARAMS[name], words=2, rank=0) < 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("words", "rank"), [(3, 0), (3, 2)])
def test_other_vocabularies_keep_the_law(mode: str, words: int, rank: int) -> None:
    assert law_error("pard2", "pard2", MODES[mode], PARAMS["temperature 1"], words, rank) < 1e-6


@cache
def learned() -> tuple[TableTarget, Pard2]:
    """A target, and a drafter that has learned it."""
    target = TableTarget(12, random_table(12, 8, order=1))
    head = pard2(target, layers=1, ahead=3, anchors=1.0, keep=1.0, without=0.5)
    trained(head, target, text(target))
    return target, head


@pytest.mark.parametrize("settings", [*MODES.values(), {}], ids=str)
def test_a_trained_one_drafts_well_and_answers_stay_plain(settings: dict[str, Any]) -> None:
    target, head = learned()
    prompts = [(1, 2), (7,), (3, 3, 3)]
    plain = answers(target, build("none", context(target, head)), prompts, SamplingParams(), 40)
    method = build("pard2", context(target, head), settings)
    drafted = answers(target, method, prompts, SamplingParams(), 40)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    if "depth" in settings or "branching" in settings:  # otherwise how much pays depends on the machine
        assert sum(one.metrics.accepted for one in drafted) > 40


# ------------------------------------------------------------------------------------------- beside the target


def module_rows(head: Pard2, target: Target, tokens: Seq[int], count: int, *, features: bool = True) -> Tensor:
    """What the network, as it is trained, says of ``count`` tokens after these: (count, Vd)."""
    embedded = target.embed(torch.tensor(tokens)).clone().float()[None]
    carried = torch.zeros_like(embedded)
    if features and len(tokens) > 1:
        hidden_states = aux_layers_of(target, tokens, head.config.aux_hidden_state_layers)
        carried[0, 1:] = head.fused([hidden_states[tap].float() for tap in head.config.aux_hidden_state_layers])
    last = len(tokens) - 1
    depths = torch.arange(1, count)
    masks = Masks(
        torch.tensor([[last]]), torch.ones(1, 1, dtype=torch.bool), torch.zeros(count - 1, dtype=torch.long), depths
    )
    hung = (head.mask + carried[:, last]).expand(1, count - 1, -1)
    states = head.run(embedded + carried, hung, masks)
    found: Tensor = head.draft_vocabulary(head.norm(states[0, last:]))
    return found


def said(drafter: Pard2Drafter, state: Pard2State, count: int) -> Tensor:
    """The drafter's logits for the next tokens of a request."""
    found = drafter.rows([state], [count])[0]
    assert found is not None
    return found


def drafted_rows(drafter: Pard2Drafter, target: Target, tokens: Seq[int], count: int = 4) -> Tensor:
    """The drafter's logits for the tokens after a prompt."""
    state = begun(drafter, target, tokens)
    found = said(drafter, state, count)
    drafter.end(state)
    return found


def begun(drafter: Pard2Drafter, target: Target, tokens: Seq[int]) -> Pard2State:
    state = drafter.begin(target.sequence(tokens))
    layers = drafter.aux_hidden_state_layers
    target.prefill([state.sequence], layers, (lambda _, *shown: drafter.on_prefill(state, *shown)) if layers else None)
    return state


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("rank", [0, 6])
def test_what_runs_beside_a_target_is_what_was_trained(kind: str, features: bool, rank: int) -> None:
    target = TARGETS[kind]()
    head = pard2(target, rank=rank)
    drafter = Pard2Drafter(head, target, features=features)
    assert bool(drafter.aux_hidden_state_layers) is features
    for tokens in ([5, 60, 7, 88, 13, 2, 41], [9]):
        near(drafted_rows(drafter, target, tokens), module_rows(head, target, tokens, 4, features=features))


def test_the_targets_states_make_a_difference() -> None:
    target = TARGETS["dense"]()
    head = pard2(target)
    tokens = [5, 60, 7, 88]
    with_states, without = (
        drafted_rows(Pard2Drafter(head, target, features=on), target, tokens) for on in (True, False)
    )
    assert float((with_states - without).abs().max()) > 0.1


@pytest.mark.parametrize("features", [True, False])
def test_rows_after_some_rounds_are_those_of_the_whole_text(features: bool) -> None:
    target = TARGETS["dense"]()
    head = pard2(target)
    method = build("pard2", context(target, head), {"max_nodes": 6, "depth": 3, "topk": 2, "features": features})
    drafter = method.drafter
    assert isinstance(drafter, Pard2Drafter)
    seen = 0

    def checked(states: Any, depths: Any) -> Any:
        nonlocal seen
        found = Pard2Drafter.rows(drafter, states, depths)
        for state, rows in zip(states, found, strict=True):
            assert rows is not None
            fresh = Pard2Drafter(head, target, features=features)
            near(rows, drafted_rows(fresh, target, state.sequence.tokens, depths[0]))
            seen += 1
        return found

    drafter.rows = checked  # type: ignore[method-assign]
    answers(target, method, [[4, 5, 6], [70, 3]], SamplingParams(temperature=1.0), 6)
    assert seen > 4


def test_a_batch_drafts_what_each_drafts_alone() -> None:
    target = TARGETS["dense"]()
    drafter = Pard2Drafter(pard2(target), target, 3)
    prompts = [[3, 4, 5], list(range(2, 2 + 3 * CATCH_UP)), [9]]
    together, apart = ([begun(drafter, target, one) for one in prompts] for _ in range(2))
    budget = Budget(3, 6, 3)
    for tree, one in zip(drafter.propose_batch(together, [budget] * 3), apart, strict=True):
        alone = drafter.propose_batch([one], [budget])[0]
        assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents)


def test_proposals_that_are_not_observed_leave_no_trace() -> None:
    target = TARGETS["dense"]()
    drafter = Pard2Drafter(pard2(target), target, 3)
    state = begun(drafter, target, [3, 4, 5, 6])
    assert torch.equal(said(drafter, state, 4), said(drafter, state, 4))
    assert drafter._runner.length(state.kv) == 4


def test_a_rewound_request_keeps_what_still_holds() -> None:
    target = TARGETS["dense"]()
    drafter = Pard2Drafter(pard2(target), target, 2, features=False)
    state = begun(drafter, target, list(range(2, 30)))
    drafter.propose_batch([state], [Budget(3, 4, 2)])
    del state.sequence.tokens[12:]
    state = drafter.rewind(state, state.sequence, 12)
    assert drafter._runner.length(state.kv) == 12
    state.sequence.tokens += [50, 51]
    near(said(drafter, state, 3), drafted_rows(drafter, target, state.sequence.tokens, 3))


def test_states_live_on_through_a_rewind_and_old_ones_are_dropped() -> None:
    target = TARGETS["dense"]()
    drafter = Pard2Drafter(pard2(target), target, 2)
    state = begun(drafter, target, [(7 * at) % 97 for at in range(2 * RECENT)])
    drafter.propose_batch([state], [Budget(3, 4, 2)])
    assert len(state.carried) <= RECENT + 1
    del state.sequence.tokens[-5:]
    state = drafter.rewind(state, state.sequence, len(state.sequence.tokens))
    near(said(drafter, state, 3), drafted_rows(drafter, target, state.sequence.tokens, 3))


# ---------------------------------------------------------------------------------------------------- training


def test_masks_see_the_text_up_to_their_anchor_and_nothing_of_other_anchors() -> None:
    target = TableTarget(9)
    head = pard2(target)
    torch.manual_seed(0)
    rows, mask = torch.randn(1, 10, 9), torch.randn(9)
    anchors = torch.tensor([[2, 6, 3]])
    slots, depths = torch.tensor([0, 1, 2, 0, 1, 0]), torch.tensor([1, 1, 1, 2, 2, 3])
    masks = Masks(anchors, torch.ones(1, 3, dtype=torch.bool), slots, depths)
    together = head.run(rows, mask.expand(1, 6, 9), masks)
    for slot in range(3):
        mine = (slots == slot).nonzero()[:, 0]
        alone = Masks(anchors[:, slot : slot + 1], masks.real[:, :1], torch.zeros_like(mine), depths[mine])
        cut = rows[:, : int(anchors[0, slot]) + 1]  # what comes after the anchor is not there at all
        found = head.run(cut, mask.expand(1, len(mine), 9), alone)
        torch.testing.assert_close(together[0, 10 + mine], found[0, cut.shape[1] :], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(together[0, : cut.shape[1]], found[0, : cut.shape[1]], atol=1e-5, rtol=1e-5)


def test_a_mask_is_dropped_with_all_behind_it() -> None:
    target = TableTarget(12)
    head = pard2(target, ahead=6, anchors=0.8, keep=0.6)
    batch = text(target, rows=6, length=40)
    masks = head.masks(batch)
    kept = {(int(slot), int(depth)) for slot, depth in zip(masks.slots, masks.depths, strict=True)}
    assert all(depth == 1 or (slot, depth - 1) in kept for slot, depth in kept)
    counts = [sum(depth == one for _, depth in kept) for one in range(1, 6)]
    assert counts == [round(masks.anchors.shape[1] * max(0.6**one, FLOOR)) for one in range(1, 6)]
    wanted = torch.zeros_like(batch.answer)
    wanted[:, :-1] = batch.answer[:, 1:]
    for row in range(6):  # different places, all of them before a token of the answer
        places = masks.anchors[row][masks.real[row]].tolist()
        assert len(set(places)) == len(places)
        assert all(wanted[row, at] for at in places)


def test_weights_are_the_products_of_the_targets_probabilities() -> None:
    target = TableTarget(12, random_table(12, 3))
    head = pard2(target, vocabulary=9)
    batch = text(target, rows=3)
    teacher = teacher_of(target, head, torch.device("cpu"))
    said, place = teacher.target_probs(batch)
    certain = head.certain(batch, said, place)
    ids = head.draft_vocabulary.d2t.tolist()
    expected = torch.ones(3, 24)
    for row in range(3):
        for at in batch.answer[row].nonzero()[:, 0].tolist():
            shares = target.table(tuple(batch.tokens[row, :at].tolist()))[ids].softmax(-1)
            token = int(batch.tokens[row, at])
            expected[row, at] = shares[ids.index(token)] if token in ids else 0.0
    torch.testing.assert_close(certain, expected, atol=0.02, rtol=0.02)  # what was said is bfloat16
    assert float(expected.min()) == 0.0
    anchors, depths = torch.tensor([[4, 9], [5, 5], [20, 7]]), torch.tensor([1, 3])
    weights = reach(certain, anchors, depths)
    for row in range(3):
        for column in range(2):
            first = int(anchors[row, column])
            product = certain[row, first + 1 : first + 1 + int(depths[column])].prod()
            assert float(weights[row, column]) == pytest.approx(float(product), rel=1e-4, abs=1e-6)


def test_the_weighted_loss_is_its_definition_and_so_are_its_slopes() -> None:
    torch.manual_seed(0)
    said, places = TeacherTargets(torch.randn(7, 5), torch.randn(6, 5)), torch.tensor([0, 6, 3, 3])
    states, rows = torch.randn(4, 5, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    weights = torch.tensor([1.0, 0.2, 0.0, 3.0])
    loss, hits = weighted_cross_entropy(states, rows, said, places, weights)
    q = (states @ rows.T).log_softmax(-1)
    known = -(weights / weights.sum()) @ (said.p[places].float() * q).sum(-1)
    torch.testing.assert_close(loss, known)
    assert hits.tolist() == (q.argmax(-1) == said.best[places]).tolist()
    for one, other in zip(
        torch.autograd.grad(loss, (states, rows)), torch.autograd.grad(known, (states, rows)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("weights", ["target", "even"])
def test_it_learns_to_look_ahead_with_states_and_without(weights: str) -> None:
    target = TableTarget(10, random_table(10, 4, order=1, sharpness=6.0))
    batch = text(target)
    head = pard2(target, layers=1, ahead=3, anchors=1.0, keep=1.0, without=0.5, weights=weights)
    teacher, losses = trained(head, target, batch, steps=150, rate=0.01)
    assert losses[-1] < losses[0] - 0.5
    found = head.losses(batch, teacher)
    assert min(float(found[f"agree_{ahead}"]) for ahead in (1, 2, 3)) > 0.8
    tokens = batch.tokens[0, :12].tolist()
    for features in (True, False):
        rows = drafted_rows(Pard2Drafter(head, target, features=features), target, tokens, 3)
        assert head.draft_vocabulary.d2t[rows.argmax(-1)].tolist() == batch.tokens[0, 12:15].tolist()


def test_an_evaluation_gives_the_same_figures_twice() -> None:
    target = TableTarget(10, random_table(10, 4))
    head = pard2(target)
    batch, teacher = text(target), teacher_of(target, head, torch.device("cpu"))
    assert float(head.losses(batch, teacher)["loss"]) == float(head.losses(batch, teacher)["loss"])
    head.train()
    assert float(head.losses(batch, teacher)["loss"]) != float(head.losses(batch, teacher)["loss"])


def test_the_usual_size_fits_into_twelve_megabytes() -> None:
    facts = TargetFacts(name="toy", hidden_size=576, vocab_size=49152, num_layers=30, fingerprint=[])
    config = plan(find_kind("pard2"), facts, vocabulary=16)
    head = Pard2(config, DraftVocabulary(torch.arange(16), torch.zeros(16, 576)))
    assert parameters(head) < 5.9e6
    assert config.aux_hidden_state_layers == (2, 15, 27)
