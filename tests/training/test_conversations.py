"""Whole conversations: several turns, rows that hold them, packed batches, prompts about given passages."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_support import EOS, WORDS, Letters, toy
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.models.base import Message
from outpace.prompts.given_passages import GivenPassages
from outpace.prompts.overlap import Overlap
from outpace.prompts.sources import FileSource
from outpace.training.answers import AnswerSampling, PromptTokens, answered
from outpace.training.data import Collector, open_folder
from outpace.training.data_config import BatchConfig, DataConfig
from outpace.training.dataset import Dataset, held_out
from outpace.training.dialogues import joined, turns_of
from outpace.training.prompt_log import LOG, Log
from outpace.training.shards import Conversation, Shards

LAYERS = (1, 4)


class Ended(Letters):
    """A template that keeps the token that ends an answer, as real ones do."""

    def chat(self, messages: list[Message]) -> list[int]:  # type: ignore[override]
        found: list[int] = []
        for one in messages:
            found += self.encode(f"{one['role'][0]} {one['content']}") + ([EOS] if one["role"] == "assistant" else [])
            found += self.encode("\n")
        return found + self.encode("a ")


def model(ended: bool = True) -> Model:
    one = toy()
    words = Ended() if ended else Letters()
    return Model("toy", one.target, words, frozenset({EOS}), one.info)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    names = ["cat", "dog", "owl", "fox", "bee", "ant"]
    rows = [{"turns": [f"what did the {a} say to the {b}", f"and the {a}"]} for a in names for b in names if a != b]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def collected(folder: Path, one: Model, prompts: Path, **settings: object) -> list[Conversation]:
    shards = open_folder(folder, one.target, one.name, LAYERS)
    given = {"tokens": 600, "most": 40, "together": 8, "self_written": 0.0, "sampling": AnswerSampling(1.0, 1.0)}
    config = DataConfig(**(given | {"sources": [FileSource(prompts)], "turns": 2} | settings))  # type: ignore[arg-type]
    Collector(one, shards, config, Overlap(["nothing of this is ever asked here"])).run()
    return [one for path in shards.paths for one in shards.read(path, LAYERS)]


def test_every_turn_is_answered_by_the_target(tmp_path: Path, prompts: Path) -> None:
    one = model()
    found = collected(tmp_path / "d", one, prompts)
    several = [conversation for conversation in found if conversation.earlier]
    assert len(several) > 3
    for conversation in several:
        assert len(conversation.answers) == 2
        (start, stop), (last, end) = conversation.answers
        assert conversation.tokens[stop - 1] == EOS and stop < last
        assert "\nu and the" in "".join(WORDS[token] for token in conversation.tokens[stop:last])
        sampling = AnswerSampling(1.0, 1.0)
        for turn, (begin, over) in enumerate([(start, stop), (last, end)]):
            key = conversation.key if not turn else f"{conversation.key} turn {turn}"
            asked = PromptTokens("x", tuple(conversation.tokens[:begin]), *sampling.of(key))
            said = next(answered(one.target, [asked], (), most=40, stop_ids=one.eos_ids)).answer
            assert said == conversation.tokens[begin:over]
        for states in conversation.states.values():
            assert len(states) == len(conversation.tokens)
            assert states[:-1].any(-1).all()
    total = sum(conversation.answer_tokens for conversation in found)
    assert Shards(tmp_path / "d", {}).answer_tokens() == total >= 600


def test_a_template_that_writes_answers_otherwise_makes_a_row_of_each_turn(tmp_path: Path, prompts: Path) -> None:
    found = collected(tmp_path / "d", model(ended=False), prompts)
    assert not any(conversation.earlier for conversation in found)
    keys = [conversation.key for conversation in found]
    assert len(set(keys)) < len(keys)


def test_the_model_writes_what_the_user_says_next(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n".join(f"tell us of the {a} and {b}" for a in ("cat", "dog", "owl", "fox") for b in "abcdefgh"))
    one = model()
    found = collected(tmp_path / "d", one, path, tokens=500, turns=3)
    several = [conversation for conversation in found if conversation.earlier]
    assert several
    for conversation in several:
        between = conversation.tokens[conversation.earlier[0][1] : conversation.answers[1][0]]
        said = "".join(WORDS[token] for token in between)
        assert said.startswith("\nu ") and said.endswith("\na ") and len(said) >= 8 + 6
    log = Log(tmp_path / "d" / LOG)
    wanted = {prompt.key: turns_of(prompt, 3) for prompt in log.prompts}
    assert set(wanted.values()) == {1, 2, 3}
    assert all(len(conversation.answers) <= wanted[conversation.key] for conversation in found)


def test_a_stop_changes_nothing(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import outpace.training.data as data

    monkeypatch.setattr(data, "BLOCK", 8)
    whole = collected(tmp_path / "whole", model(), prompts)
    collected(tmp_path / "d", model(), prompts, tokens=100)
    again = collected(tmp_path / "d", model(), prompts)
    assert [one.tokens for one in again][: len(whole)] == [one.tokens for one in whole][: len(again)]
    assert (tmp_path / "d" / LOG).read_text().count('"later": ["and the') > 0


def test_joining_needs_the_same_beginning() -> None:
    before = [Conversation("k", [1, 2], [3, 0])]
    [row] = joined(before, Conversation("k", [1, 2, 3, 0, 5], [6]))
    assert row.answers == [(2, 4), (5, 6)]
    assert joined(before, Conversation("k", [1, 2, 4, 0, 5], [6]))[0] is before[0]
    third = joined([row], Conversation("k", [1, 2, 3, 0, 5, 6, 7], [8, 9]))
    assert third[0].answers == [(2, 4), (5, 6), (7, 9)]
    assert third[0].answer_tokens == 5


def long_ones(folder: Path) -> tuple[Shards, list[Conversation]]:
    shards = Shards(folder, {})
    made = []
    for number, (prompt, answer) in enumerate([(5, 300), (250, 40), (400, 10), (3, 2), (90, 91), (128, 128)] * 12):
        tokens = [(7 * number + at) % 97 for at in range(prompt + answer)]
        states = {2: torch.arange(prompt + answer)[:, None].repeat(1, 4).bfloat16()}
        earlier = [(20, 60), (70, 80)] if prompt > 80 else []
        made.append(Conversation(f"k{number}", tokens[:prompt], tokens[prompt:], states, earlier))
    shards.append(made[:30])
    shards.append(made[30:])
    return shards, made


def test_earlier_answers_are_kept_and_wrong_ones_refused(tmp_path: Path) -> None:
    shards, made = long_ones(tmp_path / "d")
    read = [one for path in shards.paths for one in shards.read(path)]
    assert [one.answers for one in read] == [one.answers for one in made]
    path = shards.paths[0]
    tensors, keys = load_file(path), json.dumps([one.key for one in made[:30]])
    for wrong in ([[99, 0, 1]], [[1, 5, 5]], [[1, 0, 251]], [[1, 10, 20], [1, 15, 30]], [[1, 2]]):
        save_file(tensors | {"earlier": torch.tensor(wrong)}, path, metadata={"keys": keys})
        with pytest.raises(BadInput, match="is damaged"):
            shards.keys()


@pytest.mark.parametrize("window", [128, 2048])
@pytest.mark.parametrize("pack", [False, True])
def test_rows_ask_for_every_answer_token_once(tmp_path: Path, window: int, pack: bool) -> None:
    shards, made = long_ones(tmp_path / "d")
    dataset = Dataset(shards, (2,), window=window, tokens=600, pack=pack)
    trained = [one for one in made if not held_out(one.key)]
    assert dataset.answer_tokens() == sum(one.answer_tokens for one in trained)
    asked = rows = 0
    for batch in dataset.train(5):
        asked += int(batch.answer.sum())
        assert batch.offsets is not None and len(batch.offsets) == len(batch.conversations())
        rows += len(batch.offsets)
        assert batch.tokens.numel() <= 1000
        if pack:
            assert batch.lengths is not None
            assert batch.real.all() and batch.tokens.shape == (1, sum(batch.lengths))
        for (start, stop), offset in zip(batch.conversations(), batch.offsets, strict=True):
            assert stop - start <= window
            places = batch.states[2].flatten(0, 1)[start:stop, 0].float()
            if places[-1] < 250:  # bfloat16 counts exactly so far
                assert torch.equal(places, offset + torch.arange(stop - start))
    assert asked == dataset.answer_tokens()
    if window == 2048:
        assert rows == len(trained)  # no conversation is cut


def test_a_whole_conversation_is_asked_as_it_was_answered(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "d", {})
    key = next(f"k{number}" for number in range(99) if not held_out(f"k{number}"))
    shards.append([Conversation(key, [1, 2, 3, 4, 5, 6], [7, 8], earlier=[(2, 4)])])
    [batch] = Dataset(shards, ()).train(0)
    assert batch.answer.tolist() == [[False, False, True, True, False, False, True, True]]
    assert Dataset(shards, ()).words(4, 12).tolist() == [3, 4, 7, 8]


def test_a_sample_of_the_held_out_split_is_watched(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "d", {})
    keys = [f"k{number}" for number in range(4000) if held_out(f"k{number}")][:40]
    shards.append([Conversation(key, [1, 2], [3] * 10) for key in keys])
    whole = sum(int(batch.answer.sum()) for batch in Dataset(shards, ()).held_out())
    assert whole == 400
    sampled = Dataset(shards, (), sample=95)
    first = [batch.tokens.tolist() for batch in sampled.held_out()]
    assert sum(int(batch.answer.sum()) for batch in sampled.held_out()) == 100
    assert first == [batch.tokens.tolist() for batch in sampled.held_out()]
    assert sum(int(batch.answer.sum()) for batch in sampled.all_held_out()) == 400


def test_batches_read_ahead_are_the_same(tmp_path: Path) -> None:
    shards, _ = long_ones(tmp_path / "d")
    plain, ahead = (Dataset(shards, (2,), tokens=600, pack=True, prefetch=count) for count in (0, 2))
    assert [one.tokens.tolist() for one in plain.train(3)] == [one.tokens.tolist() for one in ahead.train(3)]
    lacking = Dataset(shards, (3,), target=toy().target, prefetch=2)
    with pytest.raises(BadInput, match=r"no states of layers \[3\].*--prefetch 0"):
        next(lacking.train(0))


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("row_tokens", 3, "--row-tokens must be at least 64"),
        ("batch_tokens", 0, "--batch-tokens"),
        ("accumulate", 0, "--accumulate"),
        ("prefetch", -1, "--prefetch"),
        ("evaluate_tokens", -1, "--evaluate-tokens"),
    ],
)
def test_amounts_out_of_range_are_refused(setting: str, value: int, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        BatchConfig(**{setting: value}).check()  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- given passages


def passages(path: Path) -> Path:
    said = "Passage {0} tells of Anna Marie Vogel in 19{1}. It has words{0} of its own. They end here."
    rows = [{"text": said.format(at, at + 30), "language": "en"} for at in range(40)]
    german = "Satz {0} ist kurz. Noch einer folgt. Und der letzte."
    rows += [{"text": german.format(at), "language": "de"} for at in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_passages_become_summaries_questions_and_translations(tmp_path: Path) -> None:
    given = GivenPassages([passages(tmp_path / "p.jsonl")], 3)
    prompts = [given.prompt(number) for number in range(len(given))]
    texts = [prompt.text for prompt in prompts]
    for at in range(40):  # every passage is in one prompt
        assert sum(f"Passage {at} tells" in text for text in texts) == 1
    assert sum("German" in text for text in texts) == 20  # one sentence, then two
    assert all(sum(f"Satz {at} ist" in text for text in texts) == 1 for at in range(10))
    assert any(text.count("Passage") > 1 for text in texts)
    assert any("Anna Marie Vogel?" in text or "Anna Marie Vogel given" in text or "is Anna" in text for text in texts)
    assert 0.2 < sum(len(prompt.turns) == 2 for prompt in prompts) / len(prompts) < 0.8
    again = GivenPassages([tmp_path / "p.jsonl"], 3)
    assert [again.prompt(number) for number in range(len(again))] == prompts
    other = GivenPassages([tmp_path / "p.jsonl"], 4)
    assert [other.prompt(number).text for number in range(min(len(other), len(given)))] != texts[: len(other)]
    assert {prompt.id for prompt in prompts} == {f"read:{number}" for number in range(len(given))}


def test_given_passages_take_the_place_of_answers(tmp_path: Path, prompts: Path) -> None:
    rows = [{"text": f"a {a} met a {b} and both went home"} for a in ("cat", "dog") for b in ("owl", "fox", "bee")]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = GivenPassages([tmp_path / "t.jsonl"])
    collected(tmp_path / "d", model(), prompts, texts=given, passages=0.3, turns=1)
    log = Log(tmp_path / "d" / LOG)
    about = [prompt for prompt in log.prompts if prompt.id.startswith("read:")]
    assert 0 < len(about) <= len(given)
    assert all("and both went home" in prompt.text for prompt in about)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "one"}, {"prompt": "two"}], "line 2: a passage is an object with a 'text'"),
        ([{"text": "one", "language": 3}], "line 1: 'language' must be a text"),
        ([], "no passages in"),
        (["{"], "line 1: not valid JSON"),
    ],
)
def test_a_file_without_passages_is_refused_in_words(tmp_path: Path, rows: list[object], said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    with pytest.raises(BadInput, match=said):
        GivenPassages([path])
    with pytest.raises(BadInput, match="cannot read passages"):
        GivenPassages([tmp_path / "none.jsonl"])


def test_a_passage_longer_than_the_context_is_left_out_and_counted(tmp_path: Path, prompts: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "long words " * 80}))
    one = model()
    shards = open_folder(tmp_path / "d", one.target, one.name, LAYERS)
    config = DataConfig(
        300, [FileSource(prompts)], 0.0, 0.3, GivenPassages([tmp_path / "t.jsonl"]), most=40, together=8
    )
    found = Collector(one, shards, config, Overlap([])).run()
    assert found.removed["too long"] == 1


@pytest.mark.parametrize(
    ("kept", "size"),
    [({}, 14), ({"state_bits": 8}, 18), ({"cache_bytes": 0}, 192), ({"cache_bytes": 0, "turns": 3}, 192)],
)
def test_a_block_is_as_large_as_its_hidden_states_allow(
    kept: dict[str, int], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none are kept, as of a server that gives them again, prompts are answered many at a time."""
    import outpace.training.data as data

    one = model()
    a_token = 2 * one.target.hidden_size * len(LAYERS)
    monkeypatch.setattr(data, "_SHARD_BYTES", 14 * a_token * (20 + 224))
    shards = open_folder(tmp_path / "d", one.target, one.name, LAYERS)
    assert Collector(one, shards, DataConfig(300, most=40, **kept), Overlap([]))._largest() == size  # type: ignore[arg-type]


def test_states_take_half_the_disk_in_8_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = torch.randn(60, 64) * torch.logspace(-3, 4, 60)[:, None]
    made = [
        Conversation(f"k{at}", [1] * 10, [2] * 10, dict.fromkeys((3, 4, 5, 9), rows[20 * at : 20 * at + 20]))
        for at in range(3)
    ]
    whole, narrow = Shards(tmp_path / "whole", {}), Shards(tmp_path / "narrow", {})
    whole.append(made)
    path = narrow.append(made, state_bits=8)
    assert narrow.bytes < 0.7 * whole.bytes
    read = torch.cat([one.states[3] for one in narrow.read(path, (3,))])
    assert read.dtype == torch.bfloat16
    last = torch.cat([one.states[9] for one in narrow.read(path, (9,))])
    assert torch.equal(last, rows.bfloat16()), "the target's distribution is computed from these"
    error = (read.float() - rows).norm(dim=-1) / rows.norm(dim=-1)
    assert float(error.max()) < 0.05
    assert [one.tokens for one in narrow.read(path)] == [one.tokens for one in made]
