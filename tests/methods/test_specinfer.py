"""Several draft models in one tree: exact laws, separate streams, every draw with its own row, top-k by brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace.certify.exact import Setting, certify_exact, tiny_context
from outpace.certify.letters import LETTERS, Letters
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import SeededChance
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import DETERMINISTIC, ROOT, TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.draft_model.specinfer import SpecInfer
from outpace.methods.registry import Context
from outpace.model import Model
from outpace.targets.bridged import BridgedTarget
from outpace.targets.table import Table, TableTarget, random_table
from outpace.vocabulary.shared import VocabularyMap
from weights_support import with_drafts

FEW = [
    Setting("temperature 1", 3, 3, (0, 1, 2, 0, 1), "alone", 1),
    Setting("top-p 0.8", 3, 3, (1, 1, 0), "beside autoregressive decoding", 2),
    Setting("penalties", 3, 2, (0, 1, 2, 0, 1), "alone", 3),
    Setting("greedy, penalties", 4, 3, (1, 1, 0), "alone", 4),
]
SAMPLED = SamplingParams(temperature=1.0)


def with_a_stranger(context: Context) -> Context:
    """A draft model of the target's vocabulary, and one of another."""
    size = context.target.vocab_size
    theirs = Letters(["b", "ba", "a", "x"])
    draft = TableTarget(len(theirs), random_table(len(theirs), 8, order=1))
    bridged = BridgedTarget(draft, VocabularyMap(Letters(LETTERS[:size]), theirs, size, len(theirs)), 256)
    return with_drafts(context.target, context.draft(), bridged)


@pytest.mark.parametrize("expansion", ["sampled", "top-k"])
@pytest.mark.parametrize("make_context", [lambda context: context, with_a_stranger])
def test_the_law_of_outputs_is_the_targets(expansion: str, make_context: Any) -> None:
    settings = {"branching": (1, 1) if expansion == "sampled" else (2, 1), "expansion": expansion}

    def make(context: Context) -> Method:
        return registry.build("specinfer", make_context(context), settings, "recursive-rejection")

    certificate = certify_exact("specinfer", make, FEW[1:3] if make_context is with_a_stranger else FEW[1:])
    assert certificate.lossless and certificate.p_value is None, certificate.verdict


def target(seed: int, vocab: int = 8) -> TableTarget:
    return TableTarget(vocab, random_table(vocab, seed))


def propose(drafter: SpecInfer, params: SamplingParams, depth: int, seed: int = 0) -> TokenTree:
    sequence = target(0).sequence([0, 1], params, chance=SeededChance(seed))
    state = drafter.begin(sequence)
    part = Budget(depth, 40, 4)
    tree = drafter.propose_batch([state], [Budget(depth, 80, 4, parts=(part, part))])[0]
    drafter.end(state)
    return tree


def test_equal_models_draw_from_streams_of_their_own() -> None:
    """Were the numbers shared, two equal models would draw one and the same tree, and the law would be off."""
    one = TableTarget(8, random_table(8, 1, sharpness=0.3))
    trees = [propose(SpecInfer([one, one], (2, 1), sampled=True), SAMPLED, 2, seed) for seed in range(12)]
    differ = 0
    for tree in trees:
        first = [draw.token for draw in tree.draws_at(ROOT)]
        assert len(first) == 4 and len(tree.draws) >= 6
        differ += first[:2] != first[2:]
    assert differ > 6


class OneStream(SpecInfer):
    """Planted: the draft models share their numbers."""

    def nest(self, purpose: str) -> None:
        self.purpose = purpose
        for part in self.parts:
            part.nest(purpose)


def test_shared_streams_would_be_caught() -> None:
    def make(context: Context) -> Method:
        method = registry.build("specinfer", context, {"branching": (1, 1)}, "recursive-rejection")
        drafts = [context.draft(), context.draft()]
        return Method("planted", OneStream(drafts, (1, 1), sampled=True), method.rule, Fixed(2, max_nodes=8))

    assert certify_exact("planted", make, FEW[:1]).lossless is False


