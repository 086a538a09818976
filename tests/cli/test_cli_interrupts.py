"""Ctrl-C in every long command: exit code 130, and a last line that says what was done and what is kept."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_support import Letters, Run
from outpace.bench.peers import comparison
from outpace.certify import validate_head
from outpace.cli import output
from outpace.core import machine
from outpace.engine.decoder import Decoder

Patch = Callable[[pytest.MonkeyPatch], None]


def at_step(number: int) -> Patch:
    """SIGINT when the decoder steps for the ``number``-th time."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        step, count = Decoder.step, 0

        def pressed(self: Decoder) -> bool:
            nonlocal count
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGINT)
            return step(self)

        monkeypatch.setattr(Decoder, "step", pressed)

    return patch


def in_call(owner: Any, name: str) -> Patch:
    """SIGINT where a function is called."""

    def pressed(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    return lambda monkeypatch: monkeypatch.setattr(owner, name, pressed)


BENCH = ("bench", "--methods", "pld", "--prompts", "prompts.txt", "-n", "8", "--ignore-eos")
COMMANDS: list[tuple[tuple[str, ...], Patch, str]] = [
    (("generate", "abc", "-n", "8", "--ignore-eos"), at_step(1), "before the first token"),
    (("generate", "abc", "-n", "8", "--ignore-eos", "--method", "none"), at_step(4), r"none: 3 tokens, .*"),
    (("chat",), at_step(1), "the conversation is over"),
    (BENCH, at_step(3), "no prompt was finished, nothing is reported"),
    (BENCH, at_step(50), r"\d of 3 prompts done; the results cover these"),
    (("bench-peers",), in_call(comparison, "prepare"), "no prompt was finished, nothing is reported"),
    (("certify", "pld", "--cells", "4"), at_step(40), r"(\d of 4 cells done, )?nothing was kept"),
    (("certify", "pld", "--level", "greedy", "--prompts", "prompts.txt"), in_call(Decoder, "run"), "nothing was kept"),
    (
        ("tune", "dv", "--prompts", "prompts.txt", "-n", "9", "--out", "skips.json"),
        at_step(15),
        r"\d of 3 prompts .*kept",
    ),
    (("datastore", "build", "notes.txt", "--out", "store"), in_call(Letters, "encode"), "nothing was written to store"),
    (("validate-head", "."), in_call(validate_head, "validate"), "nothing was kept"),
    (("doctor",), in_call(machine, "measure_matmul"), "nothing was kept"),
]


@pytest.mark.parametrize(("argv", "patch", "said"), COMMANDS, ids=[" ".join(argv[:3]) for argv, _, _ in COMMANDS])
def test_every_command_says_what_is_kept(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], patch: Patch, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "prompts.txt").write_text("abc abc\nxyz\nuvw\n")
    patch(monkeypatch)
    ran = cli(*argv, stdin="abc\n")
    assert ran.code == 130, ran
    last = " ".join(ran.err.splitlines()[-1:])
    assert re.fullmatch(f"interrupted: {said}", last), ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "store").exists() and not (tmp_path / "skips.json").exists()


def test_a_second_press_does_not_cut_the_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed = 0

    def twice() -> Any:
        nonlocal pressed
        pressed += 1
        signal.raise_signal(signal.SIGINT)
        return output.err()

    in_call(machine, "measure_matmul")(monkeypatch)
    monkeypatch.setattr("outpace.cli.err", twice)
    ran = cli("doctor")
    assert (ran.code, pressed) == (130, 1)
    assert ran.err.splitlines()[-1] == "interrupted: nothing was kept"
