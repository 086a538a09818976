"""dv and swift: which sublayers are skipped, how the set is found, and whose it is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.certify.exact import certify_exact, matrix
from outpace.controllers.base import Budget
from outpace.core.chance import SeededChance
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.chain_with_siblings import CandidateCounts, ChainWithSiblings
from outpace.drafting.layer_skips import FORMAT, Skips, read_skips
from outpace.drafting.skip_tuning import Beginnings, Costs, Tuning
from outpace.engine.method import Method
from outpace.methods import registry
from outpace.methods.registry import Context
from outpace.methods.self_speculative.draft_verify import LayerSkip, LayerSkipSettings, skips_of
from outpace.methods.self_speculative.swift import Swift
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.sub_graph import SubGraph
from outpace.targets.table import TableTarget
from self_draft_support import TARGETS, context, decode, plain, spare_model, texts
from target_suite import near, random_tokens

RNG = random.Random(4)
PROMPTS = [random_tokens(count, RNG) for count in (12, 6)]
SPARE = ({1, 2}, {2})
"""Attention and MLPs that the model can do without."""


def spare() -> DenseTarget:
    return DenseTarget(read_decoder_spec(spare_model(*SPARE)))


# ------------------------------------------------------------------------------------------------- certification


@pytest.mark.parametrize("name", ["dv", "swift"])
def test_lossless_on_a_slice_of_the_matrix(name: str) -> None:
    def make(context: Context) -> Method:
        return registry.build(name, context, registry.find(name).tiny)

    cells = [matrix(3)[index] for index in (10, 13)]
    certificate = certify_exact(name, make, cells)
    assert certificate.lossless, certificate.verdict


@pytest.mark.parametrize("name", ["dv", "swift"])
@pytest.mark.parametrize("kind", TARGETS)
def test_greedy_decoding_is_plain_decoding(name: str, kind: str) -> None:
    target = TARGETS[kind](spare_model(*SPARE))
    settings: dict[str, Any] = {"num_draft_tokens": 4, "confidence": 0.1}
    settings |= (
        {"attention": [1, 2]} if name == "dv" else {"window": 4, "every": 1, "ratio": 0.5, "candidates": [1] * 4}
    )
    found = decode(target, registry.build(name, context(target), settings), PROMPTS, 16)
    assert texts(found) == texts(decode(target, plain(), PROMPTS, 16))
    assert sum(one.metrics.accepted for one in found) > 5


# ------------------------------------------------------------------------------------------------------- dv's set


def test_what_the_settings_name_is_skipped(tmp_path: Path) -> None:
    target = spare()
    assert skips_of(target, LayerSkipSettings.model_validate({"attention": (1,), "mlp": (2, 3)})) == Skips((1,), (2, 3))
    file = tmp_path / "skips.json"
    file.write_text(json.dumps({"format": FORMAT, "layers": 4, "attention": [2], "mlp": []}))
    method = registry.build("dv", context(target), {"skips": str(file)})
    assert isinstance(method.drafter, LayerSkip)
    assert method.drafter.graph == SubGraph(skip_attention=frozenset({2}))
    default = skips_of(target, LayerSkipSettings.model_validate({}))
    assert default.attention
    assert not default.mlp


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention": [4]}, "attention of layer 4: the model's 4 layers are 0 to 3"),
        ({"mlp": [1, -1]}, "MLP of layer -1"),
        ({"attention": [0, 1, 2, 3], "mlp": [0, 1, 2, 3]}, "every sublayer"),
        ({"skips": "nowhere.json"}, "cannot read skips"),
    ],
)
def test_layers_that_do_not_exist_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        registry.build("dv", context(TableTarget(4)), settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "not JSON"),
        ("[]", "not a file of skips"),
        ('{"format": "other"}', "not a file of skips"),
        (json.dumps({"format": FORMAT, "layers": 4}), "damaged"),
        (json.dumps({"format": FORMAT, "layers": 4, "attention": ["x"], "mlp": []}), "damaged"),
        (json.dumps({"format": FORMAT, "layers": 30, "attention": [1], "mlp": []}), "30 layers, and this one has 4"),
    ],
)
def test_files_that_are_something_else_are_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "skips.json"
    file.write_text(content)
    with pytest.raises(BadInput, match=said):
        read_skips(file).check(TableTarget(4))


# ---------------------------------------------------------------------------------------------------- dv's search


def written(target: Target, count: int = 40) -> list[tuple[list[int], list[int]]]:
    return list(zip(PROMPTS, texts(decode(target, plain(), PROMPTS, count)), strict=True))


def test_a_judging_pass_accepts_what_decoding_accepts() -> None:
    """Runs of accepted tokens from one forward are those of drafting at every place by itself."""
    target = spare()
    beginnings = Beginnings(target, written(target), 5)
    graph = Skips((1, 3), (2,)).graph
    assert len(beginnings.all) == 2 * (40 // 5)
    runs = beginnings.runs(graph)
    for place, run in zip(beginnings.all, runs, strict=True):
        drafter = LayerSkip(target, graph, 0.0)
        [tree] = drafter.propose_batch([drafter.begin(place.sequence)], [Budget(5)])
        same = [ours == theirs for ours, theirs in zip(tree.tokens, place.expected, strict=True)]
        assert run == ([*same, False]).index(False)
    assert 0 < sum(runs) < 5 * len(runs)
    assert sum(beginnings.runs(SubGraph())) == 5 * len(runs)


def test_pace_is_tokens_over_seconds() -> None:
    costs = Costs(attention=1.0, mlp=2.0, head=0.5, verify=(6.5, 7.0, 7.5))
    mask = (True, False, False, True)  # two layers: attention of the first, MLP of the second
    assert costs.draft(mask) == pytest.approx(0.5 + 1.0 + 2.0)
    pace, length = costs.pace([2, 2, 0, 1], mask)
    one, two = (1 + 3 / 4) / (3.5 + 7.0), (1 + 5 / 4) / (7.0 + 7.5)
    assert pace == pytest.approx(max(one, two))
    assert length == (1 if one > two else 2)


def tuned(trials: int, record: dict[str, Any] | None = None, seed: int = 0) -> Tuning:
    target = spare()
    tuning = Tuning(Beginnings(target, written(target), 4), "tiny", seed=seed, record=record)
    if record is None:  # the clock's noise left out
        tuning.costs = Costs(1.0, 2.0, 0.5, (12.5, 12.6, 12.7, 12.8, 12.9))
        tuning.record["costs"] = {"attention": 1.0, "mlp": 2.0, "head": 0.5, "verify": [12.5, 12.6, 12.7, 12.8, 12.9]}
    while tuning.done < trials:
        tuning.step()
    return tuning


def test_the_search_finds_what_the_model_can_spare() -> None:
    record = tuned(25).record
    assert set(record["attention"]) == SPARE[0]
    assert set(record["mlp"]) == SPARE[1]
    assert record["accepted"] > 3.0


def test_an_interrupted_search_ends_where_an_undisturbed_one_does() -> None:
    whole, half = tuned(24).record, tuned(14).record
    resumed = tuned(24, json.loads(json.dumps(half)))
    assert resumed.record["trials"] == whole["trials"]
    assert resumed.record["attention"] == whole["attention"]


def test_a_search_with_other_prompts_is_not_continued() -> None:
    record = tuned(3).record
    with pytest.raises(BadInput, match="other prompts"):
        tuned(4, record | {"beginnings": "else"})
    with pytest.raises(BadInput, match="another seed"):
        tuned(4, record, seed=1)
    with pytest.raises(BadInput, match="damaged"):
        tuned(4, record | {"trials": [{"mask": "01"}]})


def test_too_short_answers_and_too_shallow_models_are_refused() -> None:
    target = spare()
    with pytest.raises(BadInput, match="no answer has 50 tokens"):
        Beginnings(target, written(target), 50)
    shallow = TableTarget(97, layers=2)
    with pytest.raises(BadInput, match="2 layers"):
        Tuning(Beginnings(shallow, written(shallow), 4), "tiny")


# ---------------------------------------------------------------------------------------------------------- swift


def swift(target: Target, **settings: Any) -> tuple[Method, Swift]:
    method = registry.build(
        "swift",
        context(target),
        {"num_draft_tokens": 4, "confidence": 0.1, "window": 8, "every": 1, "ratio": 0.5, **settings},
    )
    assert isinstance(method.drafter, Swift)
    return method, method.drafter


def test_the_online_search_raises_acceptance() -> None:
    """Half of the sublayers are spare; the first set is not those. With the search off it stays as it is."""
    rates = {}
    for steps in (0, 60):
        target = DenseTarget(read_decoder_spec(spare_model({1, 2}, set())))
        method, drafter = swift(target, steps=steps, interval=2, candidates=[1] * 4)
        decode(target, method, PROMPTS, 60, namespace="one")
        later = decode(target, method, PROMPTS, 40, namespace="one")
        rates[steps] = sum(one.metrics.accepted for one in later) / sum(one.metrics.rounds for one in later)
        caches = later[0].metrics.caches
        assert caches[0].entries <= caches[0].bound == steps
        assert len(drafter.memories) == 1
    assert rates[60] > rates[0] + 0.5


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_is_a_chain_of_up_to_25_tokens_with_siblings(kind: str, temperature: float) -> None:
    """As many candidates a step as the authors verify, by the sub-graph's probability of the chain's token."""
    target = TARGETS[kind](spare_model(*SPARE))
    method = registry.build("swift", context(target), {"confidence": 0.0})
    drafter = method.drafter
    assert isinstance(drafter, Swift)
    counts: list[tuple[float, int]] = []
    for seed in range(3):
        sequence = target.sequence(PROMPTS[seed % 2], SamplingParams(temperature=temperature, seed=seed))
        state = drafter.begin(sequence)
        target.prefill([sequence])
        [tree] = drafter.propose_batch([state], [method.controller.budget(RequestMetrics(), 1, temperature > 0)])
        chain = [ROOT]
        for _ in range(25):
            chain.append(tree.children(chain[-1])[0])
        assert max(tree.depths) == 25
        assert chain[1:] == list(range(25)), "what was run comes first"
        rows = target.score([(sequence, TokenTree.chain(tree.tokens[:25]))], graph=drafter.plan(state, Budget(1))[0])
        for depth, parent in enumerate(chain[:-1]):
            draws = tree.draws_at(parent)
            probs = rows[0].logits[depth].softmax(-1)
            tokens = [draw.token for draw in draws]
            assert len(set(tokens)) == len(tokens)
            counts.append((float(probs[tokens[0]]), len(tokens)))
            if temperature:
                assert {draw.q_row for draw in draws} == {depth}, "siblings share the row that they were drawn from"
                near(tree.q_rows[depth].dense(target.vocab_size), probs)
            else:
                near(probs[tokens], probs.topk(len(tokens)).values)
        assert all(not tree.children(node) for node in range(25, len(tree))), "siblings are leaves"
        assert not tree.replacement
    many = (1, 3, 5, 10) if temperature else (3, 5, 8, 10)
    assert all(count == many[int(p <= 0.95) + int(p <= 0.8) + int(p <= 0.5)] for p, count in counts)


@pytest.mark.parametrize(("top", "counts"), [(0.97, (3, 1)), (0.9, (5, 3)), (0.6, (8, 5)), (0.3, (10, 10))])
def test_the_surer_the_sub_graph_the_fewer_the_candidates(top: float, counts: tuple[int, int]) -> None:
    rest = torch.full((40,), (1.0 - top) / 39)
    rest[7] = top
    target = TableTarget(40)
    for temperature, count in zip((0.0, 1.0), counts, strict=True):
        sequence = target.sequence([1, 2], SamplingParams(temperature=temperature))

        class First(SeededChance):
            def at(self, position: int, purpose: str) -> Any:
                stream = super().at(position, purpose)
                stream.categorical = lambda weights: 7  # type: ignore[method-assign]
                return stream

        builder = ChainWithSiblings(
            sequence, Budget(25, 250, 10, confidence=0.8), First(0).at(0, "draft"), CandidateCounts()
        )
        assert builder.grow(rest.log()[None]) is (top >= 0.8), "the draft goes on at 0.8 and above"
        tree = builder.proposal()
        assert tree.tokens[0] == 7
        assert len(tree) == len(set(tree.tokens)) == count


def test_the_budget_bounds_the_tree() -> None:
    """As a part of a combination it may get fewer nodes, and fewer children a node."""
    target = spare()
    _, drafter = swift(target, confidence=0.0)
    for temperature in (0.0, 1.0):
        sequence = target.sequence(PROMPTS[0], SamplingParams(temperature=temperature))
        state = drafter.begin(sequence)
        target.prefill([sequence])
        for budget in (Budget(4, 7, 10), Budget(9, 1, 10), Budget(3, 64, 2), Budget(2, 64, 1)):
            [tree] = drafter.propose_batch([state], [budget])
            assert 0 < len(tree) <= budget.max_nodes
            assert max(tree.depths) <= budget.depth
            assert max(len(tree.children(node)) for node in range(-1, len(tree))) <= budget.topk


def test_the_match_is_the_share_of_predicted_tokens() -> None:
    target = spare()
    _, drafter = swift(target)
    [one] = decode(target, plain(), PROMPTS[:1], 20)
    sequence = target.sequence(list(one.sequence.tokens))
    sequence.prompt_length = start = len(PROMPTS[0])
    target.prefill([sequence])
    length = sequence.kv.length
    graph = Skips((1, 3), (2,)).graph
    hits = 0
    for at in range(start + 1, start + 9):  # of the answer, the same tokens for every set, however long it has become
        before = target.sequence(sequence.tokens[: start + 1])
        target.prefill([before])
        chain = TokenTree.chain(sequence.tokens[start + 1 : at])
        hits += int(target.score([(before, chain)], graph=graph)[0].logits[-1].argmax()) == sequence.tokens[at]
    assert drafter.matched(sequence, graph) == hits / 8
    assert drafter.matched(sequence, SubGraph()) == 1.0
    assert sequence.kv.length == length


def test_the_search_stops_by_each_of_its_criteria() -> None:
    target = DenseTarget(read_decoder_spec(spare_model()))  # no set is perfect
    for settings, most in (({"steps": 5}, 5), ({"patience": 3, "enough": 1.0}, 60), ({"enough": 0.0}, 1)):
        method, drafter = swift(target, **settings)
        decode(target, method, PROMPTS[:1], 60, namespace="one")
        [memory] = [drafter.memories._named.get(name) for name in drafter.memories._named.recent()]
        assert memory is not None
        assert memory.done
        assert 0 < memory.search.told <= most
        if "patience" in settings:
            assert memory.stale == 3


def test_nothing_is_learned_from_another_namespace() -> None:
    target = spare()
    method, drafter = swift(target)
    decode(target, method, PROMPTS[:1], 40, namespace="one")
    [other] = decode(target, method, PROMPTS[1:], 20, namespace="two")
    fresh_method, _ = swift(target)
    [fresh] = decode(target, fresh_method, PROMPTS[1:], 20, namespace="two")
    assert other.metrics.drafted == fresh.metrics.drafted
    assert other.metrics.accepted == fresh.metrics.accepted
    decode(target, method, PROMPTS[:1], 20)
    assert len(drafter.memories) == 2, "a request without a namespace leaves nothing"


def test_a_seed_reproduces_a_sampled_answer_while_searching() -> None:
    target = spare()
    params = SamplingParams(temperature=1.0, seed=9)
    runs = [texts(decode(target, swift(target)[0], PROMPTS, 40, params)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_ratio_that_skips_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="choose another ratio"):
        swift(TableTarget(5, layers=3), ratio=0.01)
