"""Draft models of another vocabulary: exact distributions of all algorithms, and a really trained tokenizer."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outpace.certify.exact import Setting, certify_exact, matrix, tiny_context
from outpace.certify.letters import LETTERS, Letters
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.text_drafter import TextBuilder, TextDrafter, TextDraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings
from outpace.methods.registry import Context
from outpace.model import Model
from outpace.models.tokenizers import HFTokenizer
from outpace.prompts.questions import load_prompts
from outpace.targets.bridged import StringTarget
from outpace.targets.hf import HFTarget
from outpace.targets.table import Table, TableTarget, random_table
from outpace.vocabulary import text_translation as text_module
from outpace.vocabulary.shared import VocabularyMap
from outpace.vocabulary.strings import StringSum
from support import Path

ALGORITHMS = ["tli", "slem", "slrs"]

# --------------------------------------------------------------------------------------------------- exact laws


def with_letters(context: Context, theirs: Seq[str | None], seed: int) -> Context:
    """The toy context with a draft model of other letters."""
    size = context.target.vocab_size
    draft = TableTarget(len(theirs), random_table(len(theirs), seed, order=2, sharpness=1.2))
    model = Model("toy", draft, Letters(theirs), frozenset())
    named = Binding("toy", DRAFT_MODEL, context.draft, choice=lambda: model)
    return Context(context.target, Bindings([named]), tokenizer=Letters(LETTERS[:size]))


OTHERS: dict[str, list[str | None]] = {
    "single letters": ["c", "b", "a"],
    "longer ones": ["aba", "b", "a", "bb"],
    "with a special token and a stranger": [None, "a", "x", "b"],
}


def cells(count: int) -> list[Setting]:
    found = [cell for cell in matrix(5) if (cell.vocab_size, cell.length) in ((3, 3), (5, 2))]
    return found[:: len(found) // count]


@pytest.mark.parametrize("theirs", OTHERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_law_of_outputs_is_the_targets(algorithm: str, theirs: str) -> None:
    def make(context: Context) -> Method:
        return registry.build(
            "hetvocab", with_letters(context, OTHERS[theirs], 4), {"algorithm": algorithm, "num_draft_tokens": 2}
        )

    certificate = certify_exact("hetvocab", make, cells({"slem": 4, "tli": 2, "slrs": 1}[algorithm]))
    assert certificate.lossless and certificate.p_value is None, certificate.verdict


# ------------------------------------------------------------------------------------------ the probability of strings


def by_enumeration(table: Any, ours: Letters, theirs: Letters, context: Path, length: int) -> Tensor:
    """The law of the longest of our tokens that the draft model's string begins with, over all of ``length`` tokens."""
    spoken = [token for token, piece in enumerate(theirs.pieces) if piece]
    found: dict[int, float] = defaultdict(float)

    def walk(path: Path, text: bytes, p: float, left: int) -> None:
        if left == 0:
            fits = [token for token, piece in enumerate(ours.pieces) if piece and text.startswith(piece)]
            if fits:
                found[max(fits, key=lambda token: len(ours.pieces[token] or b""))] += p
            return
        row = table((*context, *path))[spoken].double().softmax(-1)
        for token, q in zip(spoken, row.tolist(), strict=True):
            walk((*path, token), text + (theirs.pieces[token] or b""), p * q, left - 1)

    walk((), b"", 1.0, length)
    return torch.tensor([found[token] for token in range(len(ours))])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("theirs", OTHERS)
def test_the_sum_over_strings_is_the_sum_by_enumeration(theirs: str, seed: int) -> None:
    ours, other = Letters(["ab", "a", "b", "aba", None, "bba"]), Letters(OTHERS[theirs])
    table = random_table(len(other), seed)
    draft = TableTarget(len(other), table)
    strings = StringSum(ours, other, len(ours), len(other), 100)
    target = StringTarget(draft, VocabularyMap(ours, other, len(ours), len(other)), strings, 99)
    sequence = target.sequence([1, 2, 0])
    target.prefill([sequence])
    tree = TokenTree.chain([3])
    tree.add(ROOT, 2)
    scores = target.score([(sequence, tree)])
    for node in (ROOT, 0, 1):
        read = tuple(target.vocabulary.translate([*sequence.tokens, *tree.path_tokens(node)]))
        expected = by_enumeration(table, ours, other, read, 3)
        torch.testing.assert_close(scores[0].logits[node + 1].exp(), expected.float(), atol=1e-6, rtol=1e-5)


