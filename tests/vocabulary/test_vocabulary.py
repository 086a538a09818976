"""Token bytes of real kinds of tokenizers, the map between two of them, and texts from one to the other."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from outpace.certify.letters import Letters
from outpace.models.tokenizers import HFTokenizer
from outpace.prompts.questions import load_prompts
from outpace.vocabulary.shared import Speller, VocabularyMap, exact, vocabulary_map
from outpace.vocabulary.text_translation import LOOK_BACK, Reader, Reading, cut, whole_characters, written

SMALL = settings(max_examples=150, deadline=None)
TEXT = " ".join(prompt.turns[0] for prompt in load_prompts(None))[:20_000]
ODD = [
    "Hello, wörld!",
    " 你好 🙂 def f(x):\n\treturn x  # 123\n",
    "",
    " ",
    "  \n\n x",
    "naïve e\u0301",
    "<|im_end|>",
    "isn't",
]


def bytes_bpe(size: int, text: str = TEXT, specials: Seq[str] = ("<|end|>",)) -> HFTokenizer:
    """A byte-level BPE as GPT-2's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([text], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=specials[0])
    made.add_tokens(["    "])  # an added token that is no special one
    return HFTokenizer(made)


def pieces_bpe(size: int, text: str = TEXT) -> HFTokenizer:
    """A BPE as SentencePiece's: spaces are characters, a text begins with one, unknown characters fall to bytes."""
    spoken = text.replace(" ", "▁")
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials[:3], show_progress=False)
    words = ["▁" + word for word in spoken.split("▁")]
    inner.train_from_iterator(words, trainer)
    state = json.loads(inner.to_str())
    vocab = state["model"]["vocab"]
    for name in specials[3:]:
        vocab[name] = len(vocab)
    inner = Tokenizer.from_str(json.dumps(state))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, **names))


@pytest.fixture(scope="module")
def ours() -> HFTokenizer:
    return bytes_bpe(700)


@pytest.fixture(scope="module")
def others() -> list[HFTokenizer]:
    return [bytes_bpe(400, TEXT[::-1]), pieces_bpe(500), bytes_bpe(900, specials=("<|stop|>", "<|end|>"))]


def joined(tokenizer: Any, ids: Seq[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) or b"" for token in ids)


# ---------------------------------------------------------------------------------------------------- token bytes


@pytest.mark.parametrize("text", [*ODD, TEXT[:500]])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: str, ours: HFTokenizer, others: list[HFTokenizer]) -> None:
    for tokenizer in (ours, *others):
        ids = tokenizer.encode(text)
        assert joined(tokenizer, ids) in (text.encode(), b" " + text.encode())  # SentencePiece's begins with a space
        assert joined(tokenizer, exact(tokenizer)(text.encode())) == text.encode()


def test_special_tokens_have_no_bytes_and_added_ones_are_themselves(ours: HFTokenizer) -> None:
    assert ours.token_bytes(ours.inner.eos_token_id) is None
    assert ours.token_bytes(ours.inner.convert_tokens_to_ids("    ")) == b"    "
    assert ours.token_bytes(-1) is None and ours.token_bytes(len(ours)) is None


@given(st.binary(max_size=40))
@SMALL
def test_any_bytes_can_be_spelled_where_every_byte_is_a_token(ours_bytes: bytes) -> None:
    tokenizer = Letters([bytes([value]) for value in range(256)] + ["the", " th", "é"])
    assert joined(tokenizer, exact(tokenizer)(ours_bytes)) == ours_bytes
    few = Letters(["a", "ab", "bc"])
    spelled = joined(few, Speller(few)(ours_bytes))
    assert len(spelled) <= len(ours_bytes)  # what it cannot write is left out


# -------------------------------------------------------------------------------------------------------- the map


