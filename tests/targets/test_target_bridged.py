"""A draft model over another vocabulary: against the draft model run on the translation, and the target suite."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.certify.exact import Setting, certify_exact, matrix
from outpace.certify.letters import Letters
from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.method import Method
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.targets.base import Target
from outpace.targets.bridged import BridgedTarget
from outpace.targets.hf import HFTarget
from outpace.targets.sub_graph import SubGraph
from outpace.targets.table import TableTarget, random_table
from outpace.vocabulary.shared import VocabularyMap
from target_suite import VOCAB, TreeScoring, near, tiny_model
from weights_support import with_drafts

OURS = Letters(["a", "b", "ab", "c", "ba", "é".encode()[:1], "é".encode()[1:], None, "zz"])
THEIRS = Letters(["b", "c", "a", "bc", "aba", "é", "é".encode()[:1], "é".encode()[1:]])


def bridge(draft: Target | None = None, ours: Letters = OURS, theirs: Letters = THEIRS) -> BridgedTarget:
    draft = draft or TableTarget(len(theirs), random_table(len(theirs), 3))
    return BridgedTarget(draft, VocabularyMap(ours, theirs, len(ours), draft.vocab_size), 256)


# ------------------------------------------------------------------------------------------------- same, permuted


class Numbers(Letters):
    """Tokens that are numbers in another order: the whole vocabulary is shared."""

    def __init__(self, order: list[int]) -> None:
        super().__init__([f"{number} " for number in order])


ORDER = random.Random(0).sample(range(VOCAB), VOCAB)


class Permuted:
    """A model whose token ``i`` is token ``ORDER[i]`` of another: the suite's reference for what the bridge says."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any:
        out = self.model(input_ids=torch.tensor(ORDER)[input_ids], **kwargs)
        out.logits = out.logits[..., ORDER]
        return out


class TestScoring(TreeScoring):
    architectures = ("llama", "gemma3", "gpt2")

    @staticmethod
    def build(model: Any) -> BridgedTarget:
        words = VocabularyMap(Numbers(ORDER), Numbers(list(range(VOCAB))), VOCAB, VOCAB)
        return BridgedTarget(HFTarget(model), words, 256)

    def test_long_prompts_prefill_in_chunks(self, case: tuple[Any, Target]) -> None:
        target = case[1]
        target.prefill_chunk = target.draft.prefill_chunk = 16  # type: ignore[attr-defined]
        super().test_long_prompts_prefill_in_chunks(case)

    @pytest.fixture
    def case(self, architecture: str) -> tuple[Any, Target]:
        model = tiny_model(architecture)
        return Permuted(copy.deepcopy(model)), self.build(model)

    def test_taps_are_the_residual_stream(self, case: tuple[Any, Target]) -> None:
        _, target = case
        sequence = target.sequence([1, 2, 3])
        with pytest.raises(BadInput, match="hidden states"):
            target.prefill([sequence], (1,))
        target.prefill([sequence])
        scores = target.score([(sequence, TokenTree.chain([4, 5]))], aux_hidden_state_layers=(target.num_layers,))
        near(target.lm_head(scores[0].hidden_states[target.num_layers]), scores[0].logits)


# ----------------------------------------------------------------------------------------- truly other vocabularies


def expected(target: BridgedTarget, tokens: list[int]) -> Tensor:
    """The draft table's logits after the translation, on the target's ids: written a second time, one by one."""
    draft, words = target.draft, target.vocabulary
    assert isinstance(draft, TableTarget)
    ids = (*([] if words.pieces(tokens[0]) else [words.filler]), *words.translate(tokens))
    row, out = draft.table(ids), torch.full((len(OURS),), -torch.inf)
    for ours, name in enumerate(OURS.pieces):
        if name is not None and name in THEIRS.pieces:
            out[ours] = row[THEIRS.pieces.index(name)]
    return out


