"""Drafting through a part of the target: what is drafted, what the verifying forward takes over, when it stops."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.acceptance.rejection import Rejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.self_speculative.draft_verify import DraftExit, LayerSkip, LayerSkipState
from outpace.targets.base import Scores, Target
from outpace.targets.row_target import RowTarget
from outpace.targets.sub_graph import FULL, SubGraph
from outpace.targets.table import TableTarget, random_table
from self_draft_support import TARGETS, decode, plain, spare_model, texts
from target_suite import near, opened, random_tokens

SKIP = SubGraph(skip_attention=frozenset({2}), skip_mlp=frozenset({2}))
EXIT = SubGraph(stop=3)


def drafting(target: Target, graph: SubGraph = SKIP, length: int = 4, threshold: float = 0.0) -> Method:
    return Method("toy", LayerSkip(target, graph, threshold, step=0.0), Rejection(), Fixed(length, max_nodes=length))


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param](spare_model({2}, {2}))


def begun(drafter: LayerSkip, target: Target, prompts: Seq[list[int]], **params: Any) -> list[LayerSkipState]:
    sequences = [target.sequence(one, SamplingParams(**params)) for one in prompts]
    states = [drafter.begin(one) for one in sequences]
    target.prefill(sequences)
    return states


PROMPTS = [random_tokens(count, random.Random(count)) for count in (13, 5)]


@pytest.mark.parametrize("graph", [SKIP, EXIT, SubGraph(skip_attention=frozenset({0}))], ids=["skip", "exit", "first"])
def test_the_draft_is_the_sub_graphs_own_greedy_continuation(target: Target, graph: SubGraph) -> None:
    drafter = LayerSkip(target, graph, 0.0)
    states = begun(drafter, target, PROMPTS)
    trees = drafter.propose_batch(states, [Budget(4), Budget(2)])
    for state, tree, depth in zip(states, trees, (4, 2), strict=True):
        chain: list[int] = []
        for _ in range(depth):
            fresh = target.score([(state.sequence, TokenTree.chain(chain))], graph=graph)
            chain.append(int(fresh[0].logits[-1].argmax()))
        assert tree.tokens == chain
        assert tree.is_deterministic


def test_a_sampled_draft_has_the_sub_graphs_rows(target: Target) -> None:
    drafter = LayerSkip(target, SKIP, 0.0)
    [state] = begun(drafter, target, PROMPTS[:1], temperature=0.8, top_k=5)
    [tree] = drafter.propose_batch([state], [Budget(3)])
    sequence = state.sequence
    fresh = target.score([(sequence, tree)], graph=SKIP)
    chance = sequence.chance.at(len(sequence.tokens), "draft")
    for node, row in enumerate(tree.q_rows):
        near(row.probs, fresh[0].p(node - 1))
        assert tree.tokens[node] == chance.categorical(row.probs)


@pytest.mark.parametrize("graph", [SKIP, EXIT], ids=["skip", "exit"])
def test_a_reused_forward_equals_a_fresh_score(graph: SubGraph) -> None:
    for name, build in TARGETS.items():
        target = build(spare_model({2}, {2}))
        drafter = LayerSkip(target, graph, 0.0)
        states = begun(drafter, target, PROMPTS)
        sequences = [state.sequence for state in states]
        trees = drafter.propose_batch(states, [Budget(4), Budget(2)])
        started = drafter.reusable_forward(states)
        assert started is not None
        batch = list(zip(sequences, trees, strict=True))
        resumed, fresh = target.score(batch, resume=started), target.score(batch)
        for one, other in zip(resumed.parts, fresh.parts, strict=True):
            if name == "dense":
                assert torch.equal(one.logits, other.logits)
            else:
                near(one.logits, other.logits)
        target.commit(resumed, [[0], [0, 1]])
        for sequence, tree, path in zip(sequences, trees, ([0], [0, 1]), strict=True):
            sequence.tokens += [*(tree.tokens[node] for node in path), 3]
            again = target.score([(sequence, TokenTree()), (opened(target, sequence.tokens), TokenTree())])
            near(again[0].logits, again[1].logits)


def test_hidden_states_below_the_reused_forward_come_along(target: Target) -> None:
    drafter = LayerSkip(target, EXIT, 0.0)
    drafter.aux_hidden_state_layers = (1, 2, 3)
    states = begun(drafter, target, PROMPTS)
    trees = drafter.propose_batch(states, [Budget(4), Budget(2)])
    batch = [(state.sequence, tree) for state, tree in zip(states, trees, strict=True)]
    aux_hidden_state_layers = (1, 3, 4)
    counted = Counting(target)
    resumed = counted.score(batch, aux_hidden_state_layers, drafter.reusable_forward(states))
    assert counted.layer_rows == 3 * 2 + 1 * (5 + 3), "layers 0 to 2 of each tree's last row, layer 3 of all rows"
    fresh = target.score(batch, aux_hidden_state_layers=aux_hidden_state_layers)
    for one, other in zip(resumed.parts, fresh.parts, strict=True):
        near(one.logits, other.logits)
        for layer in aux_hidden_state_layers:
            near(one.hidden_states[layer], other.hidden_states[layer])
    # Hidden states that the draft pass did not keep are had by running everything.
    drafter.aux_hidden_state_layers = ()
    drafter.propose_batch(states, [Budget(4), Budget(2)])
    whole = target.score(
        batch, aux_hidden_state_layers=aux_hidden_state_layers, resume=drafter.reusable_forward(states)
    )
    near(whole[0].hidden_states[1], fresh[0].hidden_states[1])


class Counting:
    """Counts rows times layers of what a target runs."""

    def __init__(self, target: Target) -> None:
        assert isinstance(target, RowTarget)
        self.target = target
        self.layer_rows = 0
        run = target.run

        def counted(plan: Any, tokens: Seq[int], **options: Any) -> Any:
            self.layer_rows += (plan.stop - plan.start) * len(tokens)
            return run(plan, tokens, **options)

        target.run = counted  # type: ignore[method-assign]

    def score(self, batch: Any, aux_hidden_state_layers: Seq[int], resume: Scores | None) -> Scores:
        before = self.layer_rows
        found = self.target.score(batch, aux_hidden_state_layers, resume=resume)
        self.layer_rows -= before
        return found


class Cold(LayerSkip):
    """The reuse of the draft's forward switched off."""

    def reusable_forward(self, states: Seq[LayerSkipState]) -> Scores | None:
        return None


