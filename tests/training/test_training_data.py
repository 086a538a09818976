"""A folder of conversations: what it holds, that a stop changes nothing, and states that are computed again."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import outpace.prompts.passages as passages
import outpace.training.candidates as candidates
import outpace.training.data as data
import outpace.training.prompt_log as prompt_log
import outpace.training.shards as shards_module
from cli_support import toy
from outpace.core.errors import BadInput
from outpace.loading import load_from
from outpace.model import Model
from outpace.prompts.overlap import Overlap
from outpace.prompts.sources import FileSource
from outpace.targets.table import TableTarget
from outpace.training.answers import AnswerSampling, PromptTokens, answered, states_of
from outpace.training.data import Collector, about, layers_of_all_kinds, open_folder
from outpace.training.data_config import DataConfig
from outpace.training.dataset import OVERLAP, Dataset, held_out
from outpace.training.shards import Conversation, Shards
from test_models import tiny_model, tiny_tokenizer

LAYERS = (1, 4)
TOY = toy()  # one for all, so that its tables are drawn once


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    names = ["cat", "dog", "owl", "fox", "bee", "ant", "elk", "hen", "pig", "cow", "rat", "bat", "jay", "eel", "yak"]
    path.write_text("\n".join(f"tell us what the {a} said to the {b}" for a in names for b in names[:6] if a != b))
    return path


def collector(folder: Path, model: Model | None = None, **settings: object) -> Collector:
    model = model or TOY
    shards = open_folder(folder, model.target, model.name, LAYERS)
    made = DataConfig(**({"tokens": 400, "most": 24, "together": 8} | settings))  # type: ignore[arg-type]
    return Collector(model, shards, made, Overlap(["tell us what the dog said to the cat"]))


def content(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {"log": (folder / prompt_log.LOG).read_text()}
    for path in sorted(folder.glob("part-*")):
        found[path.name] = path.read_bytes()
    return found


def keys(folder: Path) -> list[str]:
    return Shards(folder, {}).keys()


def test_prompts_are_answered_as_the_target_answers_them(tmp_path: Path, prompts: Path) -> None:
    folder, model = tmp_path / "d", TOY
    found = collector(folder, sources=[FileSource(prompts)], sampling=AnswerSampling(0.0)).run()
    shards = Shards(folder, {})
    conversations = [one for path in shards.paths for one in shards.read(path, LAYERS)]
    assert found.tokens == sum(len(one.answer) for one in conversations) >= 400
    assert found.prompts == len(conversations) == len(set(keys(folder)))
    for one in conversations[:12]:
        said = answered(model.target, [PromptTokens("x", tuple(one.prompt))], (), most=24, stop_ids=model.eos_ids)
        assert next(said).answer == one.answer
        for layer, states in states_of(model.target, [one], LAYERS)[0].items():
            assert torch.equal(states, one.states[layer])
            assert states.shape == (len(one.tokens), model.target.hidden_size)
            assert not states[-1].any()
            assert states[:-1].any(-1).all()


def test_duplicates_and_bench_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text(
        "a cat sat\nA  cat sat.\nso tell us what the dog said to the cat now\nan owl flew off\n" + "x " * 400
    )
    found = collector(tmp_path / "d", sources=[FileSource(path)], self_written=0.0).run()
    assert found.prompts == 2
    assert found.removed == {"duplicates": 1, "overlaps with bench prompts": 1, "too long": 1}
    assert found.sources == {"p.txt": 2}
    again = collector(tmp_path / "d", sources=[FileSource(path)], self_written=0.0).run()
    assert again.public() == found.public()  # what was counted once is not counted twice
    path.write_text("x " * 400)
    with pytest.raises(BadInput, match="no prompt was left to answer: 1 too long"):
        collector(tmp_path / "e", sources=[FileSource(path)], self_written=0.0).run()


def test_self_written_prompts_make_up_their_share(tmp_path: Path, prompts: Path) -> None:
    mixed = collector(tmp_path / "m", sources=[FileSource(prompts)], self_written=0.5).run()
    assert abs(mixed.sources["self"] - mixed.sources["prompts.txt"]) <= 2
    assert min(mixed.sources.values()) > 5
    prompts.write_text("one prompt alone\n")
    filled = collector(tmp_path / "f", sources=[FileSource(prompts)]).run()
    assert filled.tokens >= 400
    assert filled.sources["prompts.txt"] == 1
    alone = collector(tmp_path / "a").run()
    assert set(alone.sources) == {"self"}


def any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a toy says is no prose."""
    monkeypatch.setattr(passages, "SHORTEST", 4)
    monkeypatch.setattr(passages, "NEW", 0.0)
    monkeypatch.setattr(passages, "_END", re.compile("$"))