def test_a_sum_of_too_many_terms_is_refused_with_its_bound() -> None:
    ours, theirs = Letters([*"abcd", "abcdabcd", "dcba"]), Letters([*"abcd", "ab", "cd"])
    terms = 1 + len(StringSum(ours, theirs, 6, 6, 1000).contexts)
    assert terms > 10
    StringSum(ours, theirs, 6, 6, terms)
    with pytest.raises(BadInput, match=f"more than {terms - 1} sequences"):
        StringSum(ours, theirs, 6, 6, terms - 1)
    with pytest.raises(BadInput, match="more than 1 sequences"):
        registry.build("hetvocab", tiny_context(5, 0), {"algorithm": "slrs", "terms": 1})


def test_what_cannot_draft_is_refused() -> None:
    with pytest.raises(BadInput, match="--draft-model"):
        registry.build("hetvocab", Context(TableTarget(3)))
    with pytest.raises(BadInput, match="share no token; use algorithm=slem"):
        registry.build("hetvocab", with_letters(tiny_context(3, 0), ["x", "y"], 0))


# ------------------------------------------------------------------------------------------- really trained tokenizers

TEXT = " ".join(prompt.turns[0] for prompt in load_prompts(None))[:1500]


def bpe(size: int, text: str) -> HFTokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([text], trainer)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>"))


def trained(name: str, words: HFTokenizer, steps: int, seed: int) -> Model:
    """A tiny Llama that has learned the text by heart, more or less."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # too small to share
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.tensor(words.encode(TEXT))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 33, (8,))
        batch = torch.stack([ids[start : start + 32] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return Model(name, HFTarget(model.eval()), words, frozenset({words.inner.eos_token_id}))


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    """The target with 500 tokens, and a draft model with 400 others, its tokenizer trained on other text."""
    return trained("target", bpe(500, TEXT), 240, 0), trained("draft", bpe(400, TEXT[700:] + TEXT[::-1]), 240, 1)


def prompts(model: Model, count: int) -> list[list[int]]:
    rng = random.Random(1)
    ids = model.tokenizer.encode(TEXT)
    return [ids[at : at + rng.randrange(3, 40)] for at in (rng.randrange(len(ids) - 60) for _ in range(count))]


def decoded(model: Model, method: Method, params: SamplingParams, tokens: int = 30, count: int = 5) -> list[Generation]:
    decoder = Decoder(model.target, model.tokenizer)
    running = [
        decoder.submit(Request(tuple(prompt), method, params, max_new_tokens=tokens))
        for prompt in prompts(model, count)
    ]
    decoder.run()
    return running


def methods(model: Model, draft: Model) -> dict[str, Method]:
    names: dict[str, tuple[str, dict[str, Any]]] = {
        "tli": ("hetvocab", {}),
        "slem": ("hetvocab", {"algorithm": "slem"}),
        "draft-model": ("draft-model", {"topk": 3}),
        "rsd": ("rsd", {}),
        "sampled-tree": ("sampled-tree", {}),
    }
    return {
        label: model.method(name, settings, draft_model=draft, rule="recursive-rejection" if name == "rsd" else None)
        for label, (name, settings) in names.items()
    }


def test_the_tokenizers_are_really_different(pair: tuple[Model, Model]) -> None:
    target, draft = pair
    words = VocabularyMap(target.tokenizer, draft.tokenizer, 500, 400)
    assert 256 < len(words) < 390
    assert target.tokenizer.encode(TEXT[:200]) != draft.tokenizer.encode(TEXT[:200])


def test_greedy_answers_are_the_targets_whatever_drafts(pair: tuple[Model, Model]) -> None:
    target, draft = pair
    plain = [one.tokens for one in decoded(target, target.method("none"), SamplingParams())]
    for label, method in methods(target, draft).items():
        found = decoded(target, method, SamplingParams())
        assert [one.tokens for one in found] == plain, label
        accepted, rounds = (sum(getattr(one.metrics, name) for one in found) for name in ("accepted", "rounds"))
        assert accepted > 0.15 * rounds, (label, accepted, rounds)


def test_the_embedded_model_says_the_same_with_a_draft_model_of_another_tokenizer(smollm2_float32: Model) -> None:
    text = " ".join(prompt.turns[0] for prompt in load_prompts(None))
    draft = trained("draft", bpe(2500, text), 0, 0)
    request = tuple(smollm2_float32.tokenizer.encode("Count: one, two, three, four,"))
    answers = []
    for name, settings in (("none", {}), ("draft-model", {}), ("hetvocab", {"algorithm": "slem"})):
        decoder = Decoder(smollm2_float32.target, smollm2_float32.tokenizer)
        method = smollm2_float32.method(name, settings, draft_model=draft)
        answers.append(decoder.submit(Request(request, method, SamplingParams(), max_new_tokens=10)))
        decoder.run()
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens
    assert all(one.metrics.drafted > 0 for one in answers[1:])


def test_sampled_answers_are_drafted_too_and_are_the_seeds(pair: tuple[Model, Model]) -> None:
    target, draft = pair
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    for label, method in methods(target, draft).items():
        found = decoded(target, method, params)
        assert sum(one.metrics.accepted for one in found) > 10, label
        # A request's answer is its own, whoever is beside it.
        alone = decoded(target, methods(target, draft)[label], params, count=1)
        assert alone[0].tokens == found[0].tokens, label


def test_reading_again_runs_nothing_twice(pair: tuple[Model, Model]) -> None:
    """The draft model's K/V follows the text: what was accepted as drafted is not run again."""
    target, draft = pair
    method = target.method("hetvocab", {"algorithm": "slem"}, draft_model=draft)
    drafter = method.drafter
    assert isinstance(drafter, TextDrafter)
    decoder = Decoder(target.target, target.tokenizer)
    one = decoder.submit(Request(tuple(prompts(target, 1)[0]), method, SamplingParams(), max_new_tokens=60))
    lags = []
    while decoder.step():
        state = one.draft_state
        assert isinstance(state, TextDraftState)
        inner = state.follower.place(state.reading.ids, 1)
        # Its K/V are those of the text as it reads it now: the next logits are a fresh sequence's.
        if one.finish_reason is None and state.follower.run < len(inner.tokens):
            fresh = draft.target.sequence(inner.tokens)
            draft.target.prefill([fresh])
            logits = draft.target.score([(inner, TokenTree.chain(inner.tokens[state.follower.run + 1 :]))])[0].logits[
                -1
            ]
            torch.testing.assert_close(
                logits, draft.target.score([(fresh, TokenTree())])[0].logits[-1], atol=1e-4, rtol=1e-4
            )
        lags.append(len(inner.tokens) - state.follower.run)
    assert sum(lags) < 3.5 * len(lags)