@pytest.mark.parametrize("graph", [SKIP, EXIT], ids=["skip", "exit"])
def test_the_round_takes_the_reusable_forward(graph: SubGraph) -> None:
    spent, said = {}, {}
    for kind in (LayerSkip, Cold):
        target = TARGETS["dense"](spare_model({2}, {2}))
        counted = Counting(target)
        method = Method("toy", kind(target, graph, 0.0, step=0.0), Rejection(), Fixed(4, max_nodes=4))
        said[kind] = texts(decode(target, method, PROMPTS))
        spent[kind] = counted.layer_rows
    assert said[LayerSkip] == said[Cold] == texts(decode(target, plain(), PROMPTS))
    assert spent[LayerSkip] < 0.9 * spent[Cold]


def test_no_forward_is_reused_where_the_pass_is_not_of_these_trees(target: Target) -> None:
    drafter = LayerSkip(target, SKIP, 0.0)
    states = begun(drafter, target, PROMPTS)
    assert drafter.reusable_forward(states) is None
    drafter.propose_batch(states, [Budget(2), Budget(0)])
    assert drafter.reusable_forward(states) is None, "one of them was not drafted for"
    assert drafter.reusable_forward(states[:1]) is not None
    drafter.propose_batch(states, [Budget(2), Budget(2)])
    assert drafter.reusable_forward(states[::-1]) is None, "another order"
    states[0].sequence.tokens.append(1)
    assert drafter.reusable_forward(states) is None, "a pass of an earlier round"
    whole = LayerSkip(target, SubGraph(skip_attention=frozenset({0})), 0.0)
    [one] = begun(whole, target, PROMPTS[:1])
    whole.propose_batch([one], [Budget(2)])
    assert whole.reusable_forward([one]) is None, "nothing below the first skipped sublayer"


