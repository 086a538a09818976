"""The draft model: exact output distributions through the real Decoder, K/V in step, what targets rely on."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import RecursiveRejection, Rejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.mixed_drafter import MixedDraftModel
from outpace.drafting.model_drafter import CATCH_UP, DraftModel, ModelDraftState, top_k_tree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.lookup.pld import PromptLookup
from outpace.methods.lookup.sam import SuffixLookup
from outpace.methods.none import NoDraft
from outpace.targets.base import Scores, Sequence
from outpace.targets.hf import HFTarget
from outpace.targets.sub_graph import FULL, SubGraph
from outpace.targets.table import TableTarget, random_table
from support import NeverTwice, Path, autoregressive_distribution, distance, whole_law
from target_suite import tiny_model
from weights_support import with_drafts

PROMPT: Path = (0, 2, 1)
PARAMS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.0, top_k=2),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7),
    "repetition penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "frequency penalty": SamplingParams(temperature=1.0, frequency_penalty=0.9, presence_penalty=0.4),
    "processor": SamplingParams(temperature=1.0, processors=(NeverTwice(),)),
    "greedy": SamplingParams(),
}


class StrictTable(TableTarget):
    """A table target that checks what is asked of it, and counts the rows that a real model would run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forwards: list[int] = []
        self.prefills: list[int] = []

    def prefill(self, sequences: Seq[Sequence], *args: Any, **kwargs: Any) -> None:
        self.prefills.append(len(sequences))
        super().prefill(sequences, *args, **kwargs)

    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        rows = sum(1 + len(tree) for _, tree in batch)
        if resume is not None:
            assert [sequence for sequence, _ in batch] == [part.sequence for part in resume.parts]
            for (_, tree), part in zip(batch, resume.parts, strict=True):
                assert part.tree.tokens[: part.nodes] == tree.tokens[: part.nodes]
                assert part.tree.parents[: part.nodes] == tree.parents[: part.nodes]
                rows -= 1 + part.nodes
        for sequence, tree in batch:
            assert len(sequence.kv) + 1 + max(tree.depths, default=0) <= self.context_length
        assert rows > 0, "a forward that runs nothing"
        self.forwards.append(rows)
        return super().score(batch, aux_hidden_state_layers, graph, resume)


def draft_method(draft: TableTarget, *, tree: bool = False, **budget: Any) -> Method:
    rule = RecursiveRejection() if tree else Rejection()
    return Method("draft-model", (top_k_tree(draft) if tree else DraftModel(draft)), rule, Fixed(**budget))


def law_error(
    method: Method, params: SamplingParams, *, vocab: int = 3, length: int = 3, prompt: Path = PROMPT
) -> float:
    table = random_table(vocab, 1, sharpness=1.0)
    proposal_distribution = whole_law(
        TableTarget(vocab, table), [Request(prompt, method, params, max_new_tokens=length)]
    )
    assert sum(proposal_distribution.values()) == pytest.approx(1.0, abs=1e-9)
    return distance(
        {output: weight for (output,), weight in proposal_distribution.items()},
        autoregressive_distribution(table, params, prompt, length),
    )


def other(vocab: int = 3, **kwargs: Any) -> StrictTable:
    return StrictTable(vocab, random_table(vocab, 2, sharpness=1.0), **kwargs)


# --------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("length", [1, 2])
def test_a_sampled_chain_keeps_the_law(name: str, length: int) -> None:
    assert law_error(draft_method(other(), length=length), PARAMS[name]) < 1e-6


@pytest.mark.parametrize("name", ["temperature 1", "repetition penalty"])
def test_a_longer_chain_keeps_the_law(name: str) -> None:
    assert law_error(draft_method(other(2), length=3), PARAMS[name], vocab=2, length=4, prompt=(0, 1)) < 1e-6


@pytest.mark.parametrize("confidence", [0.4, 0.6, 0.9])
def test_a_confidence_threshold_keeps_the_law(confidence: float) -> None:
    draft = other()
    assert law_error(draft_method(draft, length=2, confidence=confidence), PARAMS["temperature 1"]) < 1e-6


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("nodes", [2, 5])
def test_a_top_k_tree_keeps_the_law(name: str, nodes: int) -> None:
    method = draft_method(other(), tree=True, length=2, topk=2, max_nodes=nodes)
    assert law_error(method, PARAMS[name]) < 1e-6


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("topk", [1, 2])
def test_a_mixed_tree_keeps_the_law(name: str, topk: int) -> None:
    controller = Fixed(length=2, topk=topk, max_nodes=3)
    method = Method("draft-model", MixedDraftModel(other(), topk), RecursiveRejection(), controller)
    assert law_error(method, PARAMS[name]) < 1e-6


