"""outpace generate, on a toy model: the JSON contract, streaming, --explain, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import outpace.loading
from cli_support import EOS, WORDS, Letters, Ran, Run, failing, refused, toy
from outpace.cli.explain import ACCEPTED, BONUS, CORRECTION, PLAIN, kinds
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import TokenTree
from outpace.engine.request import RoundTrace as Round
from outpace.methods.registry import Context
from outpace.model import Model
from outpace.models.base import Message
from outpace.targets.table import TableTarget

PROMPT = "abc abc abc abc"


def answer(cli: Run, *argv: str, stdin: str = "") -> dict[str, Any]:
    ran = cli("generate", PROMPT, "--json", *argv, stdin=stdin)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.parametrize("method", ["none", "pld", "sam"])
def test_json_is_the_contract(cli: Run, method: str) -> None:
    found = answer(cli, "--method", method, "--max-new-tokens", "40")
    assert set(found) == {"text", "tokens", "finish_reason", "metrics"}
    assert len(found["tokens"]) <= 40
    assert EOS not in found["tokens"]
    assert found["text"] == "".join(WORDS[token] for token in found["tokens"])
    assert set(RequestMetrics().figures()) <= set(found["metrics"])
    assert found["metrics"]["method"] == method
    assert found["metrics"]["tokens"] == len(found["tokens"])
    assert sum(found["metrics"]["time_split"].values()) == pytest.approx(1)


def test_every_method_says_the_same_and_the_text_is_the_json_s(cli: Run) -> None:
    plain = answer(cli, "--method", "none", "-n", "60")["tokens"]
    assert answer(cli, "--method", "pld", "-n", "60")["tokens"] == plain
    assert answer(cli, "--method", "sam", "-n", "60")["tokens"] == plain
    shown = cli("generate", PROMPT, "-n", "60")
    assert shown.out == "".join(WORDS[token] for token in plain) + "\n"
    assert "tokens/round" in shown.err


def test_standard_input_is_the_prompt(cli: Run) -> None:
    argument = cli("generate", "hello", "--json", "-n", "9")
    piped = cli("generate", "-", "--json", "-n", "9", stdin="hello\n")
    assert json.loads(argument.out)["tokens"] == json.loads(piped.out)["tokens"]


def test_raw_and_system_change_the_prompt(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Listening(Letters):
        def encode(self, text: str) -> list[int]:
            seen.append(text)
            return super().encode(text)

        def chat(self, messages: Sequence[Message]) -> list[int]:
            seen.append(messages)
            return super().chat(messages)

    def load(name: str, **_: object) -> Model:
        model = toy(name)
        model.tokenizer = Listening()
        return model

    monkeypatch.setattr(outpace.loading, "load", load)
    cli("generate", "hi", "-n", "1")
    assert seen[0] == [{"role": "user", "content": "hi"}]
    seen.clear()
    cli("generate", "hi", "-n", "1", "--system", "be brief")
    assert seen[0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    seen.clear()
    assert cli("generate", "--raw", "-n", "1", "--", "- hi\n").code == 0
    assert seen == ["- hi\n"]
    refused(cli("generate", "- hi", "--raw"), "put -- before a prompt that begins with a dash")


def test_seeds(cli: Run) -> None:
    said = [answer(cli, "-t", "1", "--seed", seed, "-n", "30")["tokens"] for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]


def test_stop_strings_and_bias_and_logprobs(cli: Run) -> None:
    text = answer(cli, "-n", "30")["text"]
    stop = text[8:10]
    assert answer(cli, "-n", "30", "--stop", stop)["text"] == text[: text.index(stop)]
    biased = answer(cli, "-n", "5", "--logit-bias", "3=1000")
    assert biased["tokens"] == [3] * 5
    told = answer(cli, "-n", "6", "--logprobs", "2", "--method", "sam")
    assert [one["token"] for one in told["logprobs"]] == told["tokens"]
    assert all(len(one["top"]) == 2 and one["logprob"] <= 0 for one in told["logprobs"])
    assert "most likely" in cli("generate", PROMPT, "-n", "3", "--logprobs", "2").out


def test_input_that_only_the_model_can_refuse(cli: Run) -> None:
    refused(cli("generate", "abc " * 200), "the prompt has", "tokens")
    refused(cli("generate", "x", "--logit-bias", "99=1"), "vocabulary")
    refused(cli("generate", "x", "--method", "draft-model"), "--draft-model")


def test_a_draft_model(cli: Run) -> None:
    told = answer(cli, "--method", "draft-model", "--draft-model", "toy", "-n", "20")
    assert told["metrics"]["mean_acceptance_length"] > 1  # it drafts with itself
    assert told["tokens"] == answer(cli, "--method", "none", "-n", "20")["tokens"]


def test_several_draft_models_reach_the_method(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    honest = Model.context

    def spy(self: Model, **options: Any) -> Context:
        found = honest(self, **options)
        seen.append([one.name for one in found.bindings.draft_models])
        return found

    monkeypatch.setattr(Model, "context", spy)
    answer(cli, "--method", "draft-model", "--draft-model", "toy", "--draft-model", "other", "-n", "3")
    assert ["toy", "other"] in seen


def test_a_datastore_is_opened_when_a_method_asks_for_it(cli: Run, tmp_path: Path) -> None:
    text, path = tmp_path / "corpus.txt", tmp_path / "corpus.store"
    text.write_text(answer(cli, "-n", "40")["text"])
    assert cli("datastore", "build", str(text), "--out", str(path)).code == 0
    told = answer(cli, "--method", "rest", "--param", "nodes=4", "--datastore", str(path), "-n", "20")
    assert told["tokens"] == answer(cli, "--method", "none", "-n", "20")["tokens"]
    assert told["metrics"]["drafting_rounds"] > 0
    assert cli("chat", "--method", "rest", "--datastore", str(path), "-n", "3", stdin="abc\n").code == 0
    refused(cli("generate", PROMPT, "--method", "rest"), "--datastore PATH")


def test_a_datastore_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(name: str, **_: Any) -> Model:
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr(outpace.loading, "load", never)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"not a datastore")
    for command in (["generate", PROMPT], ["chat"], ["bench"], ["certify", "pld", "--level", "greedy"]):
        refused(cli(*command, "--datastore", str(tmp_path / "nowhere")), "does not exist")
        refused(cli(*command, "--datastore", str(damaged)), "damaged")


def test_explain(cli: Run) -> None:
    ran = cli("generate", PROMPT, "--explain", "-n", "40", "--method", "pld")
    assert ran.code == 0
    assert "drafted, and rejected" in ran.out
    assert all(len(line) <= 100 for line in ran.out.splitlines())
    tokens = answer(cli, "--method", "pld", "-n", "40")["tokens"]
    shown = ran.out.replace("\n", "").replace(" ", "")
    assert "".join(WORDS[token] for token in tokens).replace("\n", "").replace(" ", "") in shown
    assert f"{len(tokens)} tokens in" in ran.out or f"{len(tokens) + 1} tokens (the end included) in" in ran.out
    both = cli("generate", PROMPT, "--explain", "--json", "-n", "10")
    assert json.loads(both.out)["tokens"]
    assert "drafted, and rejected" in both.err


def test_kinds_of_tokens() -> None:
    chain = TokenTree.chain([5, 6])
    assert kinds(Round(TokenTree(), (), (9,))) == [PLAIN]
    assert kinds(Round(chain, (), (9,))) == [CORRECTION]
    assert kinds(Round(chain, (0,), (5, 9))) == [ACCEPTED, CORRECTION]
    assert kinds(Round(chain, (0, 1), (5, 6, 9))) == [ACCEPTED, ACCEPTED, BONUS]
    assert kinds(Round(chain, (0, 1), (5,))) == [ACCEPTED]  # cut at a stop


class Pressed(TableTarget):
    """Presses Ctrl-C in its n-th forward."""

    def __init__(self, at: int) -> None:
        super().__init__(len(WORDS), seed=5, context_length=400)
        self.at, self.forwards = at, 0

    def score(self, *args: Any, **options: Any) -> Any:
        self.forwards += 1
        if self.forwards == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().score(*args, **options)


def press(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    def load(name: str, **_: object) -> Model:
        model = toy(name)
        model.target = Pressed(at)
        return model

    monkeypatch.setattr(outpace.loading, "load", load)


def test_ctrl_c_prints_what_there_is(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cli("generate", PROMPT, "--method", "none", "-n", "30").out
    press(monkeypatch, at=5)
    ran = cli("generate", PROMPT, "--method", "none", "-n", "30")
    assert ran.code == 130
    assert ran.out == whole[:5] + "\n"
    assert "interrupted" in ran.err
    assert "Traceback" not in ran.err
    told = cli("generate", PROMPT, "--method", "none", "-n", "30", "--json")
    assert told.code == 130
    found = json.loads(told.out)
    assert found["complete"] is False
    assert found["text"] == whole[:5]


@pytest.mark.parametrize("extra", [[], ["--explain"]])
def test_ctrl_c_before_the_first_token(cli: Run, monkeypatch: pytest.MonkeyPatch, extra: list[str]) -> None:
    press(monkeypatch, at=1)
    ran: Ran = cli("generate", PROMPT, "--json", *extra)
    assert ran.code == 130
    assert json.loads(ran.out) == {"text": "", "tokens": [], "metrics": RequestMetrics().figures(), "complete": False}
    silent = cli("generate", PROMPT)
    assert silent.code == 130
    assert "Traceback" not in silent.err


@pytest.mark.parametrize("method", ["none", "sam"])
def test_a_processor_that_fails_is_said_in_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    failing(monkeypatch)
    ran = cli("generate", PROMPT, "--method", method, "-n", "30")
    assert (ran.code, len(ran.out)) == (2, 4)
    assert ran.err == "error: logits processor 'Failing' raised ValueError in process: no such rule\n"
    refused(cli("generate", PROMPT, "--method", method, "--json"), "logits processor 'Failing' raised ValueError")
    explained = cli("generate", PROMPT, "--method", method, "--explain")
    assert explained.code == 2
    assert explained.err.count("error:") == 1
