import json
from collections import Counter
from pathlib import Path

import pytest

from outpace.core.errors import BadInput
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import GROUPS, batches, bench_texts, load_prompts, stratified, unique


def write(tmp_path: Path, name: str, *lines: object) -> Path:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_embedded_set_has_six_prompts_in_each_group() -> None:
    prompts = load_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(GROUPS, 6)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert any(len(prompt.turns) == 2 for prompt in prompts)
    assert all(len(" ".join(prompt.turns).split()) < 450 for prompt in prompts)


def test_a_named_set_is_read_unless_a_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_prompts("structured")
    assert len(found) == 60 and {prompt.category for prompt in found} == {"structured"}
    assert len({prompt.id for prompt in found}) == 60 and len({prompt.text for prompt in found}) == 60
    kinds = Counter(prompt.id.split("-")[1] for prompt in found)
    assert set(kinds) == {"extraction", "function", "sql", "list", "edit"} and min(kinds.values()) >= 10
    assert all(prompt.grammar is not None for prompt in found)
    assert {prompt.category for prompt in load_prompts(Path("code-editing"))} == {"code-editing"}
    assert all(prompt.grammar is None for prompt in load_prompts())
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "structured", "a prompt of a file")
    assert [prompt.text for prompt in load_prompts("structured")] == ["a prompt of a file"]


def test_training_must_not_see_the_prompts_with_grammars() -> None:
    assert set(bench_texts()) >= {prompt.text for prompt in load_prompts("structured")}


def test_code_in_the_embedded_set_compiles() -> None:
    for prompt in load_prompts():
        if prompt.category == "code-editing":
            source = prompt.turns[0].split("```python\n")[1].removesuffix("\n```")
            compile(source, prompt.id, "exec")
            assert 15 <= len([line for line in source.splitlines() if line.strip()]) <= 45


def test_a_small_limit_covers_all_groups_and_is_deterministic() -> None:
    assert {prompt.category for prompt in load_prompts(limit=7)} == set(GROUPS)
    assert load_prompts(limit=10) == load_prompts(limit=10)
    assert len(load_prompts(limit=10_000)) == 42
    uneven = [Prompt(str(i), "ab"[i > 2], ("x",)) for i in range(4)]
    assert [prompt.id for prompt in stratified(uneven, 3)] == ["0", "3", "1"]


def test_spec_bench_format_keeps_every_turn_and_maps_categories(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"question_id": 121, "category": "math", "turns": ["MT-bench mathematics"]},
        {"question_id": 300, "category": "summarization", "turns": ["text"]},
        {"question_id": 400, "category": "math_reasoning", "turns": ["sum"], "reference": ["3"]},
    )
    prompts = load_prompts(path)
    assert prompts[0] == Prompt("81", "chat", ("one", "two"))
    assert [prompt.category for prompt in prompts] == ["chat", "chat", "summarisation", "math"]


def test_jsonl_formats(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "mixed.jsonl",
        {"prompt": "a", "category": "math"},
        "",
        {"text": "b"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u1"},
                {"role": "assistant", "content": "a1"},
                {"role": "user", "content": "u2"},
                {"role": "assistant", "content": "a2"},
            ]
        },
        '{"prompt": "line\u2028separator"}',
    )
    first, second, third, fourth = load_prompts(path)
    assert (first.category, first.turns) == ("math", ("a",))
    assert (second.id, second.category) == ("line-3", "other")
    assert third.turns == ("u2",)
    assert third.history == (("system", "s"), ("user", "u1"), ("assistant", "a1"))
    assert fourth.turns == ("line\u2028separator",)


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    prompts = load_prompts(write(tmp_path, "p.txt", "first", "", "  second  ", "{not json, and that is fine"))
    assert [prompt.turns[0] for prompt in prompts] == ["first", "second", "{not json, and that is fine"]


def test_content_decides_where_the_extension_does_not(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, "questions", {"prompt": "a"}))[0].turns == ("a",)
    assert load_prompts(write(tmp_path, "questions2", "just text"))[0].turns == ("just text",)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "cut',
        "[1, 2]",
        '"text"',
        "{}",
        '{"prompt": 3}',
        '{"prompt": "  "}',
        '{"turns": []}',
        '{"turns": [""]}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"prompt": "a", "category": 7}',
        "[" * 100_000,
        '{"prompt": "a\\ud800"}',
        '{"turns": ["a", "\\udfff b"]}',
        '{"messages": [{"role": "system", "content": "\\ud800"}, {"role": "user", "content": "x"}]}',
        '{"instruction": "a", "input": "\\ud800"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "bad.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(BadInput, match=r"bad\.jsonl, line 3: ") as caught:
        load_prompts(path)
    assert "\n" not in str(caught.value)


def test_files_that_hold_nothing_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no prompts"):
        load_prompts(write(tmp_path, "empty.jsonl", "", "  "))
    with pytest.raises(BadInput, match="cannot read"):
        load_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(BadInput, match="cannot read"):
        load_prompts(tmp_path)
    (tmp_path / "latin.txt").write_bytes("gut\nschön\n".encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin\.txt, line 2"):
        load_prompts(tmp_path / "latin.txt")
    with pytest.raises(BadInput, match="limit"):
        load_prompts(limit=0)


def test_batches_hold_one_category_where_possible() -> None:
    prompts = [Prompt(f"{category}{i}", category, ("x",)) for i in range(3) for category in "ab"]
    cut = [[prompt.id for prompt in batch] for batch in batches(prompts, 2)]
    assert cut == [["a0", "a1"], ["b1", "b2"], ["a2", "b0"]]
    assert [prompt.id for batch in batches(prompts, 1) for prompt in batch] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_ids_become_unique() -> None:
    prompt = Prompt("same", "a", ("x",))
    assert [one.id for one in unique([prompt, prompt])] == ["same", "same#2"]


def test_bench_and_training_read_the_same_files(tmp_path: Path) -> None:
    from outpace.prompts.reader import FORMATS, read_prompts

    array = write(
        tmp_path, "array.json", "[", '{"question": "q?"},', '{"conversations": [{"from": "human", "value": "h"}]}]'
    )
    assert [prompt.text for prompt in load_prompts(array)] == ["q?", "h"]
    lines = write(tmp_path, "lines.txt", {"instruction": "Shorten.", "input": "Long."}, {"turns": ["a", "b"]})
    assert [prompt.turns for prompt in load_prompts(lines)] == [("Shorten.\n\nLong.",), ("a", "b")]
    assert {".jsonl", ".json", ".txt"} <= set(FORMATS)
    mixed = write(tmp_path, "mixed.jsonl", {"label": 1}, {"text": "t"})
    assert list(read_prompts(mixed, strict=False)) == [2]
    with pytest.raises(BadInput, match=r"mixed\.jsonl, line 1: expected one of the keys"):
        read_prompts(mixed)