def test_a_wider_vocabulary_and_a_full_draft_context_keep_the_law() -> None:
    method = draft_method(other(4, context_length=len(PROMPT) + 1), length=2)
    assert law_error(method, PARAMS["temperature 1"], vocab=4) < 1e-6


class WrongRow(DraftModel):
    """Planted: the q that is tested is not the q that was sampled."""

    def propose_batch(self, states: Seq[ModelDraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = super().propose_batch(states, budgets)
        return [TokenTree.chain(tree.tokens, [QRow(q.probs.sqrt()) for q in tree.q_rows]) for tree in trees]


class CutUnlikely(DraftModel):
    """Planted: a draw is dropped for its own q."""

    def propose_batch(self, states: Seq[ModelDraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = []
        for tree in super().propose_batch(states, budgets):
            kept = len(tree)
            for draw in tree.draws:
                if tree.q_rows[draw.q_row].prob(draw.token) < 0.4:
                    kept = draw.node
                    break
            trees.append(TokenTree.chain(tree.tokens[:kept], tree.q_rows[:kept]))
        return trees


@pytest.mark.parametrize("planted", [WrongRow, CutUnlikely])
def test_planted_bugs_are_caught(planted: type[DraftModel]) -> None:
    method = Method("planted", planted(other()), Rejection(), Fixed(2))
    assert law_error(method, PARAMS["temperature 1"]) > 1e-2


# ------------------------------------------------------------------------------------------- greedy, in batches


@pytest.mark.parametrize("seed", range(6))
def test_greedy_decoding_is_plain_decoding_in_a_mixed_batch(seed: int) -> None:
    rng = random.Random(seed)
    # The draft model agrees with the target on most contexts, as real ones do.
    table, noise = random_table(7, seed), random_table(7, seed + 50, sharpness=0.6)
    target = TableTarget(7, table)
    draft = StrictTable(7, lambda path: table(path) + noise(path), context_length=64)
    methods = [
        Method("none", NoDraft(), RecursiveRejection(), Fixed(0)),
        Method("pld", PromptLookup(1, 3), RecursiveRejection(), Fixed(6)),
        Method("sam", SuffixLookup(), RecursiveRejection(), Fixed(9)),
        draft_method(draft, length=4),
        draft_method(draft, length=4, confidence=0.5),
        draft_method(draft, tree=True, length=3, topk=3, max_nodes=8),
    ]
    prompts = [tuple(rng.randrange(7) for _ in range(rng.randrange(1, 30))) for _ in range(12)]
    expected = []
    for prompt in prompts:
        decoder = Decoder(target)
        one = decoder.submit(Request(prompt, methods[0], max_new_tokens=50))
        decoder.run()
        expected.append(one.tokens)
    decoder = Decoder(target)
    running: list[Generation] = []
    for index, prompt in enumerate(prompts):  # they join while others run
        running.append(decoder.submit(Request(prompt, methods[index % 6], max_new_tokens=50)))
        decoder.step()
        check_in_step(running)
    while decoder.step():
        check_in_step(running)
    assert [one.tokens for one in running] == expected
    assert all(one.metrics.accepted > 0 for one in (running[3], running[5], running[9], running[11]))


def check_in_step(running: Seq[Generation]) -> None:
    """The draft's K/V are a beginning of the committed tokens, and never hold the last."""
    for one in running:
        if isinstance(one.draft_state, ModelDraftState) and one.finish_reason is None:
            kv, tokens = one.draft_state.draft_sequence.kv, one.sequence.tokens
            assert kv == tokens[: len(kv)]
            assert len(kv) < len(tokens)


@pytest.mark.parametrize("tree", [False, True])
def test_kv_stay_in_step_at_temperature(tree: bool) -> None:
    table = random_table(5, 3)
    method = draft_method(StrictTable(5, random_table(5, 4)), tree=tree, length=3, topk=2 if tree else 1, max_nodes=6)
    decoder = Decoder(TableTarget(5, table))
    running = [
        decoder.submit(Request((seed, 1), method, SamplingParams(temperature=1.0, seed=seed), max_new_tokens=40))
        for seed in range(5)
    ]
    while decoder.step():
        check_in_step(running)
    assert all(len(one.tokens) == 40 for one in running)


# ------------------------------------------------------------------------------------------ cost, and the tree


def rounds(draft: StrictTable, method: Method, prompt: Path, params: SamplingParams, new: int) -> Generation:
    decoder = Decoder(TableTarget(draft.vocab_size, draft.table))  # a draft that is always right
    one = decoder.submit(Request(prompt, method, params, max_new_tokens=new))
    decoder.run()
    return one


def test_every_token_is_run_once_by_a_draft_that_is_always_right() -> None:
    draft = other(5)
    new = 21
    one = rounds(draft, draft_method(draft, length=4), (1, 2), SamplingParams(), new)
    assert one.metrics.rounds == 5
    assert one.metrics.accepted == one.metrics.drafted
    # The first forward of a round catches up with the two tokens that the last round left; the others run one row.
    assert draft.forwards[:8] == [2, 1, 1, 1, 2, 1, 1, 1]
    assert not draft.prefills


def test_long_prompts_are_prefilled_together() -> None:
    draft = other(5)
    method = draft_method(draft, length=2)
    decoder = Decoder(TableTarget(5, draft.table))
    for length in (CATCH_UP + 10, CATCH_UP + 40, 3):
        decoder.submit(Request(tuple(i % 5 for i in range(length)), method, max_new_tokens=4))
    decoder.run()
    assert draft.prefills == [2]
    assert draft.forwards[0] == 1 + 1 + 3


@pytest.mark.parametrize("answers", [0, 3, CATCH_UP + 4])
def test_a_prompt_that_several_requests_have_is_read_once(answers: int) -> None:
    """Their answers differ from the prompt's end; another tenant's request reads its own."""
    draft, prompt = other(5), [i % 5 for i in range(CATCH_UP + 10)]
    drafter = DraftModel(draft)
    sequences = [TableTarget(5).sequence(prompt, namespace=name) for name in ("", "", "", "tenant")]
    for at, one in enumerate(sequences):
        one.tokens += [at] * answers
    states = [drafter.begin(one) for one in sequences]
    trees = drafter.propose_batch(states, [Budget(2)] * 4)
    assert draft.prefills == ([2, 2] if answers > CATCH_UP else [2])
    for one, state, tree in zip(sequences, states, trees, strict=True):
        alone = drafter.propose_batch([drafter.begin(one)], [Budget(2)])[0]
        assert tree.tokens == alone.tokens
        assert state.draft_sequence.kv == one.tokens[: len(state.draft_sequence.kv)]
        assert len(state.draft_sequence.kv) >= CATCH_UP + 9
    assert len({id(state.draft_sequence.kv) for state in states}) == 4


@pytest.mark.parametrize("length", range(CATCH_UP - 1, CATCH_UP + 4))
def test_a_prompt_that_is_about_as_long_as_what_is_caught_up_is_shared_where_it_is_read(length: int) -> None:
    draft, prompt = other(5), [i % 5 for i in range(length)]
    drafter = DraftModel(draft)
    states = [drafter.begin(TableTarget(5).sequence(prompt)) for _ in range(3)]
    trees = drafter.propose_batch(states, [Budget(2)] * 3)
    assert draft.prefills == ([1] if length > CATCH_UP + 1 else [])
    alone = drafter.propose_batch([drafter.begin(TableTarget(5).sequence(prompt))], [Budget(2)])[0]
    assert all(tree.tokens == alone.tokens for tree in trees)


def test_a_chain_carries_the_rows_it_was_drawn_from() -> None:
    draft, params = other(4), SamplingParams(temperature=0.8, repetition_penalty=1.4)
    sequence = TableTarget(4).sequence([0, 1], params)
    drafter = DraftModel(draft)
    tree = drafter.propose_batch([drafter.begin(sequence)], [Budget(3)])[0]
    assert len(tree) == 3
    assert tree.is_chain
    for draw in tree.draws:
        path = (0, 1, *tree.path_tokens(draw.parent))
        naive = autoregressive_distribution(draft.table, params, (0, 1), draw.node + 1, start=path[2:])
        row = torch.tensor([naive.get((*path[2:], token), 0.0) for token in range(4)])
        torch.testing.assert_close(tree.q_rows[draw.q_row].probs, row, atol=1e-6, rtol=0)


def test_a_mixed_tree_has_one_draw_beside_likely_tokens_and_its_row_leaves_them_out() -> None:
    draft, params = other(4), SamplingParams(temperature=1.0, repetition_penalty=1.4)
    drafter = MixedDraftModel(draft, 3)
    tree = drafter.propose_batch([drafter.begin(TableTarget(4).sequence([0, 1], params))], [Budget(2, 9, 3)])[0]
    drawn = [draw for draw in tree.draws if draw.q_row >= 0]
    assert drawn and len(drawn) < len(tree.draws)
    for draw in drawn:
        naive = autoregressive_distribution(draft.table, params, (0, 1, *tree.path_tokens(draw.parent)), 1)
        known = {one.token for one in tree.draws_at(draw.parent) if one.q_row < 0}
        row = torch.tensor([0.0 if token in known else naive.get((token,), 0.0) for token in range(4)])
        torch.testing.assert_close(tree.q_rows[draw.q_row].dense(4), row / row.sum(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 3, 9), (2, 2, 4), (3, 2, 7), (3, 4, 64), (3, 1, 2)])
def test_a_tree_holds_the_most_probable_paths(temperature: float, depth: int, width: int, nodes: int) -> None:
    draft, params = other(4), SamplingParams(temperature=temperature)
    prompt = (3, 1)
    sequence = TableTarget(4).sequence(prompt, params)
    drafter = top_k_tree(draft)
    tree = drafter.propose_batch([drafter.begin(sequence)], [Budget(depth, nodes, width)])[0]
    assert tree.is_deterministic

    found: dict[Path, float] = {}  # every path of at most ``width`` best children a node
    level: dict[Path, float] = {(): 0.0}
    for _ in range(depth):
        below: dict[Path, float] = {}
        for path, before in level.items():
            log_q = (draft.table((*prompt, *path)) / (temperature or 1.0)).log_softmax(-1)
            for token in log_q.topk(width).indices.tolist():
                below[*path, token] = before + float(log_q[token])
        found |= below
        level = below
    best = sorted(found, key=lambda path: -found[path])[:nodes]
    assert {tuple(tree.path_tokens(node)) for node in range(len(tree))} == set(best)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_stops_before_the_next_draw(tree: bool, temperature: float) -> None:
    draft = TableTarget(4, lambda path: torch.tensor([5.0, 0, 0, 0]) if len(path) < 4 else torch.zeros(4))
    sequence = TableTarget(4).sequence([1, 2], SamplingParams(temperature=temperature))
    drafter = top_k_tree(draft) if tree else DraftModel(draft)
    state = drafter.begin(sequence)
    sure = drafter.propose_batch([state], [Budget(9, 30, 1, 0.9)])[0]
    assert max(sure.depths) == 2  # the third token would be a guess among four
    assert len(drafter.propose_batch([state], [Budget(9, 30, 1, 0.999)])[0]) == 0


def test_proposals_that_are_not_observed_leave_no_trace() -> None:
    sequence = TableTarget(4).sequence([0, 1, 2])
    drafter = DraftModel(other(4))
    state = drafter.begin(sequence)
    first = drafter.propose_batch([state], [Budget(3)])[0]
    again = drafter.propose_batch([state], [Budget(3)])[0]
    assert first.tokens == again.tokens
    drafter.propose_batch([state], [Budget(0)])
    sequence.tokens.append(3)
    drafter.observe_batch([state], [Verdict((), 3, committed=(3,))])
    assert state.draft_sequence.kv == []
    assert len(drafter.propose_batch([state], [Budget(3)])[0]) == 3


def test_a_rewound_request_keeps_the_kv_that_still_holds() -> None:
    drafter = DraftModel(other(5))
    sequence = TableTarget(5).sequence([i % 5 for i in range(CATCH_UP + 5)])
    state = drafter.begin(sequence)
    drafter.propose_batch([state], [Budget(2)])
    assert state.draft_sequence.kv == sequence.tokens[:-1]
    sequence.tokens[9:] = [4, 4, 2]
    state = drafter.rewind(state, sequence, 9)
    assert state.draft_sequence.kv == sequence.tokens[:9]
    fresh = drafter.propose_batch([drafter.begin(sequence)], [Budget(2)])[0]
    assert drafter.propose_batch([state], [Budget(2)])[0].tokens == fresh.tokens


# ------------------------------------------------------------------------------------------------- as a method


@pytest.mark.parametrize("name", ["draft-model", "leviathan", "sps"])
def test_the_method_is_registered(name: str) -> None:
    target = TableTarget(4)
    chain = registry.build(name, with_drafts(target, other(4)))
    assert str(chain.drafter.proposal) == "chains of sampled draft tokens"
    tree = registry.build(name, with_drafts(target, other(4)), {"topk": 3})
    assert str(tree.drafter.proposal) == "trees of deterministic draft tokens"
    with pytest.raises(BadInput, match="takes chains"):
        registry.build(name, with_drafts(target, other(4)), {"topk": 3}, rule="rejection")


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match="vocabulary"):
        registry.build("draft-model", with_drafts(TableTarget(4), other(5)))


# ---------------------------------------------------------------------------------------------- on a real model


@pytest.mark.parametrize(
    "settings",
    [{"num_draft_tokens": 3}, {"num_draft_tokens": 3, "confidence": 0.02}, {"topk": 3, "num_draft_tokens": 3}],
    ids=str,
)
def test_a_transformer_drafts_for_itself(settings: dict[str, Any]) -> None:
    """Draft and target are one float32 model, so a wrong row, position or K/V of the draft would be rejected."""
    target = HFTarget(tiny_model("llama"))
    method = registry.build("draft-model", with_drafts(target, HFTarget(target.model)), settings)
    plain = Method("none", NoDraft(), RecursiveRejection(), Fixed(0))
    prompts = [(5, 9, 3), tuple(range(1, 40)), (7,)]
    outputs = []
    for one in (plain, method):
        decoder = Decoder(target)
        running = [decoder.submit(Request(prompt, one, max_new_tokens=12)) for prompt in prompts]
        while decoder.step():
            for generation in running:
                if one is method and generation.finish_reason is None:
                    assert isinstance(generation.draft_state, ModelDraftState)
                    kv = generation.draft_state.draft_sequence.kv
                    assert kv.length < len(generation.sequence.tokens)
        outputs.append([generation.tokens for generation in running])
    assert outputs[0] == outputs[1]
    if len(settings) == 1:
        assert all(generation.metrics.accepted == generation.metrics.drafted for generation in running)
    assert all(generation.metrics.accepted > 0 for generation in running)


@pytest.mark.parametrize("tree", [False, True])
def test_the_drafts_next_scores_equal_a_fresh_prefill(tree: bool) -> None:
    """After rounds of partial acceptance the draft model proposes what one that starts afresh would."""
    target, draft = HFTarget(tiny_model("llama", seed=1)), HFTarget(tiny_model("llama", seed=2))
    drafter = top_k_tree(draft) if tree else DraftModel(draft)
    method = Method("draft-model", drafter, RecursiveRejection(), Fixed(3, topk=2, max_nodes=6))
    decoder = Decoder(target)
    for seed in range(2):
        params = SamplingParams(temperature=1.0, seed=seed)
        decoder.submit(Request(tuple(range(1, 20 + seed)), method, params, max_new_tokens=10))
    budget = Budget(3, 6, 2)
    while decoder.step():
        active = [one.draft_state for one in decoder.active]
        kept = drafter.propose_batch(active, [budget] * len(active))
        fresh = top_k_tree(draft) if tree else DraftModel(draft)
        for state, tree_kept in zip(active, kept, strict=True):
            found = fresh.propose_batch([fresh.begin(state.sequence)], [budget])[0]
            assert found.tokens == tree_kept.tokens
            assert found.parents == tree_kept.parents
            for one, other_row in zip(found.q_rows, tree_kept.q_rows, strict=True):
                torch.testing.assert_close(one.probs, other_row.probs, atol=1e-5, rtol=0)
