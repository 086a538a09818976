"""The draft LM: exact distributions, training and decoding agree, divergences, pruning, on-policy text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf

from distill_support import PARAMS, TARGETS, answers, context, law_error, text, trained
from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.chance import SeededChance
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import DynamicTree
from outpace.drafting.model_drafter import DraftModel, ModelDraftState
from outpace.heads.base import parameters, teacher_of
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import TargetFacts
from outpace.heads.kinds import find_kind, plan
from outpace.heads.losses import DIVERGENCES, TeacherTargets, soft_divergence
from outpace.heads.pruned import even, important, take_layers
from outpace.heads.untrained import random_head
from outpace.methods.learned.distill.drafter import DistillDrafter, ReducedTreeBuilder
from outpace.methods.learned.distill.network import DraftLm
from outpace.methods.learned.distill.target import HeadTarget
from outpace.methods.registry import build
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget, random_table
from outpace.training.dataset import Dataset, Own, every
from outpace.training.on_policy import OnPolicy, with_on_policy
from target_suite import near, tiny_model

MODES: dict[str, dict[str, Any]] = {
    "tree": {"max_nodes": 4, "depth": 2, "topk": 2},
    "chain": {"max_nodes": 2, "depth": 2, "topk": 1},
    "sampled": {"draft": "sampled", "depth": 2, "confidence": 0.0},
    "sampled-tree": {"draft": "sampled-tree", "branching": (2, 1), "confidence": 0.0},
}


def facts(hidden: int, vocabulary: int, layers: int) -> TargetFacts:
    return TargetFacts(name="toy", hidden_size=hidden, vocab_size=vocabulary, num_layers=layers, fingerprint=[])


def draft_lm(target: Target, vocabulary: int = 60, rank: int = 0, **options: Any) -> DraftLm:
    head = random_head(["draft-lm"], target, seed=2, vocabulary=vocabulary, rank=rank, options=options)
    assert isinstance(head, DraftLm)
    return head


# --------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PARAMS)
def test_every_mode_keeps_the_law(mode: str, name: str) -> None:
    assert law_error("draft-lm", "distill", MODES[mode], PARAMS[name], words=2, rank=0) < 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("words", "rank"), [(3, 0), (3, 2)])
def test_other_vocabularies_keep_the_law(mode: str, words: int, rank: int) -> None:
    assert law_error("draft-lm", "distill", MODES[mode], PARAMS["temperature 1"], words, rank) < 1e-6


@cache
def learned() -> tuple[TableTarget, DraftLm]:
    """A target, and a drafter that has learned it."""
    target = TableTarget(12, random_table(12, 8, order=1))
    head = draft_lm(target, layers=1)
    trained(head, target, text(target))
    return target, head


@pytest.mark.parametrize("settings", [*MODES.values(), {}, {"topk": 1}], ids=str)
def test_a_trained_one_drafts_well_and_answers_stay_plain(settings: dict[str, Any]) -> None:
    target, head = learned()
    prompts = [(1, 2), (7,), (3, 3, 3)]
    plain = answers(target, build("none", context(target, head)), prompts, SamplingParams(), 40)
    method = build("distill", context(target, head), settings)
    drafted = answers(target, method, prompts, SamplingParams(), 40)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    if "depth" in settings or "branching" in settings:  # otherwise how much pays depends on the machine
        assert sum(one.metrics.accepted for one in drafted) > 60
    assert isinstance(method.drafter, DraftModel)


# ------------------------------------------------------------------------------------------- beside the target


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("rank", [0, 5])
def test_what_runs_beside_a_target_is_what_was_trained(kind: str, rank: int) -> None:
    target = TARGETS[kind]()
    head = draft_lm(target, vocabulary=40, rank=rank)
    tokens = [5, 60, 7, 88, 13, 2, 41]
    draft = HeadTarget(head, target)
    sequence = draft.sequence(tokens[:4])
    draft.prefill([sequence])
    scores = draft.score([(sequence, TokenTree.chain(tokens[4:]))])[0]
    states, _ = head(target.embed(torch.tensor(tokens))[None].clone().float())
    near(scores.logits, head.draft_vocabulary(states)[0, 3:])


def test_tokens_one_by_one_are_the_causal_forward() -> None:
    target = TableTarget(9)
    head = draft_lm(target)
    rows = torch.randn(3, 6, 9)
    whole, _ = head(rows)
    starts = torch.tensor([2, 4, 3])
    seen = torch.arange(4) < starts[:, None]
    _, before = head(rows[:, :4])
    where = starts[:, None]
    for _ in range(2):
        seen = torch.cat([seen, torch.ones(3, 1, dtype=torch.bool)], 1)
        found, before = head(rows[torch.arange(3), where[:, 0]][:, None], before, where, seen)
        torch.testing.assert_close(found[:, 0], whole[torch.arange(3), where[:, 0]])
        where = where + 1


def test_a_batch_drafts_what_each_drafts_alone() -> None:
    target = TARGETS["dense"]()
    drafter = DistillDrafter(HeadTarget(draft_lm(target), target), target)
    prompts = [[3, 4, 5], list(range(2, 40)), [9]]
    together = [target.sequence(one) for one in prompts]
    apart = [target.sequence(one) for one in prompts]
    budget = Budget(3, 6, 2)
    trees = drafter.propose_batch([drafter.begin(one) for one in together], [budget] * 3)
    for tree, one in zip(trees, apart, strict=True):
        alone = drafter.propose_batch([drafter.begin(one)], [budget])[0]
        assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents)


def test_a_rewound_request_drafts_what_a_fresh_one_does() -> None:
    target = TARGETS["dense"]()
    drafter = DistillDrafter(HeadTarget(draft_lm(target), target), target)
    budget = Budget(2, 4, 2)

    def fresh(tokens: list[int]) -> list[int]:
        state = drafter.begin(target.sequence(tokens))
        tree = drafter.propose_batch([state], [budget])[0]
        drafter.end(state)
        return tree.tokens

    one = target.sequence(list(range(2, 30)))
    state: ModelDraftState = drafter.begin(one)
    drafter.propose_batch([state], [budget])
    one.tokens.append(7)
    drafter.observe_batch([state], [Verdict((), 7, committed=(7,))])
    assert drafter.propose_batch([state], [budget])[0].tokens == fresh(one.tokens)
    one.tokens[12:] = [50, 51]
    state = drafter.rewind(state, one, 12)
    assert drafter.propose_batch([state], [budget])[0].tokens == fresh(one.tokens)
    drafter.end(state)


@pytest.mark.parametrize(("level", "forwards"), [(0.05, 4), (5.0, 1)])
def test_no_level_is_run_that_costs_more_than_it_promises(level: float, forwards: int) -> None:
    target = TableTarget(6)
    budget = Budget(4, 8, 2, relative_costs=(1.0, *(1.05 + 0.02 * count for count in range(1, 9))))
    ranks = Calibration(lambda kind: 0.05 if kind[1] else 0.9)
    candidates = DynamicTree(budget, ranks, range(6), expand=8, confident=False, level=level)
    builder = ReducedTreeBuilder(target.sequence([1, 2]), budget, SeededChance(0).at(0, ""), candidates)
    count, going = 0, True
    while going:
        count += 1
        going = builder.grow(torch.randn(1 + len(builder.run), 6, generator=torch.Generator().manual_seed(count)))
    assert count == forwards
    tree = builder.proposal()
    assert tree.path_acceptance_probs == sorted(tree.path_acceptance_probs, reverse=True)
    assert max(tree.depths) == forwards


# ------------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_trains(divergence: str) -> None:
    target = TableTarget(10, random_table(10, 4, order=1, sharpness=3.0))
    batch = text(target)
    head = draft_lm(target, layers=1, divergence=divergence)
    teacher, losses = trained(head, target, batch)
    assert losses[-1] < losses[0] - 0.05
    assert float(head.losses(batch, teacher)["agree_1"]) > 0.8


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences_are_their_definitions(divergence: str) -> None:
    torch.manual_seed(0)
    normed, rows, states = torch.randn(7, 5), torch.randn(6, 5), torch.randn(4, 5, requires_grad=True)
    said, places = TeacherTargets(normed, rows), torch.tensor([0, 6, 3, 3])
    loss, _ = soft_divergence(divergence, states, rows, said, places)
    p, q = (normed[places] @ rows.T).double().softmax(-1), (states @ rows.T).double().softmax(-1)
    middle = 0.5 * (p + q)
    expected = {
        "fkl": -(p * q.log()).sum(-1),
        "rkl": (q * (q / p).log()).sum(-1),
        "jsd": 0.5 * (p * (p / middle).log()).sum(-1) + 0.5 * (q * (q / middle).log()).sum(-1),
        "tvd": 0.5 * (p - q).abs().sum(-1),
    }[divergence].mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=0.02)  # what was said is bfloat16
    (slope,) = torch.autograd.grad(loss, states)
    (known,) = torch.autograd.grad(expected, states)
    torch.testing.assert_close(slope, known.float(), atol=0.01, rtol=0.05)


def test_the_usual_sizes_fit_into_twelve_megabytes() -> None:
    for layers in (1, 2, 3):
        config = plan(find_kind("draft-lm"), facts(576, 49152, 30), vocabulary=16, options={"layers": layers})
        head = DraftLm(config, DraftVocabulary(torch.arange(16), torch.zeros(16, 576)))
        assert parameters(head) < 5.9e6
        assert len(head.layers) == layers


# ---------------------------------------------------------------------------------------------------- pruning


def sole_head_model(intermediate: int = 32, layers: int = 4) -> Any:
    """A Llama of one attention head, as wide as heads for its target are."""
    torch.manual_seed(1)
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=50, max_position_embeddings=128, initializer_range=0.2, rope_theta=500.0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for norm in [model.model.norm, *(layer.input_layernorm for layer in model.model.layers)]:
            norm.weight.normal_(1.0, 0.2)
    return model


def begun(model: Any, layers: int) -> DraftLm:
    """A head that begins as a part of the model."""
    target = HFTarget(model)
    config = plan(find_kind("draft-lm"), facts(64, 50, target.num_layers), options={"layers": layers})
    ids = torch.arange(50)
    head = DraftLm(config, DraftVocabulary(ids, target.lm_head_rows(ids)))
    head.initialise(target, teacher_of(target, head, torch.device("cpu")))
    return head


def test_as_many_layers_as_the_target_has_are_the_target() -> None:
    model = sole_head_model()
    head = begun(model, 4)
    assert head.config.intermediate == 32
    tokens = torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        states, _ = head(model.model.embed_tokens(tokens))
        near(head.draft_vocabulary(states), model(input_ids=tokens, use_cache=False).logits)


def test_layers_are_taken_evenly_and_the_neurons_that_matter_stay() -> None:
    model = sole_head_model(intermediate=200, layers=5)
    chosen = [3, 50, 51, 120, 199]
    with torch.no_grad():
        model.model.layers[2].mlp.gate_proj.weight[chosen] *= 50.0
    head = begun(model, 3)
    assert even(3, 5) == [0, 2, 4]
    assert even(3, 30) == [0, 14, 29]
    layers: list[Any] = list(head.layers)
    for own, index in zip(layers, (0, 2, 4), strict=True):
        theirs = model.model.layers[index]
        assert torch.equal(own.self_attn.v_proj.weight, theirs.self_attn.v_proj.weight)
        assert torch.equal(own.input_layernorm.weight, theirs.input_layernorm.weight)
    kept = important(read_decoder_spec(model).layers[2], head.config.intermediate)
    assert set(chosen) <= set(kept.tolist())
    mlp, theirs = layers[1].mlp, model.model.layers[2].mlp
    assert torch.equal(mlp.up_proj.weight, theirs.up_proj.weight[kept])
    assert torch.equal(mlp.down_proj.weight, theirs.down_proj.weight[:, kept])
    assert head.config.rope_theta == layers[0].self_attn.theta == 500.0
    assert torch.equal(head.norm.weight, model.model.norm.weight)


def test_a_packed_target_is_read_once_more_and_a_toy_has_nothing_to_read() -> None:
    model = sole_head_model()
    target = DenseTarget(read_decoder_spec(model))
    assert target.decoder_spec() is None
    target.origin = lambda: read_decoder_spec(model)
    source = target.decoder_spec()
    assert source is not None
    assert torch.equal(source.layers[1].query.weight, model.model.layers[1].self_attn.q_proj.weight)
    assert TableTarget(4).decoder_spec() is None


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_layers_of_another_make_are_left_alone(architecture: str) -> None:
    model = tiny_model(architecture)
    head = random_head(["draft-lm"], HFTarget(model))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    assert isinstance(head, DraftLm)
    assert take_layers(read_decoder_spec(model), head.config, list(head.layers), head.norm) == []  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


# -------------------------------------------------------------------------------------------------- on policy


class Held(Dataset):
    """A dataset of batches that are there already."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def train(self, epoch: int, skip: int = 0, own: Own = every) -> Any:
        return iter(self.batches[skip:])

    def held_out(self) -> Any:
        return iter(self.batches)

    def answer_tokens(self) -> int:
        return sum(int(one.answer.sum()) for one in self.batches)


