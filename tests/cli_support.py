"""What the tests of the command line share: a model without a network, and a way to run a command."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

import outpace.loading
from outpace.cli import main
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.model import Model
from outpace.models.base import Message
from outpace.targets.table import TableTarget

EOS = 0
WORDS: list[str] = ["<end>", *"abcdefghijklmnopqrstuvwxyz", " ", "\n", "é"]


class Letters:
    """One token a character; what is not in the list reads as a space."""

    fingerprint = "letters"
    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(char) if char in WORDS else WORDS.index(" ") for char in text.lower()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in ids if token != EOS)

    def token_text(self, token: int) -> str:
        return WORDS[token]

    def token_bytes(self, token: int) -> bytes | None:
        return None if token == EOS else WORDS[token].encode()

    def __len__(self) -> int:
        return len(WORDS)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("\n".join(f"{one['role'][0]} {one['content']}" for one in messages) + "\na ")


def toy(name: str = "toy", context_length: int = 400) -> Model:
    """A model whose next letter is a fixed random function of the last two."""
    target = TableTarget(len(WORDS), seed=5, context_length=context_length)
    info = {"architecture": "table", "dtype": "float32", "device": "cpu"}
    return Model(name, target, Letters(), frozenset({EOS}), info)


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs commands in this process, with the toy model in place of whatever they name."""
    monkeypatch.setattr(outpace.loading, "load", lambda name, **_: toy(name))
    monkeypatch.setattr(outpace.loading, "load_tokenizer", lambda name, **_: Letters())
    monkeypatch.setenv("COLUMNS", "100")

    def go(*argv: str, stdin: str | bytes = "") -> Ran:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return go


def refused(ran: Ran, *said: str) -> None:
    """Exit code 2, nothing on standard output, one line on standard error that says what is wrong.

    Before it may stand the stages that had begun.
    """
    assert ran.code == 2, ran
    assert ran.out == ""
    lines = [line for line in ran.err.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("error: ")
    for words in said:
        assert words in lines[0], lines[0]


class Failing:
    """A user's processor that fails after three tokens."""

    def begin(self, prompt: Sequence[int]) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def process(self, state: int, logits: Tensor) -> Tensor:
        if state == 3:
            raise ValueError("no such rule")
        return logits.clone()


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every request that is submitted from now on a processor that fails."""
    honest = Decoder.submit

    def submit(self: Decoder, request: Request) -> Generation:
        return honest(self, replace(request, params=replace(request.params, processors=(Failing(),))))

    monkeypatch.setattr(Decoder, "submit", submit)
