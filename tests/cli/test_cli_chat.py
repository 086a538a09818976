"""outpace chat, on a toy model: turns, kept K/V, commands, Ctrl-C."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

import outpace.loading
from cli_support import WORDS, Letters, Run, failing, refused, toy
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.models.base import Message
from outpace.models.transcript import transcript
from test_cli_generate import press


def test_piped_lines_are_turns(cli: Run) -> None:
    ran = cli("chat", "-n", "12", stdin="hello\n\nand again\n")
    assert ran.code == 0
    assert len(ran.err.splitlines()) == 2  # one status line a turn; the empty line is none
    first = cli("generate", "hello", "-n", "12").out
    assert ran.out.startswith(first)


def test_later_turns_keep_the_kv_of_earlier_ones(cli: Run) -> None:
    kept = re.findall(r"(\d+) of (\d+) prompt tokens reused", cli("chat", "-n", "12", stdin="one\ntwo\nthree\n").err)
    assert len(kept) == 2
    for reused, prompt in kept:
        assert 0 < int(prompt) - int(reused) <= len("u three\na ") + 2


def test_what_is_kept_does_not_change_the_answers(cli: Run) -> None:
    """Turn by turn in one conversation, or all turns replayed afresh: the same words."""
    said = cli("chat", "-n", "12", "--method", "sam", stdin="one\ntwo\n").out
    assert cli("chat", "-n", "12", "--method", "none", stdin="one\ntwo\n").out == said


def test_reset_and_exit(cli: Run) -> None:
    again = cli("chat", "-n", "12", stdin="one\n/reset\none\n/exit\nnever\n")
    assert again.code == 0
    once = cli("chat", "-n", "12", stdin="one\n").out
    assert again.out == once + once
    assert "new conversation" in again.err
    assert "kept" not in again.err


def test_turns_share_what_was_learned_and_a_reset_begins_anew(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    honest = Decoder.submit

    def spy(self: Decoder, request: Request) -> Generation:
        names.append(request.namespace)
        return honest(self, request)

    monkeypatch.setattr(Decoder, "submit", spy)
    lines = "one\ntwo\n/reset\nthree\n"
    cli("chat", "-n", "3", stdin=lines)
    first, second, third = names
    assert first == second != third
    assert "" not in names
    for named in ("mine", ""):
        names.clear()
        cli("chat", "-n", "3", "--namespace", named, stdin=lines)
        assert names == [named] * 3


def test_system_message_changes_the_prompt(cli: Run) -> None:
    assert cli("chat", "--system", "be kind", "-n", "9", stdin="one\n").code == 0


def test_a_turn_that_does_not_fit_ends_a_piped_chat(cli: Run) -> None:
    ran = cli("chat", "-n", "5", stdin="one\n" + "abc " * 200 + "\n")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("error: the prompt has")
    refused(cli("chat", stdin=b"\xff\n"), "line 1 of standard input is not UTF-8 text")


def test_ctrl_c_ends_a_piped_chat(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cli("chat", "--method", "none", stdin="one\n").out
    press(monkeypatch, at=4)
    ran = cli("chat", "--method", "none", stdin="one\ntwo\n")
    assert ran.code == 130
    assert ran.out == whole[:4] + "\n"


class Terminal(io.StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_at_a_terminal(cli: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C stops an answer and the talk goes on; what does not fit is said; unknown commands are no questions."""
    from outpace.cli import main

    press(monkeypatch, at=4)
    typed = "one\n/help\n" + "abc " * 200 + "\ntwo\n"
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert main(["chat", "--model", "toy", "--method", "none", "-n", "10"]) == 0
    captured = capsys.readouterr()
    assert "unknown command" in captured.err
    assert "error: the prompt has" in captured.err
    assert captured.err.count("tokens/round") == 2  # the interrupted answer, and the one after it


class Untemplated(Letters):
    """A base model's tokenizer: it knows texts and no conversations."""

    has_chat_template = False

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(messages[-1]["content"] if len(messages) == 1 else transcript(messages))


class SpaceFirst:
    """Answers begin with a space, as those of most models do behind a colon."""

    def begin(self, prompt: Sequence[int]) -> bool:
        return True

    def advance(self, state: bool, token: int) -> bool:
        return False

    def process(self, state: bool, logits: Tensor) -> Tensor:
        raised = logits.clone()
        raised[WORDS.index(" ")] += 100.0 * state
        return raised


@pytest.fixture
def untemplated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The toy model without a chat template; the prompts that it was given, as text."""
    prompts: list[str] = []
    honest = Decoder.submit

    def spy(self: Decoder, request: Request) -> Generation:
        prompts.append(Letters().decode(request.prompt))
        return honest(self, replace(request, params=replace(request.params, processors=(SpaceFirst(),))))

    monkeypatch.setattr(Decoder, "submit", spy)
    monkeypatch.setattr(outpace.loading, "load", lambda name, **_: replace(toy(name), tokenizer=Untemplated()))
    return prompts


def test_without_a_chat_template_the_turns_are_joined(cli: Run, untemplated: list[str]) -> None:
    ran = cli(
        "chat", "--model", "base", "-n", "9", "--method", "none", "--system", "be kind", stdin="one\ntwo\nthree\n"
    )
    assert ran.code == 0, ran
    first, second, third = untemplated
    assert first == "system  be kind\nuser  one\nassistant ", "colons are no letters of the toy's: they read as spaces"
    assert second.startswith(first)
    assert second.endswith("\nuser  two\nassistant ")
    assert third.startswith(second)
    warnings = [line for line in ran.err.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: 'base' has no chat template and may not be a chat model: turns are joined as lines of "
        "'User: ...' and 'Assistant: ...'"
    ]
    assert ran.err.count("prompt tokens reused") == 2
    kept = re.findall(r"(\d+) of (\d+) prompt tokens reused", ran.err)
    for reused, prompt in kept:
        assert int(prompt) - int(reused) <= len("\nUser: three\nAssistant:") + 1


def test_without_a_chat_template_an_answer_ends_where_the_users_next_turn_would_begin(
    cli: Run, untemplated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[tuple[str, ...]] = []
    honest = Decoder.submit

    def spy(self: Decoder, request: Request) -> Generation:
        stops.append(request.stop_strings)
        return honest(self, request)

    monkeypatch.setattr(Decoder, "submit", spy)
    cli("chat", "-n", "3", "--stop", "END", stdin="one\n")
    assert stops == [("END", "\nUser:")]


def test_a_turn_whose_processor_fails_ends_a_piped_chat_in_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch)
    ran = cli("chat", "-n", "9", "--method", "none", stdin="one\ntwo\n")
    assert ran.code == 2
    assert ran.err == "error: logits processor 'Failing' raised ValueError in process: no such rule\n"
    assert len(ran.out) == 4, "three letters, and the end of the line"