def test_looking_back_makes_drafts_that_are_accepted(
    pair: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposals from the middle of a word: with the look-back they are the target's own tokens, without it not."""
    target, _ = pair
    ids = target.tokenizer.encode(TEXT)
    draft = trained("same text, single bytes", bpe(257, "x"), 0, 0)

    def hits() -> int:
        drafter = TextDrafter(draft.target, draft.tokenizer, target.tokenizer, 40)
        found = 0
        for at in range(20, len(ids) - 20):
            sequence = target.target.sequence(ids[:at])
            state = drafter.begin(sequence)
            drafted = TextBuilder(sequence, Budget(6), draft.tokenizer)
            drafted.text = b"".join(target.tokenizer.token_bytes(token) or b"" for token in ids[at : at + 6])
            found += drafter._tree(state, drafted, 4).tokens == ids[at : at + 4]
            drafter.end(state)
        return found

    with_it = hits()
    monkeypatch.setattr(text_module, "LOOK_BACK", 0)
    assert hits() < with_it == len(ids) - 40


def test_the_end_is_drafted_where_both_have_it() -> None:
    ours, theirs = Letters(["a", "b", None]), Letters([None, "b", "a"])
    ours.token_text = theirs.token_text = lambda token: "<end>"  # type: ignore[method-assign]
    draft = TableTarget(3, lambda path: torch.tensor([2.0 * (path[-1] == 1), 1.0, 0.0]))
    drafter = TextDrafter(draft, theirs, ours, 4)
    sequence = TableTarget(3).sequence([0])
    assert drafter.propose_batch([drafter.begin(sequence)], [Budget(4)])[0].tokens == [1, 2]


def test_a_confident_draft_goes_on_and_another_stops() -> None:
    ours, theirs = Letters(["a", "b"]), Letters(["b", "a"])
    draft = TableTarget(2, lambda path: torch.tensor([3.0, 0.0]) if len(path) < 3 else torch.tensor([0.1, 0.0]))
    drafter, sequence = TextDrafter(draft, theirs, ours, 8), TableTarget(2).sequence([0])
    state = drafter.begin(sequence)
    assert drafter.propose_batch([state], [Budget(8, confidence=0.9)])[0].tokens == [1, 1]
    assert len(drafter.propose_batch([state], [Budget(8)])[0]) == 8
    assert len(drafter.propose_batch([state], [Budget(0)])[0]) == 0


def constant(row: Tensor) -> Table:
    return lambda path: row


def test_a_character_that_the_target_has_begun_is_finished_or_nothing_is_drafted() -> None:
    ours, theirs = Letters([b"\xc3", b"\xa9", b"\xa0", "a"]), Letters(["é", "a", "à"])
    for favourite, expected in ((0, [1]), (2, [2]), (1, [])):
        draft = TableTarget(3, constant(torch.eye(3)[favourite]))
        drafter, sequence = TextDrafter(draft, theirs, ours, 1), TableTarget(4).sequence([3, 0])
        assert drafter.propose_batch([drafter.begin(sequence)], [Budget(3)])[0].tokens == expected
