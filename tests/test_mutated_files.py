"""Whatever a file holds: it loads and works, or is refused in one line. 200 damaged copies of every kind that is read.

No other exception, no wait without end, no memory for what is not there, and nothing is written or left behind.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import layouts_support
import outpace.loading
from gguf_support import reference, write_gguf
from mutations import damage
from outpace.cli.options import settings_by_method
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.datastore.corpus import read_corpus, tokenise
from outpace.datastore.store import Datastore, open_datastore
from outpace.drafting.layer_skips import FORMAT, read_skips
from outpace.heads.checkpoint import facts, read_provenance, save
from outpace.heads.head_folder import open_head
from outpace.methods.registry import configured, find
from outpace.models import gguf_cache, gguf_convert
from outpace.models.gguf_header import read_header
from outpace.prompts.reader import read_prompts
from outpace.prompts.sources import FileSource
from outpace.targets.dense.kernel_build import library
from outpace.training.data import about, open_folder
from outpace.training.dataset import Dataset
from outpace.training.prompt_log import LOG, Log
from outpace.training.run_state import STATE
from outpace.training.shards import Conversation
from test_models import tiny_model, tiny_tokenizer
from test_trainer import made as trainer

pytestmark = pytest.mark.slow

COPIES = 200
PATIENCE = 60
"""Seconds after which a reader counts as hanging; they take some milliseconds."""
ROOM = 3 * 2**30
"""Bytes of addresses that a reader may ask for beyond what the process has."""

Load = Callable[[Path], object]
Make = Callable[[Path], Load]


class Hangs(BaseException):
    """Not an Exception, so that nothing on the way takes it for one of the file's."""


# --- what is read: each fills a folder, and returns what loads and uses it


def model_folder(folder: Path) -> Load:
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return uses_model


def uses_model(place: Path, **options: Any) -> None:
    model = outpace.loading.load(place, **({"dtype": "float32", "target": "generic"} | options))
    ids = [*model.tokenizer.encode("a b"), 1, 2]
    model.tokenizer.chat([{"role": "user", "content": "a"}])
    scored = model.target.sequence([one % model.target.vocab_size for one in ids])
    model.target.prefill([scored])
    assert model.target.score([(scored, TokenTree())])[0].logits.isfinite().all()
    model.target.close(scored.kv)


def gguf_file(folder: Path) -> Load:
    write_gguf(folder / "tiny.gguf", reference())
    return lambda place: uses_model(place / "tiny.gguf")


def packed_model_folder(folder: Path) -> Load:
    model_folder(folder)
    return partial(uses_model, target="auto")


def gguf_file_in_place(folder: Path) -> Load:
    write_gguf(folder / "tiny.gguf", reference(), kinds=lambda name: "F32" if "norm" in name else "Q8_0")
    return lambda place: uses_model(place / "tiny.gguf", target="auto", dtype=None)


def own_head(kind: str) -> Make:
    def make(folder: Path) -> Load:
        head = layouts_support.head_of(kind)
        about = facts(layouts_support.target(), "tiny")
        head.config = head.config.model_copy(update={"target": about})
        save(head, folder, {"measured": {"temperature 0": {"drafters": [{"drafter": kind, "speedup": 1.5}]}}})
        return uses_head

    return make


def head_in_layout(kind: str, layout: str, **options: Any) -> Make:
    def make(folder: Path) -> Load:
        shutil.rmtree(folder)
        layouts_support.written(layouts_support.head_of(kind, **options), layout, folder)
        return uses_head

    return make


def uses_head(folder: Path) -> None:
    read_provenance(folder)
    head = open_head(folder).load(layouts_support.target())
    assert all(weight.isfinite().all() for weight in head.parameters())


def datastore(folder: Path) -> Load:
    documents = [[1, 2, 3, 1, 2, 4], [2, 3, 1, 2]]
    built = Datastore.of(documents)
    (folder / "corpus.store").write_bytes(bytes(built._data))

    def use(place: Path) -> None:
        opened = open_datastore(place / "corpus.store")
        found = opened.find([9, 1, 2])
        assert found is not None
        assert opened.continuations(found, 4, 3)
        assert list(opened.documents()) == documents

    return use