def test_the_map_pairs_equal_bytes_and_special_tokens_by_name(ours: HFTokenizer, others: list[HFTokenizer]) -> None:
    for other in others:
        words = VocabularyMap(ours, other, len(ours), len(other))
        expected = {}
        for token in range(len(ours)):
            name = ours.token_bytes(token)
            for theirs in range(len(other)):
                if name is not None and other.token_bytes(theirs) == name:
                    expected[token] = theirs
                    break
        shared = {one: two for one, two in words.shared.items() if ours.token_bytes(one) is not None}
        assert shared == expected and len(shared) > 100
        assert dict(zip(words.target_ids.tolist(), words.draft_ids.tolist(), strict=True)) == words.shared
    assert ours.inner.eos_token_id in VocabularyMap(ours, others[2], len(ours), len(others[2])).shared
    assert ours.inner.eos_token_id not in VocabularyMap(ours, others[1], len(ours), len(others[1])).shared


def test_ids_that_a_model_does_not_score_are_left_out(ours: HFTokenizer, others: list[HFTokenizer]) -> None:
    words = VocabularyMap(ours, others[0], 300, 200)
    assert int(words.target_ids.max()) < 300 and int(words.draft_ids.max()) < 200
    assert vocabulary_map(ours, others[0], 300, 200) is vocabulary_map(ours, others[0], 300, 200)


def test_every_token_is_translated_by_its_text_alone(ours: HFTokenizer, others: list[HFTokenizer]) -> None:
    ids = ours.encode(TEXT[:3000] + ODD[1])
    for other in others:
        words = VocabularyMap(ours, other, len(ours), len(other))
        for token in range(len(ours)):
            assert joined(other, words.pieces(token)) == (ours.token_bytes(token) or b"")
        assert joined(other, words.translate(ids)) == joined(ours, ids)
        at = len(ids) // 3
        assert words.translate(ids) == words.translate(ids[:at]) + words.translate(ids[at:])


# ----------------------------------------------------------------------------------------------------------- text


@given(st.text(alphabet="ab é🙂\n ", max_size=30), st.data())
@SMALL
@example("🙂", None)
def test_cutting_keeps_the_text_and_its_pieces_do_not_depend_on_what_follows(text: str, data: Any) -> None:
    raw = text.encode()
    assert b"".join(cut(raw)) == raw
    for stop in range(len(raw) + 1):
        assert cut(raw)[: len(cut(raw[:stop])) - 1] == cut(raw[:stop])[:-1]
        whole = whole_characters(raw[:stop])
        assert raw[:whole].decode() == raw[:stop].decode(errors="ignore")


def test_a_text_without_borders_is_cut_all_the_same() -> None:
    pieces = cut("é".encode() * 1000)
    assert len(pieces) > 5 and all(piece.decode() for piece in pieces)


@pytest.mark.parametrize("seed", range(4))
def test_reading_is_a_function_of_the_tokens_whatever_the_rounds(
    seed: int, ours: HFTokenizer, others: list[HFTokenizer]
) -> None:
    rng = random.Random(seed)
    tokens = ours.encode(TEXT[seed * 500 : seed * 500 + 900] + ODD[1])
    tokens[50:50] = [ours.inner.eos_token_id]
    tokens += [rng.randrange(len(ours)) for _ in range(40)]
    for other in others:
        reader = Reader(other)
        at_once, bit_by_bit = Reading(ours, reader), Reading(ours, reader)
        at_once.extend(tokens)
        at = 0
        while at < len(tokens):
            step = rng.randrange(1, 9)
            bit_by_bit.extend(tokens[at : at + step])
            at += step
        assert bit_by_bit.ids == at_once.ids and bit_by_bit.held == at_once.held and bit_by_bit.read == len(tokens)
        assert at_once.ids[: len(reader.start)] == list(reader.start)


def test_reading_is_what_the_tokenizer_would_say(ours: HFTokenizer, others: list[HFTokenizer]) -> None:
    for other in others:
        reading = Reading(ours, Reader(other))
        reading.extend(ours.encode(TEXT[:4000]))
        natural = other.encode(TEXT[:4000])
        # SentencePiece would begin with a space; after the first word nothing differs.
        assert reading.ids[-len(natural) + 5 :] == natural[5:]