@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_the_draft_models_after_the_translation(seed: int) -> None:
    rng, target = random.Random(seed), bridge()
    sequences = [target.sequence([rng.randrange(len(OURS)) for _ in range(count)]) for count in (1, 2, 9)]
    target.prefill(sequences[1:])
    for round_ in range(5):
        trees = []
        for _ in sequences:
            tree = TokenTree()
            for _ in range(rng.randrange(7)):
                tree.add(rng.randrange(-1, len(tree)), rng.randrange(len(OURS)))
            trees.append(tree)
        pairs = list(zip(sequences, trees, strict=True))
        scores = target.score(pairs)
        for tree in trees[round_ % 2 :]:  # grown after a pass, one level at a time
            tree.add(rng.randrange(-1, len(tree)), rng.randrange(len(OURS)))
        scores = target.score(pairs, resume=scores)
        paths = []
        for part in scores.parts:
            for node in (ROOT, *range(len(part.tree))):
                near(part.logits[node + 1], expected(target, part.sequence.tokens + part.tree.path_tokens(node)))
            paths.append(part.tree.path(rng.choice([ROOT, *range(len(part.tree))])))
        target.commit(scores, paths)
        for sequence, tree, path in zip(sequences, trees, paths, strict=True):
            sequence.tokens += [*(tree.tokens[node] for node in path), rng.randrange(len(OURS))]
            assert target.length(sequence.kv) == len(sequence.tokens) - 1
            assert sequence.kv.inner.sequence.kv == sequence.kv.ids  # nothing is run twice, nothing left behind


def test_forks_go_their_own_ways() -> None:
    target = bridge()
    first = target.sequence([0, 2, 4, 7, 3])
    target.prefill([first])
    for length in range(5):
        second = target.sequence([*first.tokens[:length], 7, 1], kv=target.fork(first.kv, length))
        target.prefill([second])
        scores = target.score([(first, TokenTree()), (second, TokenTree.chain([4]))])
        near(scores[0].logits[0], expected(target, first.tokens))
        near(scores[1].logits[1], expected(target, [*second.tokens, 4]))


def test_a_text_longer_than_the_draft_models_context_goes_on_in_a_window() -> None:
    table = random_table(len(THEIRS), 5)
    target = bridge(TableTarget(len(THEIRS), table, context_length=16))
    sequence = target.sequence([0, 1])
    target.prefill([sequence])
    starts = set()
    for step in range(60):
        tree = TokenTree.chain([2, 0])
        scores = target.score([(sequence, tree)])
        near(scores[0].logits[2], expected(target, [*sequence.tokens, 2, 0]))
        inner = sequence.kv.inner.sequence
        assert len(inner.tokens) + 2 + 1 <= 16
        again = target.sequence(sequence.tokens)  # a function of the committed tokens alone
        target.prefill([again])
        target.score([(again, tree)])
        assert again.kv.inner.start == sequence.kv.inner.start and again.kv.inner.sequence.tokens == inner.tokens
        starts.add(sequence.kv.inner.start)
        target.commit(scores, [[0] if step % 3 else []])
        sequence.tokens += [2, 1] if step % 3 else [4]
    assert len(starts) > 5
    with pytest.raises(BadInput, match="draft fewer"):
        target.score([(sequence, TokenTree.chain([0] * 30))])


def test_what_speaks_of_the_targets_rows_is_refused() -> None:
    target = bridge()
    sequence = target.sequence([0, 1, 2])
    target.prefill([sequence])
    tree = TokenTree()
    tree.auxiliary_tokens = [AuxiliaryToken(1, 2)]
    with pytest.raises(BadInput, match="auxiliary tokens"):
        target.score([(sequence, tree)])
    with pytest.raises(BadInput, match="K/V"):
        target.score([(sequence, TokenTree())], graph=SubGraph(kv={0: torch.tensor([0])}))
    scores = target.score([(sequence, TokenTree.chain([0]))])
    with pytest.raises(ValueError, match="path"):
        target.commit(scores, [[0, 0]])
    target.commit(scores, [[0]])
    with pytest.raises(ValueError, match="stale"):
        target.commit(scores, [[0]])