ROWS: list[Any] = [
    {"question_id": 1, "category": "math", "turns": ["one and one?", "and two?"]},
    {"id": "b", "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], "x": None},
    {"instruction": "add", "input": "1 2", "prompt": None, "conversations": [{"from": "human", "value": "hey"}]},
    {"text": "once upon a time", "score": 1.5},
]


def prompts(name: str) -> Make:
    def make(folder: Path) -> Load:
        lines = [json.dumps(row) for row in ROWS]
        array = name.endswith(".json")
        (folder / name).write_text("[" + ",".join(lines) + "]" if array else "\n".join(lines) + "\n")
        return partial(uses_prompts, name)

    return make


def uses_prompts(name: str, folder: Path) -> None:
    for prompt in read_prompts(folder / name).values():
        assert json.dumps([prompt.id, prompt.category, *prompt.user_texts], ensure_ascii=False).encode()
        assert prompt.key
    assert list(FileSource(folder / name))


def corpus(folder: Path) -> Load:
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*ROWS[:2], ROWS[3])))
    words = outpace.loading.load_from(tiny_model(), tiny_tokenizer(), target="generic").tokenizer
    return lambda place: list(tokenise(read_corpus([place / "corpus.jsonl"]), words))


def skips(folder: Path) -> Load:
    trials = [{"attention": [1], "mlp": [2], "tokens_per_second": 3.5}]
    record = {"format": FORMAT, "attention": [1, 2], "mlp": [3], "layers": 4, "trials": trials}
    (folder / "skips.json").write_text(json.dumps(record))
    return lambda place: read_skips(place / "skips.json").check(layouts_support.target())


@cache
def target() -> Any:
    return outpace.loading.load_from(tiny_model(), tiny_tokenizer(), target="generic").target


def conversations(folder: Path) -> Load:
    shards = open_folder(folder, target(), "tiny", (0, 1))
    width = target().hidden_size
    states = {layer: torch.ones(5, width) for layer in (0, 1)}
    shards.append([Conversation(f"key{n}", [1, 2, n], [3, 4], dict(states)) for n in range(9)])
    lines = [{"turns": 2}, {"origin": "self:1", "key": "key1", "text": "hey", "system": "s"}]
    lines += [{"origin": "f:2", "key": "key2", "text": "you"}, {"origin": "f:3", "key": "key3", "removed": "too long"}]
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def use(place: Path) -> None:
        found = open_folder(place, target(), "tiny", (0, 1))
        about(found)
        assert all(prompt.key for prompt in Log(place / LOG).prompts)
        assert found.keys() is not None
        data = Dataset(found, (0, 1), target=target())
        data.words(4, target().vocab_size)
        data.answer_tokens()
        assert list(data.train(0)) is not None

    return use


def run_state(folder: Path) -> Load:
    trainer(folder, epochs=1.0).run()
    for path in folder.iterdir():
        if path.name != STATE:
            path.unlink()

    def use(place: Path) -> None:
        # A copy: what resumes may write.
        resumed = trainer(place)
        if resumed.resume():
            assert resumed.evaluate()

    return use


def method_settings(folder: Path) -> Load:
    values = {"parts": ["pld", "sam"], "depth": 4, "min_match": [1, 2]}
    (folder / "settings.json").write_text(json.dumps(values))

    def use(place: Path) -> None:
        text = " ".join((place / "settings.json").read_text(encoding="utf-8", errors="surrogateescape").split())
        for name in ("merge", "pld", "cascade", "eagle3"):
            info = find(name)
            known = {name: info.setting_names()}
            for key in known[name]:
                for value in (text, "[" + text + "]", text[1:40]):
                    given = settings_by_method([f"{key}={value}"], known)[name]
                    try:
                        configured(info, given)
                    except BadInput as error:
                        assert "\n" not in str(error)

    return use