def test_special_tokens_are_read_by_name_or_not_at_all(ours: HFTokenizer, others: list[HFTokenizer]) -> None:
    end = ours.inner.eos_token_id
    tokens = [*ours.encode("one"), end, *ours.encode(" two")]
    known, unknown = others[2], others[0]
    reading = Reading(ours, Reader(known))
    reading.extend(tokens)
    stop = known.inner.convert_tokens_to_ids("<|end|>")
    assert reading.ids == [*known.encode("one"), stop, *known.encode(" two")]
    assert unknown.inner.eos_token_id == end  # the same name in this one, too
    bare = Reading(ours, Reader(others[1]))
    bare.extend(tokens)
    assert joined(others[1], bare.ids) == b"one two"


def test_a_character_that_has_only_begun_is_held_back() -> None:
    ours = Letters([bytes([value]) for value in "é🙂a ".encode()])
    reading = Reading(ours, Reader(Letters(["é", "a", " ", "🙂"])))
    seen = []
    for token in ours.encode("aé 🙂"):
        reading.extend([token])
        seen.append((list(reading.ids), reading.held))
    assert seen[0] == ([1], b"") and seen[1] == ([1], "é".encode()[:1]) and seen[2] == ([1, 0], b"")
    assert seen[-1] == ([1, 0, 2, 3], b"") and seen[-2] == ([1, 0, 2], "🙂".encode()[:3])


# ---------------------------------------------------------------------------------------- text back into our tokens


@pytest.mark.parametrize("seed", range(30))
def test_what_was_written_follows_the_committed_tokens(seed: int, ours: HFTokenizer) -> None:
    rng = random.Random(seed)
    ids = ours.encode(TEXT)
    at = rng.randrange(20, len(ids) - 40)
    follows = ids[at : at + 12]
    found = written(ours, exact(ours), ids[:at], joined(ours, follows) + b" and")
    assert found[:12] == follows  # the target's own tokens, wherever the draft broke off


def test_a_word_goes_on_as_it_began() -> None:
    tokenizer = Letters(["a", "b", "c", "ab", "bc", " "])
    encode = exact(tokenizer)
    assert encode(b"abc") == [3, 2] and encode(b"bc") == [4]
    assert written(tokenizer, encode, [5, 3], b"c") == [2]
    # After "a" alone the next token begins inside the "ab" that the tokenizer would have written: read by itself.
    assert written(tokenizer, encode, [5, 0], b"bc") == [4]
    greedy = Letters(["x", "xx", "y", "xxy"])
    assert written(greedy, exact(greedy), [1], b"xxy") == [3]
    assert written(greedy, exact(greedy), [1, 1], b"") == []


def test_looking_back_decides_how_a_word_goes_on(ours: HFTokenizer) -> None:
    """Without the committed beginning of a word its rest is read otherwise, and drafted wrongly."""
    encode, ids = exact(ours), ours.encode(TEXT)
    wrong = 0
    for at in range(LOOK_BACK, min(len(ids) - 8, 3000)):
        rest = joined(ours, ids[at : at + 6])
        wrong += encode(rest)[:2] != ids[at : at + 2]
        assert written(ours, encode, ids[:at], rest)[:2] == ids[at : at + 2]
    assert wrong > 0


def test_look_back_ends_at_special_tokens_and_inside_characters() -> None:
    tokenizer = Letters(["a", None, "é".encode()[:1], "é".encode()[1:], "éa", "aa"])
    encode = exact(tokenizer)
    assert written(tokenizer, encode, [0, 1], b"a") == [0]
    assert written(tokenizer, encode, [2, 3, *[3] * LOOK_BACK], b"aa") == [5]


def test_nothing_is_kept_of_numbers_that_are_no_tokens() -> None:
    tokenizer = bytes_bpe(300)
    for token in (100, 101, 1 << 20, 1 << 21, 100):
        tokenizer.decode([token])
    assert set(tokenizer._texts) == {100, 101}