def test_prompts_about_texts_make_up_their_share(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_text(monkeypatch)
    monkeypatch.setattr(data, "BLOCK", 8)
    folder = tmp_path / "d"
    found = collector(folder, tokens=700, sources=[FileSource(prompts)], self_written=0.0, passages=0.25).run()
    assert 0.15 < found.sources["read"] / found.prompts <= 0.3
    log = [json.loads(line) for line in (folder / prompt_log.LOG).read_text().splitlines()]
    asked = {entry["key"]: entry["text"] for entry in log if "text" in entry}
    about_texts = {entry["key"] for entry in log if entry["origin"].startswith("read:")}
    shards = Shards(folder, {})
    conversations = [one for path in shards.paths for one in shards.read(path)]
    said = {one.key: TOY.tokenizer.decode(one.answer) for one in conversations if one.key not in about_texts}
    for key in about_texts & asked.keys():
        texts = [other for other, text in said.items() if len(text) > 3 and text in asked[key]]
        assert texts
        assert not all(held_out(other) for other in texts)


def test_a_model_that_writes_no_turns_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_TURNS", 16)
    model = toy()
    model.tokenizer.decode = lambda ids: "hm"  # type: ignore[method-assign]
    with pytest.raises(BadInput, match=r"wrote no users' turns.*--prompts"):
        collector(tmp_path / "d", model).run()


class Killed(BaseException):
    """What no code catches."""


def killing(function: Callable[..., object], at: int, error: BaseException) -> Callable[..., object]:
    count = 0

    def maybe(*arguments: object, **more: object) -> object:
        nonlocal count
        count += 1
        if count == at:
            raise error
        return function(*arguments, **more)

    return maybe


@pytest.mark.parametrize(("self_written", "read"), [(None, 0.0), (0.5, 0.0), (1.0, 0.0), (0.5, 0.3)])
@pytest.mark.parametrize("place", ["in the log", "while answering", "in a shard", "before the rename"])
def test_a_kill_changes_nothing(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, place: str, self_written: float | None, read: float
) -> None:
    any_text(monkeypatch)
    monkeypatch.setattr(data, "BLOCK", 8)
    monkeypatch.setattr(candidates, "_TURNS", 16)

    def collect(folder: Path) -> int:
        sources = [] if self_written == 1.0 else [FileSource(prompts)]
        return collector(folder, tokens=250, sources=sources, self_written=self_written, passages=read).run().tokens

    assert collect(tmp_path / "whole") >= 250
    assert ('"read:' in (tmp_path / "whole" / prompt_log.LOG).read_text()) == (read > 0.0)
    folder = tmp_path / "killed"
    for at in (1, 2):
        with monkeypatch.context() as patch:
            if place == "in the log":
                patch.setattr(prompt_log.Log, "write", killing(prompt_log.Log.write, at, Killed()))
            elif place == "while answering":
                patch.setattr(TableTarget, "commit", killing(TableTarget.commit, 20 * at, Killed()))
            elif place == "in a shard":
                patch.setattr(shards_module, "save_file", killing(_half_a_file, 1, Killed()))
            else:
                patch.setattr(Path, "replace", killing(Path.replace, 1 if folder.exists() else 2, Killed()))
            with pytest.raises(Killed):
                collect(folder)
    if place == "in the log":
        with (folder / prompt_log.LOG).open("a") as file:
            file.write('{"origin": "prompts.txt:9", "ke')  # a line that a kill cut short
    collect(folder)
    assert content(folder) == content(tmp_path / "whole")
    assert not list(folder.glob("*.unfinished"))


def _half_a_file(tensors: object, path: Path, metadata: object) -> None:
    path.write_bytes(b"half")
    raise AssertionError("killed before")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_full_disk_stops_cleanly_and_the_same_call_goes_on(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(data, "BLOCK", 16)
    collector(tmp_path / "whole", sources=[FileSource(prompts)]).run()
    folder = tmp_path / "d"
    with monkeypatch.context() as patch:
        patch.setattr(shards_module, "save_file", killing(save_file, 2, error))
        with pytest.raises(BadInput, match=r"No space left.*earlier shards are kept"):
            collector(folder, sources=[FileSource(prompts)]).run()
    assert len(Shards(folder, {}).paths) == 1
    collector(folder, sources=[FileSource(prompts)]).run()
    assert content(folder) == content(tmp_path / "whole")


def test_memory_that_runs_out_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    collecting = collector(tmp_path / "d")
    monkeypatch.setattr(TableTarget, "score", starved)
    with pytest.raises(BadInput, match=r"memory ran out.*kept"):
        collecting.run()
    monkeypatch.setattr(TableTarget, "score", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collecting.run()


def test_more_tokens_go_on_from_what_is_there(tmp_path: Path, prompts: Path) -> None:
    folder = tmp_path / "d"
    few = collector(folder, tokens=100, sources=[FileSource(prompts)]).run()
    before = keys(folder)
    more = collector(folder, tokens=300, sources=[FileSource(prompts)]).run()
    assert few.tokens < 300 <= more.tokens
    assert keys(folder)[: len(before)] == before
    assert len(set(keys(folder))) == len(keys(folder))
    assert collector(folder, tokens=300).run().prompts == more.prompts  # enough: nothing is asked for


def test_a_folder_is_known_by_its_targets_weights(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    collector(folder, tokens=100).run()
    open_folder(folder, toy("another name").target, "another name", (0, 2))
    other = TableTarget(toy().target.vocab_size, seed=6)
    with pytest.raises(BadInput, match="another target"):
        open_folder(folder, other, "toy", LAYERS)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({"format": manifest["format"], "target": "toy"}))
    with pytest.raises(BadInput, match="does not say which target"):
        open_folder(folder, toy().target, "toy", LAYERS)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        open_folder(folder, toy().target, "toy", LAYERS)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file"):
        open_folder(tmp_path / "file", toy().target, "toy", LAYERS)


def test_conversations_without_a_log_are_not_asked_again(tmp_path: Path, prompts: Path) -> None:
    folder = tmp_path / "d"
    first = collector(folder, tokens=300, sources=[FileSource(prompts)], self_written=0.0).run()
    (folder / prompt_log.LOG).unlink()
    every = collector(folder, tokens=10**6, sources=[FileSource(prompts)], self_written=0.0).run()
    assert every.removed["duplicates"] >= first.prompts
    shards = Shards(folder, {})
    texts = [tuple(one.prompt) for path in shards.paths for one in shards.read(path)]
    assert len(set(texts)) == len(texts)


def test_layers_of_all_kinds_hold_each_kinds_own() -> None:
    from outpace.heads.kinds import kinds

    found = layers_of_all_kinds(toy().target)
    assert found[-1] == toy().target.num_layers
    assert all(set(kind.aux_layers_of(4, kind.Options())) <= set(found) for kind in kinds().values())


@pytest.fixture(scope="module")
def llama() -> Model:
    return load_from(tiny_model(num_hidden_layers=3), tiny_tokenizer(), name="tiny", target="generic")


def batches(dataset: Dataset) -> list[dict[str, torch.Tensor]]:
    found = []
    for batch in [*dataset.train(3), *dataset.held_out()]:
        states = {f"state {layer}": rows for layer, rows in batch.states.items()}
        found.append({"tokens": batch.tokens, "real": batch.real, "answer": batch.answer} | states)
    return found


def test_states_beyond_the_budget_are_computed_again(
    tmp_path: Path, prompts: Path, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "BLOCK", 16)
    layers, settings = (0, 2, 3), {"tokens": 600, "sources": [FileSource(prompts)], "self_written": 0.0}
    sets = []
    for name, cache in (("kept", 10**9), ("some", 1), ("none", 0)):
        shards = open_folder(tmp_path / name, llama.target, "tiny", layers)
        Collector(llama, shards, DataConfig(**settings, most=16, cache_bytes=cache), Overlap([])).run()  # type: ignore[arg-type]
        kept = [bool(next(shards.read(path, layers)).states) for path in shards.paths]
        assert (all(kept), any(kept)) == ((cache > 1), (cache > 0))
        with_states, names = Dataset(shards, layers, tokens=512, target=llama.target), set(layers)
        assert about(shards).layers == sorted(names)
        sets.append(batches(with_states))
    assert len({len(one) for one in sets}) == 1
    assert len(sets[0]) > 3
    for first, *others in zip(*sets, strict=True):
        for other in others:
            assert first.keys() == other.keys()
            for name, rows in first.items():
                if name.startswith("state"):
                    torch.testing.assert_close(rows, other[name], rtol=2e-2, atol=2e-2)
                else:
                    assert torch.equal(rows, other[name])
    with pytest.raises(BadInput, match=r"no states of layers \[0, 2, 3\]"):
        next(Dataset(shards, layers).train(0))


def test_a_layer_that_was_not_kept_is_computed(tmp_path: Path, prompts: Path, llama: Model) -> None:
    shards = open_folder(tmp_path / "d", llama.target, "tiny", (3,))
    Collector(llama, shards, DataConfig(300, [FileSource(prompts)], 0.0, most=16), Overlap([])).run()
    batch = next(Dataset(shards, (1, 3), target=llama.target).train(0))
    conversation = Conversation("x", batch.tokens[0, : int(batch.real[0].sum())].tolist(), [])
    expected = states_of(llama.target, [conversation], (1, 3))[0]
    for layer, rows in expected.items():
        torch.testing.assert_close(batch.states[layer][0, : len(rows)], rows, rtol=2e-2, atol=2e-2)


def long_ones(folder: Path) -> tuple[Shards, list[Conversation]]:
    shards = Shards(folder, {})
    made = []
    for number, (prompt, answer) in enumerate([(5, 300), (250, 40), (400, 10), (3, 2), (90, 91), (128, 128)] * 12):
        tokens = [(7 * number + at) % 97 for at in range(prompt + answer)]
        states = {2: torch.arange(prompt + answer)[:, None].repeat(1, 4).bfloat16()}
        made.append(Conversation(f"k{number}", tokens[:prompt], tokens[prompt:], states))
    shards.append(made[:30])
    shards.append(made[30:])
    return shards, made


def test_windows_ask_for_every_answer_token_once(tmp_path: Path) -> None:
    shards, made = long_ones(tmp_path / "d")
    dataset = Dataset(shards, (2,), window=128, tokens=300)
    trained = [one for one in made if not held_out(one.key)]
    assert dataset.answer_tokens() == sum(len(one.answer) for one in trained)
    asked = 0
    for batch in dataset.train(5):
        rows, width = batch.tokens.shape
        assert width <= 128
        assert rows * width <= 700 or rows == 1
        asked += int(batch.answer.sum())
        assert not (batch.answer & ~batch.real).any()
        assert batch.answer.any(1).all()  # no row has nothing to teach
        for row in range(rows):
            size = int(batch.real[row].sum())
            places = batch.states[2][row, :size, 0].float()
            if size > 1 and places[-1] < 250:  # bfloat16 counts exactly so far
                assert torch.equal(places, places[0] + torch.arange(size))
            first = int(batch.answer[row].int().argmax())
            assert batch.answer[row, first:size].all()
            assert first >= min(OVERLAP, size - 1) or places[0] == 0
    assert asked == dataset.answer_tokens()
    assert sum(int(batch.answer.sum()) for batch in dataset.held_out()) == sum(
        len(one.answer) for one in made if held_out(one.key)
    )


def test_order_is_the_seeds_and_states_follow_their_tokens(tmp_path: Path) -> None:
    shards, _ = long_ones(tmp_path / "d")
    dataset = Dataset(shards, (2,), window=128, tokens=300)
    first = [batch.tokens.tolist() for batch in dataset.train(1)]
    assert first == [batch.tokens.tolist() for batch in dataset.train(1)]
    assert first != [batch.tokens.tolist() for batch in dataset.train(2)]


@pytest.mark.parametrize("pack", [False, True])
def test_batches_that_are_skipped_are_not_read(tmp_path: Path, pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(tmp_path / "many", {})
    for part in range(13):
        states = {1: torch.zeros(part + 9, 2)}
        keys = [f"{part} {number}" for number in range(6)]
        shards.append([Conversation(key, [part] * 4, [5] * (part + 5), states) for key in keys])
    dataset = Dataset(shards, (1,), tokens=40, pack=pack)
    whole = [batch.tokens.tolist() for batch in dataset.train(3)]
    read: list[Path] = []
    complete = Dataset._complete

    def noted(self: Dataset, path: Path, found: list[Conversation], *, compute: bool) -> None:
        read.extend([path] * len(found))
        complete(self, path, found, compute=compute)

    monkeypatch.setattr(Dataset, "_complete", noted)
    for skip in (1, 24, len(whole) - 1, len(whole)):  # a pool of four shards has 24 rows, and so batches, at most
        read.clear()
        assert [batch.tokens.tolist() for batch in dataset.train(3, skip)] == whole[skip:]
        assert skip == 1 or len(read) < 13 * 6 / 2
    assert not read, "hidden states are asked for where batches are made, alone"


@pytest.mark.parametrize("pack", [False, True])
def test_each_process_asks_for_the_states_of_its_own_batches(
    tmp_path: Path, pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several conversations of one prompt have its key; some are held out, and a long one is cut into rows."""
    shards = Shards(tmp_path / "many", {})
    for part in range(7):
        sizes = [3 + part, 9, 30, 4]
        made = [
            Conversation(f"{part} {number // 2}", [part] * 4, [number] * size, {1: torch.full((size + 4, 2), number)})
            for number, size in enumerate(sizes)
        ]
        shards.append(made)
    dataset = Dataset(shards, (1,), window=36, tokens=40, pack=pack)
    whole = list(dataset.train(3))
    assert all((batch.states[1][..., 0] == batch.tokens).flatten()[batch.answer.flatten()].all() for batch in whole)
    asked: list[Conversation] = []
    complete = Dataset._complete

    def noted(self: Dataset, path: Path, found: list[Conversation], *, compute: bool) -> None:
        asked.extend(found)
        complete(self, path, found, compute=compute)

    monkeypatch.setattr(Dataset, "_complete", noted)
    shares = []
    for rank in range(2):
        asked.clear()
        found = list(dataset.train(3, 2, lambda number, rank=rank: number % 2 == rank))  # type: ignore[misc]
        assert [batch.tokens.tolist() for batch in found] == [batch.tokens.tolist() for batch in whole[2:]]
        for number, (batch, right) in enumerate(zip(found, whole[2:], strict=True), 2):
            assert bool(batch.states) == (number % 2 == rank)
            assert not batch.states or torch.equal(batch.states[1], right.states[1])
        shares.append(len(asked))
    assert max(shares) < 0.8 * sum(len(list(shards.read(path))) for path in shards.paths)


def test_words_are_the_commonest_of_what_is_trained_on(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "d", {})
    trained, kept = (next(f"k{i}" for i in range(999) if held_out(f"k{i}") is out) for out in (False, True))
    shards.append([Conversation(trained, [9, 9, 9], [4, 4, 7, 7, 7, 2]), Conversation(kept, [1], [5] * 9)])
    words = Dataset(shards, ()).words(4, 12, always=[11])
    assert words.tolist() == [2, 4, 7, 11]


def test_a_damaged_shard_is_named_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    shards, made = long_ones(tmp_path / "d")
    shards.paths[0].unlink()
    assert shards.append(made[:2]).name == "part-00002.safetensors"
    whole = shards.paths[0].read_bytes()
    shards.paths[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"part-00001.*damaged.*delete it"):
        shards.keys()
    assert set(load_file(shards.paths[1])) == {"tokens", "starts", "answers", "state.2"}


def test_whoever_stops_listening_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TOY.target
    opened: list[list[int]] = []

    def opening(self: TableTarget) -> list[int]:
        opened.append([])
        return opened[-1]

    monkeypatch.setattr(TableTarget, "open", opening)
    monkeypatch.setattr(TableTarget, "close", lambda self, kv: opened.remove(next(one for one in opened if one is kv)))
    found = answered(
        target, (PromptTokens(str(i), (1, 2, i + 3)) for i in range(20)), (4,), most=9, stop_ids=frozenset({0})
    )
    next(found)
    assert opened
    found.close()  # type: ignore[attr-defined]
    assert not opened