KINDS: dict[str, Make] = {
    "model folder": model_folder,
    "GGUF": gguf_file,
    "model folder, packed": packed_model_folder,
    "GGUF, in place": gguf_file_in_place,
    "head, eagle3": own_head("eagle3"),
    "head, medusa": own_head("medusa"),
    "head, draft-lm": own_head("draft-lm"),
    "head of speculators": head_in_layout("eagle3", "speculators"),
    "head of eagle": head_in_layout("eagle", "eagle"),
    "head of medusa": head_in_layout("medusa", "medusa"),
    "head of transformers": head_in_layout("draft-lm", "hf"),
    "datastore": datastore,
    "prompts.jsonl": prompts("p.jsonl"),
    "prompts.json": prompts("p.json"),
    "prompts.txt": prompts("p.txt"),
    "corpus.jsonl": corpus,
    "skips": skips,
    "conversations": conversations,
    "run state": run_state,
    "settings": method_settings,
}


@pytest.fixture(autouse=True)
def bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and an end to addresses."""
    library()  # from the cache that has it
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def loads(load: Load, folder: Path) -> bool:
    """Whether it loads and works; False where it is refused, as it should be."""
    try:
        with within(PATIENCE):
            load(folder)
    except BadInput as error:
        said = str(error)
        assert said
        assert "\n" not in said
        assert "memory" not in said, said
        return False
    return True


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damaged_copies(name: str, whole: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    for seed in range(COPIES):
        rng = random.Random(f"{name} {seed}")
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        file = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
        yield f"copy {seed}: {damage(file, rng)}", copy
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", KINDS)
def test_damaged_copies(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    load = KINDS[name](whole)
    sound = tmp_path / "sound"
    shutil.copytree(whole, sound)
    assert loads(load, sound), "undamaged it loads"
    wrong, refused = [], 0
    for how, copy in damaged_copies(name, whole, tmp_path):
        before = content(copy)
        try:
            refused += not loads(load, copy)
            # A line of the log that a kill cut off is dropped, on purpose.
            assert {**content(copy), LOG: b""} == {**before, LOG: b""}, "nothing is written"
        except (Exception, Hangs) as error:
            wrong.append(f"{how}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    left = list((tmp_path / "cache").rglob(".tmp-*")) + list(tmp_path.rglob("*.unfinished"))
    assert not left
    assert not wrong, f"{len(wrong)} of {COPIES}:\n" + "\n".join(wrong)
    assert refused > COPIES / 20, "some damage is seen"


def test_damaged_converted_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a converted model no damage is refused, and none is loaded: it is made anew from the GGUF file."""
    file = write_gguf(tmp_path / "tiny.gguf", reference())
    entry = gguf_cache.converted(file, torch.float32)
    whole, digest = content(entry), gguf_cache.content_digest(file)
    made = gguf_convert.read(read_header(file), torch.float32)
    monkeypatch.setattr(gguf_convert, "read", lambda *_: made)
    for seed in range(COPIES):
        rng = random.Random(seed)
        path = entry / rng.choice(sorted(whole))
        how = damage(path, rng)
        with within(PATIENCE):
            assert gguf_cache.converted(file, torch.float32) == entry
        assert gguf_cache.is_whole(entry, digest), how
        found = content(entry)
        differ = [name for name in whole if name != gguf_cache.MANIFEST and found[name] != whole[name]]
        assert not differ, how
    assert [path.name for path in entry.parent.iterdir() if path.is_dir()] == [entry.name]


def test_damaged_notes_of_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_cache, "_SETTLED", -1.0)
    file = tmp_path / "a.bin"
    file.write_bytes(b"content")
    digest = gguf_cache.content_digest(file)
    (note,) = (tmp_path / "cache" / "digests").iterdir()
    kept = note.read_bytes()
    for seed in range(COPIES):
        note.write_bytes(kept)
        damage(note, random.Random(seed))
        found = gguf_cache.content_digest(file)
        assert len(found) == len(digest)
