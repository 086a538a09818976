"""Datastores against brute force, and every way in which building or opening one can go wrong."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zlib
from collections.abc import Iterator, Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import outpace.datastore.build as building
import outpace.datastore.corpus as corpus
from outpace.core.errors import BadInput
from outpace.datastore.build import build_datastore
from outpace.datastore.corpus import TokenPiece, read_corpus, tokenise
from outpace.datastore.layout import HEADER_BYTES, SEPARATORS, Header
from outpace.datastore.store import Datastore, open_datastore
from outpace.datastore.suffixes import suffix_order

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6)
CONTEXT = st.lists(st.integers(0, 3), max_size=10)


def pieces(documents: Seq[Seq[int]]) -> Iterator[TokenPiece]:
    return (TokenPiece(list(one), begins=True) for one in documents)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def matches(documents: Seq[Seq[int]], context: Seq[int], depth: int) -> tuple[int, list[list[int]]]:
    """Length of the longest suffix of ``context`` that some document continues, and all that follows it."""
    for length in range(min(depth, len(context)), 0, -1):
        tail = list(context[len(context) - length :])
        followers = [
            list(one[at:])
            for one in documents
            for at in range(length, len(one))
            if list(one[at - length : at]) == tail
        ]  # fmt: skip
        if followers:
            return length, followers
    return 0, []


# ------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12), st.integers(1, 20))
def test_suffixes_are_sorted_by_brute_force(dtype: Any, tokens: list[int], depth: int, chunk: int) -> None:
    """Tokens of 3 stand for the end of a text; what lies beyond one is not compared."""
    end = int(np.iinfo(dtype).max)
    text = np.array([end if token == 3 else token for token in tokens] + [end], dtype)
    order = suffix_order(text, depth, chunk=chunk).tolist()
    assert sorted(order) == list(range(len(text)))

    def key(at: int) -> list[int]:
        found: list[int] = text[at : at + depth].tolist()
        return found[: found.index(end) + 1] if end in found else found

    keys = [key(at) for at in order]
    assert all(one <= other for one, other in pairwise(keys))
    assert order == suffix_order(text, depth).tolist(), "chunks are a matter of memory alone"


def test_equal_suffixes_keep_their_order() -> None:
    text = np.array([*[1, 2, 3, 4, 5] * 6, 65535], np.uint16)
    order = suffix_order(text, 4).tolist()
    assert [at for at in order if at % 5 == 0 and at <= 20] == [0, 5, 10, 15, 20]


# --------------------------------------------------------------------------------------------------- lookups


@given(DOCUMENTS.filter(any), CONTEXT, st.integers(1, 6), st.sampled_from([0, 65534, 100_000]))
def test_a_lookup_is_the_longest_match_everywhere(
    documents: list[list[int]], context: list[int], depth: int, shift: int
) -> None:
    """``shift``: ids that need two bytes, that almost fill them, and that need four."""
    documents = [[token + shift for token in one] for one in documents]
    context = [token + shift for token in context]
    store = Datastore.of(documents, depth=depth)
    length, followers = matches(documents, context, depth)
    found = store.find(context)
    if not length:
        assert found is None
        return
    assert found is not None
    assert (found.length, found.count) == (length, len(followers))
    assert sorted(store.continuations(found, 1000, 4)) == sorted(one[:4] for one in followers)
    assert store.tokens == sum(map(len, documents))
    assert list(store.documents()) == [one for one in documents if one]


def test_occurrences_are_spread_over_all_there_are() -> None:
    store = Datastore.of([[100 + number, 7, 100 + number] for number in range(100)])
    found = store.find([7])
    assert found is not None and found.count == 100
    assert [row[0] for row in store.continuations(found, 4, 1)] == [100, 125, 150, 175]


def test_nothing_crosses_the_border_of_a_document() -> None:
    store = Datastore.of([[1, 2, 3], [4, 5]])
    assert store.find([3]) is None and store.find([3, 4]) is not None
    found = store.find([2, 3, 4])
    assert found is not None
    assert (found.length, store.continuations(found, 9, 9)) == (1, [[5]])
    found = store.find([1, 2])
    assert found is not None and store.continuations(found, 9, 9) == [[3]]


def test_contexts_that_the_corpus_cannot_hold() -> None:
    store = Datastore.of([[1, 2, 3]])
    separator = SEPARATORS[2]
    for context in ([], [9], [separator], [separator, 3], [-1], [1 << 40]):
        assert store.find(context) is None
    found = store.find([1 << 40, separator, 1])
    assert found is not None and found.length == 1


def test_a_search_takes_steps_that_grow_with_the_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a lookup take microseconds, whatever the clock says: places of the index that are looked at."""
    rng = random.Random(0)
    store = Datastore.of([[rng.randrange(50) for _ in range(20_000)]])
    looked: list[int] = []
    places = store._places

    class Counted:
        def __len__(self) -> int:
            return len(places)

        def __getitem__(self, at: int) -> int:
            looked.append(at)
            return int(places[at])

    monkeypatch.setattr(store, "_places", Counted())
    assert store.find([rng.randrange(50) for _ in range(40)]) is not None
    assert len(looked) <= 3 * 15 + 2