def test_embeddings_are_those_of_the_draft_models_tokens() -> None:
    model = tiny_model("llama")
    target = TestScoring.build(model)
    near(target.embed(torch.tensor([5, 9])), model.get_input_embeddings()(torch.tensor([ORDER[5], ORDER[9]])))


# ---------------------------------------------------------------------------------------- as a draft model, exactly

TOY = {3: ["a", "b", "ab"], 4: ["a", "b", "ab", "c"], 5: ["a", "b", "ab", "c", "ba"]}


def bridged_context(context: Context) -> Context:
    size = context.target.vocab_size
    theirs = Letters(["b", "ba", "bb", "a"])
    draft = TableTarget(len(theirs), random_table(len(theirs), 8, order=1, sharpness=1.2))
    words = VocabularyMap(Letters(TOY[size]), theirs, size, len(theirs))
    return with_drafts(context.target, BridgedTarget(draft, words, 256))


def cells() -> list[Setting]:
    found = [one for one in matrix(3) if one.vocab_size == 3]
    return found[::2]


@pytest.mark.parametrize("name", ["draft-model", "rsd", "sampled-tree"])
def test_methods_with_a_draft_model_of_another_vocabulary_are_exact(name: str) -> None:
    tiny = {"draft-model": {"length": 2}}.get(name, {"branching": (2, 1)})
    rule = {"draft-model": "rejection"}.get(name, "recursive-rejection")

    def make(context: Context) -> Method:
        return build(name, bridged_context(context), tiny, rule)

    certificate = certify_exact(name, make, cells()[: {"draft-model": 10}.get(name, 1)])
    assert certificate.lossless, certificate.verdict
    assert certificate.p_value is None


def test_the_intersection_is_what_is_drafted_from() -> None:
    context = bridged_context(Context(TableTarget(5)))
    target = context.draft()
    sequence = target.sequence([0, 1, 2], SamplingParams(temperature=1.0))
    target.prefill([sequence])
    p = target.score([(sequence, TokenTree())])[0].p(ROOT)
    assert p.nonzero().flatten().tolist() == [0, 1, 4]  # "a", "b", "ba"
    inner = sequence.kv.inner.sequence
    row = target.draft.table(tuple(inner.tokens))[[3, 0, 1]].softmax(-1)  # type: ignore[attr-defined]
    near(p[[0, 1, 4]], row)


# ------------------------------------------------------------------------------------------------------ in a Model


def model(name: str, words: Letters, seed: int = 0) -> Model:
    return Model(name, TableTarget(len(words), random_table(len(words), seed)), words, frozenset())


def test_a_model_bridges_a_draft_model_of_another_vocabulary() -> None:
    ours, same = model("ours", OURS), model("same", OURS, 1)
    other, foreign = model("other", THEIRS), model("foreign", Letters(["x", "y"]))
    plain = ours.method("draft-model", draft_model=same)
    assert plain.drafter.draft is same.target  # type: ignore[attr-defined]
    bridged = ours.method("draft-model", draft_model=[other, same]).drafter.draft  # type: ignore[attr-defined]
    assert isinstance(bridged, BridgedTarget) and bridged.draft is other.target
    with pytest.raises(BadInput, match="'foreign' shares 0 of the 9 tokens"):
        ours.method("draft-model", draft_model=foreign)
    with pytest.raises(BadInput, match="--draft-model"):
        ours.method("draft-model")


def test_an_intersection_too_small_to_be_of_use_is_refused_with_its_size() -> None:
    many = Letters(["a", *(f"{number}!" for number in range(500))])
    with pytest.raises(BadInput, match=r"shares 1 of the 501 tokens.*slem"):
        model("many", many).method("draft-model", draft_model=model("few", Letters(["a", "b"])))
