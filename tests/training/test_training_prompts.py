"""Where prompts come from, and which are left out: files, the hub, the model itself; duplicates and overlaps."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from cli_support import EOS, WORDS, Letters, toy
from outpace.core.errors import BadInput, MissingExtra
from outpace.prompts.overlap import Overlap, Seen, normal
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import bench_texts, load_prompts
from outpace.prompts.reader import prompt_of, read_prompts
from outpace.prompts.sources import FileSource, HubSource, source
from outpace.training.answers import AnswerSampling
from outpace.training.dataset import held_out
from outpace.training.self_written import SelfWritten, Turn, user_turn
from test_models import tiny_tokenizer

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60)
WORD = st.text("abcdefgh", min_size=1, max_size=6)
SENTENCES = st.lists(WORD, min_size=12, max_size=40)


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "texts", "system"),
    [
        ({"turns": ["one", "two"]}, ("one", "two"), ""),
        ({"id": 3, "prompt": "what?", "answer": "that"}, ("what?",), ""),
        (
            {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]},
            ("hi",),
            "be kind",
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, ("q",), ""),
        ({"prompt": [{"role": "user", "content": "listed"}]}, ("listed",), ""),
        ({"instruction": "Shorten.", "input": "A long text.", "output": "x"}, ("Shorten.\n\nA long text.",), ""),
        ({"instruction": "Alone.", "input": ""}, ("Alone.",), ""),
        ("bare text", ("bare text",), ""),
    ],
)
def test_columns_are_found(row: object, texts: tuple[str, ...], system: str) -> None:
    found = prompt_of(row, 1, strict=False)
    assert (found.user_texts, found.system) == (texts, system)


@pytest.mark.parametrize(
    "row", [{"label": 3}, {"prompt": ""}, {"turns": []}, {"turns": [1, 2]}, 7, None, {"messages": [{}]}]
)
def test_rows_without_a_prompt_are_passed_over(row: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        prompt_of(row, 1, strict=False)


def test_a_file_is_read_in_an_order_of_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": f"text {i}"} for i in range(20)), {"other": 1})
    first = [ask.text for ask in FileSource(path, 1)]
    assert first == [ask.text for ask in FileSource(path, 1)]
    assert first != [ask.text for ask in FileSource(path, 2)]
    assert sorted(first) == sorted(f"text {i}" for i in range(20))
    lines = write(tmp_path / "p.txt", "first", "", "second")
    assert [prompt.text for prompt in read_prompts(lines).values()] == ["first", "second"]
    array = write(tmp_path / "a.json", [{"prompt": "x"}, {"prompt": "y"}])
    assert [prompt.text for prompt in read_prompts(array).values()] == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": ', "line 2: not valid JSON"),
        ("b.jsonl", b'{"label": 1}\n{"label": 2}', "no usable rows: its columns are label"),
        ("c.txt", b" \n\n", "holds no prompts"),
        ("d.txt", b"one\n\xff\xfe", "line 2: not UTF-8"),
        ("e.json", b"[1,\n 2", "line 2: not valid JSON"),
        ("f.jsonl", b"[]", "holds no prompts"),
    ],
)
def test_a_file_without_prompts_is_refused_in_words(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=said) as caught:
        source(str(path))
    assert name in str(caught.value)


def test_a_name_is_a_file_or_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"cannot read prompts from .*none\.jsonl"):
        source(str(tmp_path / "none.jsonl"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"owner/name.*outpace\[train\]"):
        source("owner/name")


class FakeSet(list):  # type: ignore[type-arg]
    def shuffle(self, *, seed: int, buffer_size: int) -> "FakeSet":
        return self


def hub(monkeypatch: pytest.MonkeyPatch, rows: list[object], **fails: Exception) -> list[tuple[object, ...]]:
    asked: list[tuple[object, ...]] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> FakeSet:
        asked.append((name, config, split))
        if "load" in fails:
            raise fails["load"]
        return FakeSet(rows)

    fake = SimpleNamespace(
        disable_progress_bars=lambda: None,
        get_dataset_split_names=lambda name, config: ["test", "train_sft", "train_gen"],
        load_dataset=load,
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, [{"label": 1}, {"question": "why?"}, {"question": "how?"}])
    assert [(ask.id, ask.text) for ask in source("owner/name:main")] == [
        ("owner/name:main:2", "why?"),
        ("owner/name:main:3", "how?"),
    ]
    assert asked == [("owner/name", "main", "train_sft")]
    HubSource("owner/name:main:test")
    assert asked[-1] == ("owner/name", "main", "test")
    hub(monkeypatch, [{"label": 1}])
    with pytest.raises(BadInput, match="no usable rows: its columns are label"):
        list(source("owner/name"))
    hub(monkeypatch, [], load=ConnectionError("no route\nto the hub"))
    with pytest.raises(BadInput, match=r"no file 'owner/name'.*no route") as caught:
        source("owner/name")
    assert "\n" not in str(caught.value)


@given(TEXTS, TEXTS)
def test_keys_are_of_the_words_alone(text: str, system: str) -> None:
    key = Prompt.single("a.jsonl:1", text, system).key
    assert Prompt.single("self:9", f"  {text} ", system).key == key
    assert (Prompt.single("x:1", text + "!q", system).key == key) == (normal(text + "!q") == normal(text))


def test_about_one_in_fifty_prompts_is_held_out_for_good() -> None:
    keys = [Prompt.single("f:1", f"prompt number {i}").key for i in range(4000)]
    assert 40 < sum(map(held_out, keys)) < 130
    again = [Prompt.single("another:7", f"Prompt  number {i}.").key for i in range(4000)]
    assert list(map(held_out, keys)) == list(map(held_out, again))


@given(SENTENCES, st.integers(0, 20), SENTENCES)
def test_a_run_of_eight_words_is_an_overlap(bench: list[str], start: int, around: list[str]) -> None:
    overlap = Overlap([" ".join(bench)])
    run = bench[min(start, len(bench) - 8) :][:8]
    assert f"{' '.join(around)}: {' '.join(run).upper()}, {' '.join(around)}" in overlap
    found = {tuple(bench[i : i + 8]) for i in range(len(bench) - 7)}
    grams = {tuple(around[i : i + 8]) for i in range(len(around) - 7)}
    assert (" ".join(around) in overlap) == bool(found & grams)


def test_short_bench_prompts_are_overlaps_too() -> None:
    overlap = Overlap(["Write a poem", "Who painted the Mona Lisa?"])
    assert "write a poem." in overlap
    assert "Write a poem about rain" not in overlap
    assert "Tell me: who painted the mona lisa, and when?" in overlap


def test_bench_prompts_and_excluded_files_overlap(tmp_path: Path) -> None:
    overlap = Overlap(
        bench_texts([write(tmp_path / "x.jsonl", {"turns": ["first", "a second turn that is kept out"]})])
    )
    assert all(turn in overlap for prompt in load_prompts() for turn in prompt.turns)
    assert "a second turn that is kept out" in overlap
    assert "How do I water a cactus that lives on my balcony all year?" not in overlap


@given(st.lists(SENTENCES, max_size=4), SENTENCES)
def test_duplicates_are_found_and_others_are_not(others: list[list[str]], text: list[str]) -> None:
    seen = Seen()
    for other in others:
        seen.add(" ".join(other))
    whole = " ".join(text)
    shingles = {tuple(text[i : i + 3]) for i in range(len(text) - 2)}
    nearest = 0.0
    for other in others:
        theirs = {tuple(other[i : i + 3]) for i in range(len(other) - 2)}
        nearest = max(nearest, len(shingles & theirs) / len(shingles | theirs))
    assert seen.near(whole) == (nearest >= seen.alike)  # short enough for sketches to be exact
    seen.add(whole)
    assert seen.duplicate(f" {whole.upper()}. ")
    assert seen.near(whole)


def test_near_duplicates_of_long_texts_are_estimated() -> None:
    words = [f"w{i}" for i in range(600)]
    seen = Seen()
    seen.add(" ".join(words))
    changed = [*words]
    changed[300] = "other"
    assert seen.near(" ".join(changed))
    assert not seen.duplicate(" ".join(changed))
    assert not seen.near(" ".join(words[:300] + [f"v{i}" for i in range(300)]))
    assert not seen.near("w1 w2 w3")


def test_the_templates_part_of_a_turn() -> None:
    model = toy()
    turn = user_turn(model)
    assert turn.head == tuple(model.tokenizer.encode("u "))
    assert turn.tail == tuple(model.tokenizer.encode("\na "))
    assert turn.ends == {EOS, WORDS.index("\n")}
    prompt = model.tokenizer.chat([{"role": "user", "content": "a cat"}])
    assert model.tokenizer.decode(turn.inside(prompt)) == "a cat"


def test_the_turn_of_a_tokenizer_with_a_template() -> None:
    from outpace.models.tokenizers import HFTokenizer

    words = HFTokenizer(tiny_tokenizer())
    turn = user_turn(SimpleNamespace(tokenizer=words, eos_ids=frozenset({1})))  # type: ignore[arg-type]
    assert words.inner.decode(list(turn.head)) == "<|im_start|>user\n"
    assert words.inner.decode(list(turn.tail)) == "<|im_end|>\n<|im_start|>assistant\n"
    assert turn.ends == {1, words.inner.convert_tokens_to_ids("<|im_end|>")}
    bare = user_turn(SimpleNamespace(tokenizer=HFTokenizer(tiny_tokenizer(None)), eos_ids=frozenset({1})))  # type: ignore[arg-type]
    assert bare == Turn((0,))  # the token that texts begin with, and no end


def test_the_model_writes_turns_by_number() -> None:
    own = SelfWritten(toy(), seed=3)
    found = own.turns(0, 24, 8)
    assert found, "none of 24 turns ended"
    assert all("\n" not in ask.text and len(ask.text) >= own.shortest for ask in found)
    numbers = {ask.id: ask.text for ask in found}
    apart = [*own.turns(0, 10, 3), *own.turns(10, 14, 5)]
    assert {ask.id: ask.text for ask in apart} == numbers
    assert [ask.text for ask in SelfWritten(toy(), seed=4).turns(0, 24, 8)] != [ask.text for ask in found]


def test_a_base_model_goes_on_with_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "chat", lambda self, messages: self.encode(messages[-1]["content"]))
    own = SelfWritten(toy(), seed=3)
    assert not own.template
    assert own.turn.head == (EOS,)
    found = own.turns(0, 12, 8)
    assert found
    assert all(len(ask.text) <= own.beginning for ask in found)


def test_a_share_of_the_answers_is_sampled() -> None:
    of = [AnswerSampling(0.25, 0.9).of(f"key {i}") for i in range(2000)]
    assert 400 < sum(temperature > 0 for temperature, _ in of) < 600
    assert {temperature for temperature, _ in of} == {0.0, 0.9}
    assert len({seed for _, seed in of}) > 1990
    assert of == [AnswerSampling(0.25, 0.9).of(f"key {i}") for i in range(2000)]
    assert all(AnswerSampling(0.0).of(f"key {i}")[0] == 0.0 for i in range(50))