# --------------------------------------------------------------------------------------------------- the file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.datastore"
    build_datastore(path, pieces([[1, 2, 3], [1, 2, 4, 5]]), "words", "toy")
    return path


def test_what_is_built_is_opened(place: Path) -> None:
    store = open_datastore(place, "words")
    assert list(store.documents()) == [[1, 2, 3], [1, 2, 4, 5]]
    assert (store.header.model, store.header.documents, store.header.size) == ("toy", 2, place.stat().st_size)
    assert place.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert names(place.parent) == [place.name]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_same_corpus_gives_the_same_bytes(place: Path, tmp_path: Path) -> None:
    cut = [TokenPiece([1], True), TokenPiece([2, 3], False), TokenPiece([], True), *pieces([[1, 2, 4, 5]])]
    build_datastore(tmp_path / "again", cut, "words", "toy")
    assert (tmp_path / "again").read_bytes() == place.read_bytes()


def test_large_corpora_are_settled_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some parts need two bytes a token and some four; the file has one width."""
    monkeypatch.setattr(building, "CHUNK", 4)
    documents = [[1, 2, 3, 4, 5], [70_000, 1], [], [2, 3], [65_535, 65_534], [9]]
    build_datastore(tmp_path / "store", pieces(documents), "words")
    store = open_datastore(tmp_path / "store")
    assert list(store.documents()) == [one for one in documents if one]
    assert store.header.width == 4


def refused(path: Path, *words: str, fingerprint: str | None = None) -> None:
    with pytest.raises(BadInput) as caught:
        open_datastore(path, fingerprint)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    for word in words:
        assert word in message, message


def test_another_model_s_corpus_is_refused(place: Path) -> None:
    refused(place, "tokenised for 'toy'", "outpace datastore build", fingerprint="other words")


def test_every_damaged_byte_is_seen(place: Path) -> None:
    whole = place.read_bytes()
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0x41
        place.write_bytes(broken)
        refused(place, "datastore")
    place.write_bytes(whole)
    open_datastore(place)


def test_every_length_but_the_right_one_is_seen(place: Path) -> None:
    whole = place.read_bytes()
    for length in range(len(whole)):
        place.write_bytes(whole[:length])
        refused(place, "cut short")
    place.write_bytes(whole + b"\0")
    refused(place, "damaged", "1 bytes follow its end")


@pytest.mark.parametrize(
    ("field", "value"),
    [(1, 2), (2, 0), (2, 3), (3, 0), (3, 1 << 31), (5, 0), (5, 1 << 60), (6, 0), (6, 1 << 60), (7, 7), (7, 1 << 60)],
)
def test_impossible_headers_are_refused_whatever_their_checksum(place: Path, field: int, value: int) -> None:
    whole = place.read_bytes()
    form = struct.Struct("<8sIIIIQQQ32s64s")
    fields = list(form.unpack_from(whole))
    fields[field] = value
    head = form.pack(*fields).ljust(HEADER_BYTES - 4, b"\0")
    place.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + whole[HEADER_BYTES:])
    refused(place, "outpace datastore build")


def test_what_is_no_datastore_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "does not exist")
    refused(tmp_path, "cannot read")
    for content, said in ((b"", "empty"), (b"once upon a time", "not a datastore"), (b"\0" * 5000, "not a datastore")):
        (tmp_path / "file").write_bytes(content)
        refused(tmp_path / "file", said)


@given(st.text(max_size=100))
def test_any_name_of_a_model_fits_the_header(name: str) -> None:
    header = Header(2, 32, 1, 10, 3, b"f" * 32, name.replace("\ud800", ""))
    raw = header.pack()
    assert len(raw) == HEADER_BYTES
    assert header.model.encode("utf-8", "replace").startswith(
        Header.read(raw, "it").model.encode().rstrip(b"\xef\xbf\xbd")
    )


# ----------------------------------------------------------------------------------- building, interrupted


class Failing(Exception):
    """Something that happens in the middle."""


STAGES = ["reading", "sorting", "writing"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, Failing, MemoryError])
@pytest.mark.parametrize("there", [True, False])
def test_interrupted_at_any_stage(place: Path, stage: str, error: type[BaseException], there: bool) -> None:
    before = place.read_bytes()
    if not there:
        place.unlink()
    reached = []

    def advance(what: str, done: int, total: int) -> None:
        reached.append(what)
        if what == stage:
            raise error

    with pytest.raises(error):
        build_datastore(place, pieces([[5, 6, 7]]), "words", advance=advance)
    assert reached[-1] == stage
    assert names(place.parent) == ([place.name] if there else [])
    assert not there or place.read_bytes() == before


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_disk_that_fails(place: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place.read_bytes()

    def full(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif step == "replace":
        monkeypatch.setattr(Path, "replace", full)
    else:
        monkeypatch.setattr(building, "_write_blocks", full)
    with pytest.raises(BadInput, match="No space left on device"):
        build_datastore(place, pieces([[5, 6, 7]]), "words")
    assert names(place.parent) == [place.name]
    assert place.read_bytes() == before


def test_the_file_is_on_the_disk_before_it_has_its_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        steps.append("fsync")
        fsync(handle)

    def noted_replace(one: Path, other: Path) -> Path:
        steps.append("replace")
        return replace(one, other)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    build_datastore(place, pieces([[5, 6, 7]]), "words")
    assert steps[:2] == ["fsync", "replace"]


def test_a_link_is_followed_and_a_folder_refused(place: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(place)
    build_datastore(link, pieces([[5, 6, 7]]), "words")
    assert link.is_symlink() and list(open_datastore(place).documents()) == [[5, 6, 7]]
    for target in (tmp_path, Path(os.devnull)):
        with pytest.raises(BadInput, match="name a file"):
            build_datastore(target, pieces([[5, 6, 7]]), "words")
    with pytest.raises(BadInput, match="cannot write"):
        build_datastore(tmp_path / "no folder" / "store", pieces([[5, 6, 7]]), "words")


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_empty_corpus_is_refused(documents: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the corpus is empty"):
        build_datastore(tmp_path / "store", pieces(documents), "words")
    with pytest.raises(BadInput, match="the corpus is empty"):
        Datastore.of(documents)
    assert names(tmp_path) == []


def test_single_tokens_have_nothing_to_look_up(tmp_path: Path) -> None:
    build_datastore(tmp_path / "store", pieces([[5], [6]]), "words")
    store = open_datastore(tmp_path / "store")
    assert store.header.entries == 0 and store.find([5]) is None


def test_depths_are_checked() -> None:
    for depth in (0, -1, 5000):
        with pytest.raises(BadInput, match="depth"):
            Datastore.of([[1, 2]], depth=depth)


def test_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_TOKENS", 5)
    assert Datastore.of([[1, 2, 3]]).tokens == 3
    with pytest.raises(BadInput, match="build several"):
        Datastore.of([[1, 2, 3, 4]])


# ------------------------------------------------------------------------------------------------- the files


class Bytes:
    """One token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Batches(Bytes):
    """The same, all at once; it notes how much it was given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def encode_batch(self, texts: Seq[str]) -> list[list[int]]:
        self.sizes.append(sum(map(len, texts)))
        return [self.encode(text) for text in texts]


def texts(*files: Path) -> list[str]:
    """The documents of files, put together from their pieces."""
    found: list[str] = []
    for piece in read_corpus(files):
        if piece.begins:
            found.append("")
        found[-1] += piece.text
    return found


def test_texts_and_lines_of_json(tmp_path: Path) -> None:
    text, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_bytes("\ufeffone\r\ntwo é\n".encode())
    lines = [
        {"text": "three"},
        {"prompt": "four", "id": 9},
        {"turns": ["five", "six"]},
        {"messages": [{"role": "user", "content": "seven"}, {"role": "assistant", "content": "eight"}]},
        {"text": ""},
        {"text": "n\ud800ne"},
    ]
    rows.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert texts(text, rows) == ["one\ntwo é\n", "three", "four", "five", "six", "seven", "eight", "n?ne"]


@given(st.text(alphabet="ab \n", max_size=300))
def test_long_texts_are_cut_and_nothing_is_lost(text: str) -> None:
    before = corpus._PIECE
    corpus._PIECE = 16
    try:
        for cut in (
            list(corpus._whole(io.StringIO(text))),
            list(corpus._lines(Path("x"), [json.dumps({"text": text})])),
        ):
            assert "".join(part for part, _ in cut) == text
            assert [begins for _, begins in cut] == [True, *[False] * (len(cut) - 1)][: len(cut)]
            assert all(0 < len(part) <= 16 for part, _ in cut)
            for part, _ in cut[:-1]:
                assert part.endswith("\n") or "\n" not in part
    finally:
        corpus._PIECE = before


def test_tokenising_goes_in_batches_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_BATCH", 1000)
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {number}\n" for number in range(20_000)))
    together = Batches()
    batched = [token for piece in tokenise(read_corpus([path]), together) for token in piece.tokens]
    assert batched == list(path.read_bytes())
    assert max(together.sizes) <= 1000 + corpus._PIECE
    assert batched == [token for piece in tokenise(read_corpus([path]), Bytes()) for token in piece.tokens]


def test_what_was_read_is_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "abc"}\n' * 5000)
    seen = [(piece.read, piece.size) for piece in read_corpus([tmp_path / "a.txt", tmp_path / "b.jsonl"])]
    assert seen == sorted(seen)
    assert seen[-1] == (160_000, 160_000)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("a.jsonl", b'{"text": "a"}\nnot json\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "is not UTF-8 text"),
        ("a.jsonl", b"[1]", "line 1: expected an object with one of: text, prompt, turns, messages"),
        ("a.jsonl", b'{"words": "a"}', "expected an object"),
        ("a.jsonl", b'{"text": 5}', '"text" must hold text'),
        ("a.jsonl", b'{"turns": ["a", 5]}', '"turns" must hold text'),
        ("a.jsonl", b'{"messages": [{"content": null}]}', '"messages" must hold text'),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        list(read_corpus([path]))
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        list(read_corpus([tmp_path / "none.txt"]))
    with pytest.raises(BadInput, match="is a folder"):
        list(read_corpus([tmp_path]))


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12), most=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_sample_is_spread_over_the_corpus_and_no_larger_than_asked_for(lengths: list[int], most: int) -> None:
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    documents = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]
    store = Datastore.of(documents)
    parts = list(store.sample(most))
    if most >= store.tokens:
        assert parts == documents
        return
    found = [token for part in parts for token in part]
    assert len(found) <= most and len(set(found)) == len(found) and found == sorted(found)
    for part in parts:  # each lies within one document
        assert part == list(range(part[0], part[-1] + 1)) and not set(starts) & set(part[1:])
    if most > 200:
        assert found[0] < store.tokens // 4 and found[-1] > store.tokens * 3 // 4