def own_text(share: float = 1.0, stop: frozenset[int] = frozenset(), most: int = 9) -> tuple[OnPolicy, DraftLm, Any]:
    """A draft LM so sure of itself that its samples are its likeliest tokens."""
    target = TableTarget(11, random_table(11, 5))
    head = draft_lm(target, on_policy=share)
    head.norm.weight.data.mul_(1000.0)
    teacher = teacher_of(target, head, torch.device("cpu"))
    teacher.embedding = teacher.embedding.float()
    data = Held([text(target, rows=4, seed=number) for number in range(6)])
    return OnPolicy(data, head, teacher, target, share=share, stop_ids=stop, most=most), head, target


def test_on_policy_batches_are_the_drafters_text_with_the_targets_labels() -> None:
    data, head, target = own_text()
    before = next(data.data.train(0))
    batch = next(data.train(0))
    for row in range(4):
        start = int(before.answer[row].int().argmax())
        size = int(batch.real[row].sum())
        tokens = batch.tokens[row].tolist()
        assert tokens[:start] == before.tokens[row, :start].tolist()
        assert batch.answer[row].nonzero()[:, 0].tolist() == list(range(start, start + 9))
        assert size == start + 9
        for at in range(start, size):
            states, _ = head(target.embed(torch.tensor(tokens[:at]))[None])
            assert tokens[at] == int(head.draft_vocabulary.d2t[head.draft_vocabulary(states[0, -1]).argmax()])
        for at in range(size - 1):  # what the target says there, in its own words
            torch.testing.assert_close(batch.states[4][row, at], target.table(tuple(tokens[: at + 1])).bfloat16())
    assert torch.isfinite(head.losses(batch, data.teacher)["loss"])


def test_an_answer_of_ones_own_ends_with_an_end_token() -> None:
    data, _, _ = own_text()
    tokens = next(data.train(0)).tokens[0].tolist()
    start = int(next(data.data.train(0)).answer[0].int().argmax())
    stop = tokens[start + 2]
    stopped = next(own_text(stop=frozenset([stop]))[0].train(0))
    assert int(stopped.real[0].sum()) == tokens.index(stop, start) + 1


def test_the_share_is_of_batches_and_the_same_every_time() -> None:
    data, head, target = own_text(share=0.5)

    def own() -> list[bool]:
        return [one is not other for one, other in zip(data.train(3), data.data.train(3), strict=True)]

    assert own() == own()
    assert 0 < sum(own()) < 6
    assert list(data.held_out()) == list(data.data.held_out())
    held = data.data
    assert with_on_policy(held, draft_lm(target), data.teacher, target) is held
    assert isinstance(with_on_policy(held, head, data.teacher, target), OnPolicy)
