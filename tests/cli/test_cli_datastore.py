"""outpace datastore: files in, one file out, and one line for whatever cannot be done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import outpace.loading
from cli_support import Letters, Run, refused
from outpace.datastore.store import open_datastore


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("to be or not to be\n")
    return path


def test_built_and_looked_at(cli: Run, notes: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "store"
    rows.write_text('{"prompt": "that is the question"}\n{"turns": ["whether", "tis nobler"]}\n')
    ran = cli("datastore", "build", str(notes), str(rows), "--model", "toy", "--out", str(out), "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["documents"] == 4
    assert said["tokens"] == len("to be or not to be\nthat is the questionwhethertis nobler")
    assert said["model"] == "toy" and said["bytes"] == out.stat().st_size and said["seconds"] >= 0
    store = open_datastore(out, Letters.fingerprint)
    assert next(Letters().decode(one) for one in store.documents()) == "to be or not to be\n"

    looked = json.loads(cli("datastore", "info", str(out), "--json").out)
    assert looked == {key: value for key, value in said.items() if key != "seconds"}
    shown = cli("datastore", "info", str(out)).out
    assert "tokenised for" in shown and "toy" in shown
    assert "built in" in cli("datastore", "build", str(notes), "--out", str(out)).out


def test_alone_it_explains_itself(cli: Run) -> None:
    ran = cli("datastore")
    assert ran.code == 0 and "build" in ran.out and "info" in ran.out
    assert "datastore" in cli("--help").out


def test_bad_input_is_one_line_and_leaves_nothing(cli: Run, notes: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    empty, binary, wrong = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "wrong.jsonl"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00\x01")
    wrong.write_text('{"words": 1}\n')
    there = {path.name for path in tmp_path.iterdir()}
    for files, said in (
        ([empty], "the corpus is empty"),
        ([binary], "not UTF-8"),
        ([wrong], "line 1: expected an object"),
        ([tmp_path], "is a folder"),
        ([tmp_path / "none.txt"], "there is no file"),
        ([notes, tmp_path / "none.txt"], "there is no file"),
        ([], "Missing argument"),
    ):
        refused(cli("datastore", "build", *map(str, files), "--out", str(out)), said)
    refused(cli("datastore", "build", str(notes), "--out", str(notes)), "one of the files to read")
    refused(cli("datastore", "build", str(notes), "--out", str(tmp_path)), "it is a folder")
    refused(cli("datastore", "build", str(notes), "--out", str(tmp_path / "no" / "store")), "there is no folder")
    refused(cli("datastore", "build", str(notes), "--out", str(out), "--depth", "0"), "depth")
    refused(cli("datastore", "build", str(notes)), "--out")
    assert {path.name for path in tmp_path.iterdir()} == there
    assert notes.read_text() == "to be or not to be\n"


def test_damage_is_said_by_info(cli: Run, notes: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    cli("datastore", "build", str(notes), "--out", str(out))
    whole = out.read_bytes()
    for content, said in (
        (b"", "empty"),
        (whole[:-1], "cut short"),
        (whole[:-1] + b"?", "damaged"),
        (b"x" * 99, "not"),
    ):
        out.write_bytes(content)
        refused(cli("datastore", "info", str(out)), said, str(out))
    refused(cli("datastore", "info", str(tmp_path / "none")), "does not exist")


def test_interrupted_it_leaves_nothing(cli: Run, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Letters):
        def encode(self, text: str) -> list[int]:
            raise KeyboardInterrupt

    monkeypatch.setattr(outpace.loading, "load_tokenizer", lambda name, **_: Slow())
    ran = cli("datastore", "build", str(notes), "--out", str(tmp_path / "store"))
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == f"interrupted: nothing was written to {tmp_path / 'store'}"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


SLOW = """
import sys, time
import outpace.loading
import outpace.datastore.build as building
from outpace.cli import main
sys.path.insert(0, sys.argv[1])
from cli_support import Letters
outpace.loading.load_tokenizer = lambda name, **_: Letters()
write = building._write_blocks
def slowly(file, blocks):
    write(file, blocks)
    print("writing", flush=True)
    time.sleep(60)
building._write_blocks = slowly
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_ctrl_c_while_the_file_is_written(notes: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    out.write_bytes(b"what was there")
    command = [
        sys.executable,
        "-c",
        SLOW,
        str(Path(__file__).parents[1]),
        "datastore",
        "build",
        str(notes),
        "-o",
        str(out),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        assert len(list(tmp_path.iterdir())) == 3, "the temporary file lies beside"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "store"]
    assert out.read_bytes() == b"what was there"


def test_what_was_there_is_replaced(cli: Run, notes: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    out.write_bytes(b"something else")
    assert cli("datastore", "build", str(notes), "--out", str(out)).code == 0
    before = open_datastore(out)
    notes.write_text("or to take arms")
    assert cli("datastore", "build", str(notes), "--out", str(out)).code == 0
    assert Letters().decode(next(before.documents())) == "to be or not to be\n", "who has it open keeps the old one"
    assert Letters().decode(next(open_datastore(out).documents())) == "or to take arms"


@pytest.mark.model
def test_the_tokenizer_is_loaded_without_the_weights() -> None:
    from outpace.loading import load, load_tokenizer

    words, model = load_tokenizer("smollm2"), load("smollm2")
    assert words.fingerprint == model.tokenizer.fingerprint
    assert words.encode("Why is the sky blue?") == model.tokenizer.encode("Why is the sky blue?")