def test_committed_keys_and_values_are_read_only() -> None:
    target = TARGETS["dense"](spare_model({2}, {2}))
    drafter = LayerSkip(target, SKIP, 0.0)
    [state] = begun(drafter, target, PROMPTS[:1])
    sequence = state.sequence
    before, length = sequence.kv.data.clone(), sequence.kv.length
    drafter.propose_batch([state], [Budget(6)])
    assert sequence.kv.length == length
    used = -(-length // 16) * 16 * sequence.kv.width
    assert torch.equal(sequence.kv.data[..., :used], before[..., :used])


@pytest.mark.parametrize("graph", [SKIP, EXIT], ids=["skip", "exit"])
def test_greedy_decoding_is_plain_decoding(target: Target, graph: SubGraph) -> None:
    expected = texts(decode(target, plain(), PROMPTS, 12))
    found = decode(target, drafting(target, graph), PROMPTS, 12)
    assert texts(found) == expected
    if graph is SKIP:
        assert all(one.metrics.accepted > 4 for one in found), "what adds next to nothing is hardly missed"


def test_sampled_requests_draw_the_same_alone_and_beside_others(target: Target) -> None:
    params = SamplingParams(temperature=0.9, seed=5)
    method = drafting(target)
    [alone] = texts(decode(target, method, PROMPTS[:1], params=params))
    decoder = Decoder(target)
    first = decoder.submit(Request(tuple(PROMPTS[0]), method, params, max_new_tokens=24))
    decoder.submit(Request(tuple(PROMPTS[1]), plain(), params, max_new_tokens=9))
    decoder.run()
    assert list(first.tokens) == alone


# ------------------------------------------------------------------------------------------------- when to stop


def test_a_draft_ends_with_the_first_token_that_it_is_not_sure_of(target: Target) -> None:
    probe = LayerSkip(target, SKIP, 0.0)
    [state] = begun(probe, target, PROMPTS[:1])
    [tree] = probe.propose_batch([state], [Budget(6)])
    rows = target.score([(state.sequence, tree)], graph=SKIP)[0].logits.softmax(-1).max(-1).values
    sure = [float(row) for row in rows[: len(tree)]]
    weakest = min(range(len(sure)), key=sure.__getitem__)
    stopping = LayerSkip(target, SKIP, sure[weakest] * 1.001)
    [one] = begun(stopping, target, PROMPTS[:1])
    assert stopping.propose_batch([one], [Budget(6)])[0].tokens == tree.tokens[: weakest + 1]
    assert stopping.propose_batch([one], [Budget(weakest)])[0].tokens == tree.tokens[:weakest]


@pytest.mark.parametrize("seed", range(3))
def test_the_first_draw_is_kept_however_unsure(target: Target, seed: int) -> None:
    drafter = LayerSkip(target, SKIP, 1.0)
    [state] = begun(drafter, target, PROMPTS[:1], temperature=1.0, seed=seed)
    assert len(drafter.propose_batch([state], [Budget(6)])[0]) == 1


def test_the_threshold_follows_the_papers_rule() -> None:
    exit_ = DraftExit(0.6, wanted=0.9, step=0.1)
    exit_.learn(1, 4)
    assert exit_.rate == pytest.approx(0.5 * 1.0 + 0.5 * 0.25)
    assert exit_.threshold == pytest.approx(0.9 * 0.6 + 0.1 * 0.7)
    before = exit_.threshold
    for _ in range(20):
        exit_.learn(4, 4)
    assert exit_.rate == pytest.approx(1.0, abs=1e-3)
    assert exit_.threshold < before
    before = exit_.threshold
    exit_.learn(0, 0)
    assert exit_.threshold == before
    fixed = DraftExit(0.6, step=0.0)
    fixed.learn(0, 4)
    assert fixed.threshold == 0.6


def test_the_threshold_adapts_to_what_is_accepted() -> None:
    """A sub-graph that is wrong all the time is soon used less; with the rule off it is not."""
    drafted = {}
    for step in (0.0, 0.5):
        target = TARGETS["dense"](spare_model())
        drafter = LayerSkip(target, SubGraph(stop=1), 0.2, step=step)
        method = Method("toy", drafter, Rejection(), Fixed(4, max_nodes=4))
        drafted[step] = sum(one.metrics.drafted for one in decode(target, method, PROMPTS, 60))
    assert drafted[0.5] < 0.7 * drafted[0.0]


# ---------------------------------------------------------------------------------------------- toys with layers


def test_a_table_with_layers_is_consistent() -> None:
    table = random_table(5, 3)
    target = TableTarget(5, table)
    sequence = opened(target, [0, 1, 2, 3])
    tree = TokenTree.chain([4, 1])
    full = target.score([(sequence, tree)], aux_hidden_state_layers=(0, 2, 4))
    for node in (ROOT, 0, 1):
        assert torch.equal(full[0].logits[node + 1], table((0, 1, 2, 3, *tree.path_tokens(node))))
    assert torch.equal(target.lm_head(full[0].hidden_states[4]), full[0].logits)
    assert torch.equal(full[0].hidden_states[0], target.embed(torch.tensor([3, 4, 1])))
    early = target.score([(sequence, tree)], graph=SubGraph(stop=2))
    near(early[0].logits, target.lm_head(full[0].hidden_states[2]))
    seen = {early[0].logits}
    for graph in (SKIP, SubGraph(skip_mlp=frozenset({1})), SubGraph(start=1), SubGraph(kv={0: torch.tensor([0, 2])})):
        other = target.score([(sequence, tree)], graph=graph)
        assert not any(torch.allclose(other[0].logits, one) for one in seen)
        seen.add(other[0].logits)
        with pytest.raises(ValueError, match="full forward"):
            target.commit(other, [[]])
    everything = target.score([(sequence, tree)], graph=SubGraph(kv={0: torch.arange(3)}))
    near(everything[0].logits, full[0].logits)
    with pytest.raises(ValueError, match="range"):
        target.score([(sequence, tree)], graph=SubGraph(stop=9))


def test_what_a_table_reads_decides_what_it_says() -> None:
    """Of a subset of K/V it is the tokens that count."""
    target = TableTarget(5)
    one, other = opened(target, [0, 1, 2, 3]), opened(target, [0, 4, 2, 3])
    graph = SubGraph(kv={0: torch.tensor([0, 2]), 1: torch.tensor([0, 2])})
    pairs = [(one, TokenTree()), (other, TokenTree())]
    same = target.score(pairs, graph=graph)
    assert torch.equal(same[0].logits, same[1].logits)
    wider = SubGraph(kv={0: torch.tensor([0, 1]), 1: torch.tensor([0, 1])})
    apart = target.score(pairs, graph=wider)
    assert not torch.allclose(apart[0].logits, apart[1].logits)


def test_prefill_streams_the_states_that_scoring_taps() -> None:
    target = TableTarget(5)
    sequence = target.sequence([0, 1, 2, 3])
    found: dict[int, Any] = {}
    target.prefill(
        [sequence],
        (2,),
        lambda _, start, aux_hidden_state_layers: found.update({start: copy.deepcopy(dict(aux_hidden_state_layers))}),
    )
    lone = target.sequence([0])
    chain = target.score([(lone, TokenTree.chain([1, 2]))], aux_hidden_state_layers=(2,), graph=FULL)
    assert torch.equal(found[0][2], chain[0].hidden_states[2])


class Sharing(Fixed):
    """States that further rows of a shared round cost far more than they gain."""

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return replace(
            super().budget(metrics, batch, repeatable),
            relative_costs=tuple(1.0 + 5.0 * rows for rows in range(32)),
            base_tokens=float(batch),
        )


@pytest.mark.parametrize("graph", [SKIP, EXIT], ids=["skip", "exit"])
def test_what_a_part_of_the_forward_has_been_run_for_is_not_cut(graph: SubGraph) -> None:
    """The full forward goes on from those very trees."""
    target = TARGETS["dense"](spare_model({2}, {2}))
    method = Method("toy", LayerSkip(target, graph, 0.0, step=0.0), Rejection(), Sharing(4, max_nodes=4))
    found = decode(target, method, PROMPTS)
    assert texts(found) == texts(decode(target, plain(), PROMPTS))
    assert all(one.metrics.drafted > 0 for one in found)
