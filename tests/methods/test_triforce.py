"""triforce: what the middle level reads, who drafts for it, and that both levels are exact."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.exact import certify_exact, matrix
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import ChanceSource, Enumeration, SeededChance
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.bottom_drafters import LookupBottom, StreamingBottom
from outpace.drafting.context_chunks import Chunks, streaming
from outpace.drafting.tree_builder import ChainBuilder, build_together
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods import registry
from outpace.methods.registry import Context
from outpace.methods.self_speculative.triforce import TriForce, TriForceState
from outpace.targets.base import Scores, Sequence, Target
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.sub_graph import FULL, SubGraph
from outpace.targets.table import TableTarget, random_table
from self_draft_support import TARGETS, context, decode, plain, spare_model, texts
from support import NeverTwice, autoregressive_distribution, distance, whole_law
from target_suite import attention_by_hand, near, random_tokens, tiny_model
from weights_support import with_drafts

RNG = random.Random(6)
PROMPTS = [random_tokens(count, RNG) for count in (60, 41)]
SMALL: dict[str, Any] = {"num_draft_tokens": 4, "inner": 2, "retrieved": 8, "chunk": 4, "window": 6, "sink": 2}


def built(target: Target, draft: Target | None = None, **settings: Any) -> tuple[Method, TriForce]:
    made = context(target)
    if draft is not None:
        made = with_drafts(target, draft)
    method = registry.build("triforce", made, {**SMALL, **settings})
    assert isinstance(method.drafter, TriForce)
    return method, method.drafter


def begun(drafter: TriForce, target: Target, sequence: Sequence) -> TriForceState:
    """The state of a request whose prompt the target has prefilled."""
    state = drafter.begin(sequence)
    target.prefill([sequence])
    return state


# ------------------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("bottom", ["model", "lookup"])
def test_lossless_on_a_slice_of_the_matrix(bottom: str) -> None:
    def make(context: Context) -> Method:
        return registry.build("triforce", context, {**registry.find("triforce").tiny, "bottom": bottom})

    certificate = certify_exact("triforce", make, [matrix(2)[index] for index in (13, 16)])
    assert certificate.lossless, certificate.verdict


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, repetition_penalty=1.6),
        SamplingParams(temperature=1.0, processors=(NeverTwice(),)),
    ],
    ids=["plain", "penalty", "processor"],
)
@pytest.mark.parametrize("vocab", [2, 3])
def test_the_middle_levels_tokens_have_its_own_distribution(vocab: int, params: SamplingParams) -> None:
    """The chain that is proposed, over all outcomes, against drawing from the middle level token by token."""
    table, count = random_table(vocab, 1), 3 if vocab == 2 else 2
    target, draft = TableTarget(vocab, table), TableTarget(vocab, random_table(vocab, 2))
    prompt = (0, 1, 1, 0, 1)

    def middle(path: tuple[int, ...]) -> torch.Tensor:
        sequence = target.sequence(prompt)
        target.prefill([sequence])
        read = SubGraph(kv={0: torch.tensor([0, 1, 3])})
        return target.score([(sequence, TokenTree.chain(path[len(prompt) :]))], graph=read)[0].logits[-1]

    class Fixed(TriForce):
        def read(self, state: TriForceState) -> torch.Tensor:
            return torch.tensor([0, 1, 3])

    def program(chance: ChanceSource) -> tuple[int, ...]:
        drafter = Fixed(target, StreamingBottom(draft, 1, 2), inner=1)
        sequence = target.sequence(prompt, params, chance=chance)
        state = drafter.begin(sequence)
        target.prefill([sequence])
        [tree] = drafter.propose_batch([state], [Budget(count)])
        assert len(tree) == count
        for draw in tree.draws:
            expected = autoregressive_distribution(
                middle, params, prompt, len(tree.path(draw.node)), tuple(tree.path_tokens(draw.parent))
            )
            row = tree.q_rows[draw.q_row].dense(vocab)
            for path, weight in expected.items():
                assert float(row[path[-1]]) == pytest.approx(weight, abs=1e-6)
        return tuple(tree.tokens)

    proposal_distribution: dict[tuple[int, ...], float] = {}
    for outcome, weight in Enumeration.outcomes(program):
        proposal_distribution[outcome] = proposal_distribution.get(outcome, 0.0) + weight
    assert distance(proposal_distribution, autoregressive_distribution(middle, params, prompt, count)) < 1e-6


class Swapped(TriForce):
    """Planted: the whole target's distribution is proposed as the middle level's."""

    def propose_batch(self, states: Seq[TriForceState], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = super().propose_batch(states, budgets)
        out = []
        for state, tree in zip(states, trees, strict=True):
            part = self.target.score([(state.sequence, tree)])[0]
            out.append(TokenTree.chain(tree.tokens, [QRow(part.p(node - 1)) for node in range(len(tree))]))
        return out


@pytest.mark.parametrize("kind", [TriForce, Swapped])
def test_a_wrong_row_would_be_caught(kind: type[TriForce]) -> None:
    table = random_table(3, 5)
    target, draft = TableTarget(3, table), TableTarget(3, random_table(3, 6))
    made = built(target, draft, num_draft_tokens=2, inner=1, retrieved=0, window=1, sink=1)[0]
    drafter = kind(target, StreamingBottom(draft, 1, 1), inner=1, retrieved=0, window=1, sink=1)
    method = Method("triforce", drafter, made.rule, made.controller)
    params = SamplingParams(temperature=1.0)
    proposal_distribution = whole_law(target, [Request((0, 2, 1, 1), method, params, max_new_tokens=3)])
    error = distance(
        {one: p for (one,), p in proposal_distribution.items()},
        autoregressive_distribution(table, params, (0, 2, 1, 1), 3),
    )
    assert (error < 1e-6) is (kind is TriForce)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("bottom", ["model", "lookup"])
def test_greedy_decoding_is_plain_decoding(kind: str, bottom: str) -> None:
    target = TARGETS[kind](spare_model())
    draft = TARGETS[kind](spare_model(seed=2)) if bottom == "model" else None
    found = decode(target, built(target, draft)[0], PROMPTS, 8)
    assert texts(found) == texts(decode(target, plain(), PROMPTS, 8))
    assert all(one.metrics.drafted > 0 for one in found)


def test_greedy_drafts_are_the_middle_levels_own() -> None:
    target = TARGETS["dense"](spare_model())
    for inner in (0, 1, 3):
        _, drafter = built(target, inner=inner)
        states = [begun(drafter, target, target.sequence(one)) for one in PROMPTS]
        trees = drafter.propose_batch(states, [Budget(4), Budget(3)])
        for state, tree, count in zip(states, trees, (4, 3), strict=True):
            read = drafter.read(state)
            assert read is not None
            chain: list[int] = []
            for _ in range(count):
                part = target.score([(state.sequence, TokenTree.chain(chain))], graph=SubGraph(kv={0: read}))[0]
                chain.append(int(part.logits[-1].argmax()))
            assert tree.tokens == chain


class Counted(TableTarget):
    """Counts the passes that read a part of the K/V of ``watched``."""

    watched: Sequence | None = None
    passes = 0

    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        self.passes += batch[0][0] is self.watched
        return super().score(batch, aux_hidden_state_layers, graph, resume)


def test_an_inner_draft_saves_passes_of_the_middle_level() -> None:
    """A bottom that reads what the middle level reads: as many tokens in fewer passes. Without it, one pass a token."""
    passes = {}
    for inner in (0, 3):
        target = Counted(7)
        _, drafter = built(target, target, inner=inner, retrieved=0, window=20, sink=20)
        target.watched = sequence = target.sequence([one % 7 for one in PROMPTS[0]])
        assert len(drafter.propose_batch([begun(drafter, target, sequence)], [Budget(4)])[0]) == 4
        passes[inner] = target.passes
    assert passes == {0: 4, 3: 1}


def test_no_more_is_proposed_than_was_fixed_before() -> None:
    target = TARGETS["dense"](spare_model())
    _, drafter = built(target, target, inner=8)
    sequence = target.sequence(PROMPTS[0], SamplingParams(temperature=1.0))
    state = begun(drafter, target, sequence)
    for depth in range(6):
        assert len(drafter.propose_batch([state], [Budget(depth)])[0]) == depth
    assert len(drafter.propose_batch([state], [Budget(5, max_nodes=2)])[0]) == 2


def test_short_contexts_are_drafted_for_directly() -> None:
    """While the middle level would read everything there is nothing for it to save."""
    target = TARGETS["dense"](spare_model())
    draft = TARGETS["dense"](spare_model(seed=2))
    _, drafter = built(target, draft, window=100)
    sequence = target.sequence(PROMPTS[0])
    [tree] = drafter.propose_batch([begun(drafter, target, sequence)], [Budget(3)])
    other = draft.sequence(PROMPTS[0])
    draft.prefill([other])
    builder = ChainBuilder(other, Budget(3), SeededChance(0).at(0, "draft"))
    read = streaming(draft.length(other.kv), 2, 100)
    build_together(draft, [other], [builder], FULL if read is None else SubGraph(kv={0: read}))
    assert tree.tokens == builder.proposal().tokens


# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("kind", ["dense", "hf", "graph"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_chunks_are_those_whose_mean_keys_have_the_largest_products_with_the_query(
    kind: str, architecture: str
) -> None:
    """In every layer and head, from the queries and keys of the model's own forward, which are not alike."""
    model = tiny_model(architecture)
    target = {"graph": lambda one: GraphTarget(read_decoder_spec(one)), **TARGETS}[kind](tiny_model(architecture))
    _, drafter = built(target, every=3)
    sequence = target.sequence(PROMPTS[0])
    state = begun(drafter, target, sequence)
    heads = target.keys(sequence.kv, 0, 1).shape[1]
    for committed in (0, 2, 5):  # chosen at once, kept, chosen anew
        drafter.propose_batch([state], [Budget(1)])
        read = drafter.read(state)
        length = len(sequence.tokens) - 1
        at = length - 2 if committed == 2 else length
        rows = at + 1
        seen = torch.ones(4, heads, rows, rows, dtype=torch.bool).tril()
        exact = attention_by_hand(model, sequence.tokens[:rows], list(range(rows)), seen)
        assert read is not None
        assert read.shape[:2] == (4, heads)
        groups = exact.queries.shape[1] // heads
        for layer in range(4):
            for head in range(heads):
                products = {}
                for chunk in range(1, (at - 6) // 4):  # behind the sinks, before the window
                    mean = exact.keys[layer, head, 4 * chunk : 4 * chunk + 4].mean(0)
                    queries = exact.queries[layer, head * groups : (head + 1) * groups, -1]
                    products[chunk] = sum(float(query @ mean) for query in queries)
                best = sorted(sorted(products, key=products.__getitem__)[-2:])
                expected = [0, 1, *(4 * chunk + i for chunk in best for i in range(4)), *range(at - 6, length)]
                assert read[layer, head].tolist() == expected
        assert len({tuple(one) for one in read.flatten(0, 1).tolist()}) > 1
        more = random_tokens(2 if committed == 0 else 3, RNG)
        target.commit(target.score([(sequence, TokenTree.chain(more[:-1]))]), [list(range(len(more) - 1))])
        sequence.tokens += more


def test_what_is_chosen_leaves_sinks_and_recent_tokens_out() -> None:
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 100, 8, generator=rng)
    queries = torch.randn(2, 6, 8, generator=rng)
    for retrieved in (0, 3, 4, 11, 40, 86):
        chunks = Chunks(4)
        for length in (50, 100):
            chunks.grow(length, lambda start, stop: keys[:, :, start:stop])
            assert chunks.seen == length - length % 4
        chunks.choose(queries, 100, 3, 10, retrieved)
        for length in (100, 107):  # what was committed since is read
            read = chunks.positions(length, 3).expand(2, 3, -1)
            for one in read.flatten(0, 1).tolist():
                assert one == sorted(set(one))
                assert len(one) == 13 + min(retrieved // 4, 21) * 4 + length - 100
                assert {0, 1, 2, *range(90, length)} <= set(one)


def test_chunks_are_chosen_for_long_contexts_and_not_every_round() -> None:
    target = TARGETS["dense"](spare_model())
    asked: list[int] = []
    queries = target.queries

    def counted(sequences: Seq[Sequence]) -> list[torch.Tensor]:
        asked.extend(len(one.tokens) for one in sequences)
        return queries(sequences)

    target.queries = counted  # type: ignore[method-assign]
    decode(target, built(target, every=10)[0], [PROMPTS[0], PROMPTS[1][:8]], 24)
    assert asked[0] == len(PROMPTS[0])
    first, second = ([count for count in asked if (count >= len(PROMPTS[0])) is long] for long in (True, False))
    assert len(first) == 3, "at the prompt's end, and every ten tokens or a round more"
    assert len(second) == 2, "a short context is read whole until it has grown"
    assert min(second) > 8 + 2 + 6
    asked.clear()
    decode(target, built(target, retrieved=0)[0], PROMPTS, 8)
    assert not asked, "sinks and recent tokens need no queries"


def test_streaming_reads_the_ends() -> None:
    read = streaming(20, 2, 3)
    assert read is not None
    assert read.tolist() == [0, 1, 17, 18, 19]
    assert streaming(5, 2, 3) is None


class Reciting(TableTarget):
    """After a token that was read before, what followed it there; after any other, nothing in particular.

    Keys and queries tell tokens from 20 on from the others, so that the query of one chooses chunks with such tokens.
    """

    def keys(self, kv: Any, start: int, stop: int) -> torch.Tensor:
        return self.embed((torch.tensor(kv[start:stop]) >= 20).long()).expand(self.num_layers, 2, -1, -1)

    def queries(self, sequences: Seq[Sequence]) -> list[torch.Tensor]:
        return [
            self.embed((torch.tensor(one.tokens[-1:]) >= 20).long()).expand(self.num_layers, 2, -1) for one in sequences
        ]

    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        scores = super().score(batch, aux_hidden_state_layers)
        for index, part in enumerate(scores.parts):
            kv = part.sequence.kv
            read = set(graph.kv[index].flatten().tolist()) if index in graph.kv else set(range(len(kv)))
            text = [*kv, part.sequence.tokens[len(kv)]]
            for node in range(-1, len(part.tree)):
                last = part.tree.tokens[node] if node != ROOT else text[-1]
                after = [text[at + 1] for at in range(len(kv)) if at in read and at + 1 in read and text[at] == last]
                part.logits[node + 1] = 0.0
                part.logits[node + 1, after[-1] if after else 0] = 10.0
        scores.forward_state = graph
        return scores


def test_retrieval_finds_what_sinks_and_recent_tokens_have_not() -> None:
    """A text that goes on with a passage of its middle: retrieved, the middle level knows it; without it does not."""
    vocab = 60
    passage = list(range(20, 50))
    filler = [1 + index % 15 for index in range(200)]
    prompt = [*filler[:90], *passage, *filler[90:], *passage[:4]]
    rates = {}
    for retrieved in (0, 32):
        target = Reciting(vocab, context_length=400)
        method, _ = built(target, num_draft_tokens=3, inner=0, retrieved=retrieved, chunk=8, window=8, sink=2)
        [one] = decode(target, method, [prompt], 20)
        assert list(one.tokens) == passage[4:24]
        rates[retrieved] = one.metrics.accepted / one.metrics.drafted
    assert rates[32] > 0.8
    assert rates[0] < 0.2


# -------------------------------------------------------------------------------------------------------- the bottom


def test_the_lookup_continues_what_is_not_committed_yet() -> None:
    target = TableTarget(9)
    lookup = LookupBottom()
    sequence = target.sequence([1, 2, 3, 4, 5, 1, 2])
    state = lookup.begin(sequence)
    chance = SeededChance(0).at(0, "x")
    assert lookup.draft([state], [()], [2], [chance])[0].tokens == [3, 4]
    assert lookup.draft([state], [(3, 4)], [3], [chance])[0].tokens == [5, 1, 2]
    assert lookup.draft([state], [(8,)], [3], [chance])[0].tokens == []
    sequence.tokens += [3, 7]
    assert lookup.draft([state], [(3,)], [1], [chance])[0].tokens == [7]


def test_the_draft_model_reads_the_ends_and_goes_on_after_the_path() -> None:
    model = TARGETS["dense"](spare_model())
    bottom = StreamingBottom(model, 2, 5)
    target = TableTarget(97)
    sequence = target.sequence(PROMPTS[1], SamplingParams(temperature=0.7))
    state = bottom.begin(sequence)
    twin = model.sequence(PROMPTS[1])
    model.prefill([twin])
    for path in ((), (4, 7)):
        [tree] = bottom.draft([state], [path], [2], [SeededChance(1).at(0, "x")])
        read = streaming(len(PROMPTS[1]) - 1, 2, 5)
        assert read is not None
        chain = TokenTree.chain([*path, *tree.tokens])
        logits = model.score([(twin, chain)], graph=SubGraph(kv={0: read}))[0].logits
        for index, row in enumerate(tree.q_rows):
            near(row.probs, (logits[len(path) + index] / 0.7).softmax(-1))
    # What was committed since rides along, or is prefilled when it is much.
    sequence.tokens += random_tokens(5, RNG)
    bottom.draft([state], [()], [2], [SeededChance(1).at(0, "x")])
    assert model.length(state.kv) == len(PROMPTS[1]) - 1
    sequence.tokens += random_tokens(20, RNG)
    bottom.draft([state], [()], [2], [SeededChance(1).at(0, "x")])
    assert model.length(state.kv) == len(sequence.tokens) - 1


def test_settings_are_checked() -> None:
    with pytest.raises(BadInput, match="needs a draft model"):
        built(TableTarget(5), bottom="model")
    with pytest.raises(BadInput, match="7 tokens and the target 5"):
        built(TableTarget(5), TableTarget(7))
    method, drafter = built(TableTarget(5))
    assert isinstance(drafter.bottom, LookupBottom)
    assert isinstance(built(TableTarget(5), TableTarget(5))[1].bottom, StreamingBottom)
    assert method.lossless


def test_an_answer_that_is_cut_within_an_accepted_path_ends_well() -> None:
    """A stop token may come before the path's end: what was not committed has no place in the context."""
    follow = [1, 2, 3, 4, 5, 6, 7, 0]
    target = TableTarget(8, lambda path: 9.0 * torch.nn.functional.one_hot(torch.tensor(follow[path[-1]]), 8).float())
    drafter = TriForce(target, LookupBottom(), inner=3, chunk=1, sink=1, window=1, retrieved=1)
    method = Method("triforce", drafter, RecursiveRejection(), Fixed(6))
    decoder = Decoder(target)
    prompt = tuple(list(range(8)) * 2 + [0])
    generation = decoder.submit(Request(prompt, method, max_new_tokens=20, stop_ids=frozenset([3])))
    decoder.run()
    assert (generation.tokens, generation.finish_reason) == ([1, 2], "stop")
    assert generation.metrics.accepted >= 2