def test_every_draw_has_the_row_of_its_own_model() -> None:
    tables: list[Table] = [random_table(8, 1), random_table(8, 2)]
    drafter = SpecInfer([TableTarget(8, table) for table in tables], (2, 2), sampled=True)
    tree = propose(drafter, SAMPLED, 2)
    for draw in tree.draws:
        path = [] if draw.parent == ROOT else tree.path_tokens(draw.parent)
        found = tree.q_rows[draw.q_row].dense(8)
        assert any(torch.allclose(found, table((0, 1, *path)).softmax(-1)) for table in tables)
    for number, draw in enumerate(tree.draws_at(ROOT)):
        row = tables[number // 2]((0, 1)).softmax(-1)
        assert torch.allclose(tree.q_rows[draw.q_row].dense(8), row)
    assert len({draw.q_row for draw in tree.draws_at(ROOT)}) == 2


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams()])
def test_top_k_expansion_by_brute_force(params: SamplingParams) -> None:
    tables = [random_table(8, 1), random_table(8, 2)]
    drafter = SpecInfer([TableTarget(8, table) for table in tables], (3, 2), sampled=False)
    tree = propose(drafter, params, 2)
    expected: set[tuple[int, ...]] = set()
    for table in tables:
        for first in table((0, 1)).topk(3).indices.tolist():
            expected.add((first,))
            expected.update((first, second) for second in table((0, 1, first)).topk(2).indices.tolist())
    assert {tuple(tree.path_tokens(node)) for node in range(len(tree))} == expected
    assert all(draw.q_row == DETERMINISTIC for draw in tree.draws)


def decoded(one: TableTarget, method: Method, params: SamplingParams) -> list[Generation]:
    decoder = Decoder(one)
    running = [decoder.submit(Request((seed, 1), method, params, max_new_tokens=40)) for seed in range(4)]
    decoder.run()
    return running


@pytest.mark.parametrize("expansion", ["sampled", "top-k"])
def test_two_models_right_in_different_places_draft_better_than_either(expansion: str) -> None:
    truth, wrong = random_table(8, 0), random_table(8, 77)
    halves: list[Table] = [
        lambda path: truth(path) if path[-1] % 2 else wrong(path),
        lambda path: wrong(path) if path[-1] % 2 else truth(path),
    ]
    one, drafts = TableTarget(8, truth), [TableTarget(8, half) for half in halves]

    def accepted(chosen: list[TableTarget]) -> float:
        context = with_drafts(one, *chosen)
        method = registry.build("specinfer", context, {"branching": (1, 1, 1), "expansion": expansion})
        found = decoded(one, method, SamplingParams())
        assert [generation.tokens for generation in found] == plain
        return sum(generation.metrics.accepted for generation in found) / sum(
            generation.metrics.rounds for generation in found
        )

    plain = [
        generation.tokens for generation in decoded(one, registry.build("none", tiny_context(3, 0)), SamplingParams())
    ]
    assert accepted(drafts) > 1.2 * max(accepted(drafts[:1]), accepted(drafts[1:]))


def test_kv_stay_in_step_and_requests_leave_nothing() -> None:
    one, drafts = target(0), [target(1), target(2)]
    context = with_drafts(one, *drafts)
    method = registry.build("specinfer", context, {"branching": (2, 1)})
    drafter = method.drafter
    assert isinstance(drafter, SpecInfer)
    decoder = Decoder(one)
    running = [decoder.submit(Request((seed,), method, SAMPLED, max_new_tokens=20)) for seed in range(3)]
    while decoder.step():
        for generation in running:
            for state in generation.draft_state.parts:
                if generation.finish_reason is None:
                    kv = state.draft_sequence.kv
                    assert kv == generation.sequence.tokens[: len(kv)] and len(kv) < len(generation.sequence.tokens)


def test_models_of_several_vocabularies_by_name() -> None:
    def model(words: Letters, seed: int) -> Model:
        return Model("toy", TableTarget(len(words), random_table(len(words), seed)), words, frozenset())

    ours = model(Letters(LETTERS), 0)
    both = {"one": model(Letters(LETTERS), 1), "two": model(Letters(["b", "a", "x"]), 2)}
    method = ours.method("specinfer", draft_model=both)
    kinds = [type(part.draft) for part in method.drafter.parts]  # type: ignore[attr-defined]
    assert kinds == [TableTarget, BridgedTarget]
    with pytest.raises(BadInput, match="--draft-model"):
        ours.method("specinfer")
    with pytest.raises(BadInput, match="room"):
        ours.method("specinfer", {"branching": (4,), "max_nodes": 3}, draft_model=ours)
