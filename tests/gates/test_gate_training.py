"""outpace train pad|sprinter|bild: labels, classifiers and thresholds on toys whose truth is known; what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from cli_support import Run, refused
from outpace.core.errors import BadInput
from outpace.gates.gate import GateConfig
from outpace.heads.head_config import CONFIG, PROVENANCE, WEIGHTS
from outpace.model import Model
from outpace.targets.table import TableTarget, random_table

pytestmark = pytest.mark.usefixtures("one_thread")

PIECES = ["<end>", "1", "2", "a", "b", "x", "y", ":"]
END, ONE, TWO, A, B, _, _, COLON = range(8)


class Pieces:
    """One token a character; others are left out."""

    fingerprint = "pieces"
    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(char) for char in text if char in PIECES]

    def decode(self, ids: Seq[int]) -> str:
        return "".join(PIECES[token] for token in ids if token != END)

    def token_text(self, token: int) -> str:
        return PIECES[token]

    def token_bytes(self, token: int) -> bytes | None:
        return None if token == END else PIECES[token].encode()

    def __len__(self) -> int:
        return len(PIECES)

    def chat(self, messages: Seq[Any]) -> list[int]:
        return [*self.encode(messages[-1]["content"]), COLON]


def speller(*, draft: bool) -> Any:
    """Logits of a model that answers two letters and the right digit: 1 where the prompt has more x than y.

    The draft model writes another letter half of the time, and the wrong digit in a third of the prompts.
    """

    def logits(path: tuple[int, ...]) -> Tensor:
        found = torch.zeros(len(PIECES))
        if COLON not in path:
            return found
        start = path.index(COLON)
        prompt, said = path[:start], path[start + 1 :]
        number = random.Random(str(prompt)).randrange(6)
        right = ONE if prompt.count(5) > prompt.count(6) else TWO
        if len(said) < 2:
            token = B if draft and (number + len(said)) % 2 else A
        elif len(said) == 2:
            token = (TWO if right == ONE else ONE) if draft and number % 3 == 0 else right
        else:
            token = END
        found[token] = 4.0 + 0.2 * number
        return found

    return logits


def model(name: str, table: Any) -> Model:
    target = TableTarget(len(PIECES), table, seed=len(name), context_length=64)
    return Model(name, target, Pieces(), frozenset({END}), {"device": "cpu"})


SPELLER, DRAFT = model("speller", speller(draft=False)), model("draft", speller(draft=True))


@pytest.fixture
def tasks_file(tmp_path: Path) -> Path:
    draw, rows = random.Random(0), list[dict[str, str]]()
    while len(rows) < 240:
        text = "".join(draw.choice("xy") for _ in range(9))
        rows.append({"prompt": text, "answer": "1" if text.count("x") > text.count("y") else "2"})
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_tasks_of_two_files_may_have_the_same_ids(tasks_file: Path, tmp_path: Path) -> None:
    lines = tasks_file.read_text().splitlines()

    def right(most: int) -> int:
        """How many answers were right, of tasks in files of so many, each numbered from 0."""
        files = []
        for at in range(0, len(lines), most):
            rows = [{"id": str(number), **json.loads(one)} for number, one in enumerate(lines[at : at + most])]
            files.append(tmp_path / f"tasks-{most}-{at}.jsonl")
            files[-1].write_text("\n".join(map(json.dumps, rows)))
        made = outpace.train(
            SPELLER, "pad", tmp_path / f"gate-{most}", prompts=files, draft_model=DRAFT, answer_tokens=8
        )
        found: int = made.provenance["figures"]["right"]
        return found

    assert right(30) == right(240)


def test_pad_learns_which_rejected_tokens_cost_the_answer(tasks_file: Path, tmp_path: Path) -> None:
    made = outpace.train(
        SPELLER,
        "pad",
        tmp_path / "gate",
        prompts=[tasks_file],
        draft_model=DRAFT,
        answer_tokens=8,
        options={"hidden": 4},
    )
    figures = made.provenance["figures"]
    assert figures["right"] > 100
    assert 0.1 < figures["share"] < 0.5  # the wrong digits, of these and the other letters
    assert figures["auc"] > 0.9
    assert made.provenance["command"].startswith("outpace train pad --model speller --prompts tasks.jsonl")
    config = GateConfig.model_validate_json((made.folder / CONFIG).read_text())
    assert config.draft is None and config.target.name == "speller"
    settings = {"gate": str(made.folder), "num_draft_tokens": 4}
    right = letters = 0
    for text in (
        "xyxyxyxyx",
        "yyyxxyyxy",
        "xxxxyyyyx",
        "yyyyyxxxx",
        "xxyyxyyxx",
        "xyyyyyyyy",
        "yxxxxxxxx",
        "xyxxyxxyy",
    ):
        answer = outpace.generate(SPELLER, text, method="pad", draft_model=DRAFT, settings=settings, max_new_tokens=6)
        plain = outpace.generate(SPELLER, text, method="none", max_new_tokens=6)
        right += answer.text[-1] == plain.text[-1]
        letters += answer.text[:2] != plain.text[:2]
        assert answer.metrics["lossy"].startswith("pad(threshold=")
    assert right >= 7
    assert letters >= 2


def noisy(name: str, seed: int) -> Model:
    """A model near :data:`LOUD`: more or less so from context to context."""
    base, noise = random_table(len(PIECES), 1, sharpness=2.0), random_table(len(PIECES), seed, sharpness=1.0)
    return model(name, lambda path: base(path) + noise(path))


LOUD, QUIET = model("loud", random_table(len(PIECES), 1, sharpness=2.0)), noisy("quiet", 77)


@pytest.fixture
def open_file(tmp_path: Path) -> Path:
    draw = random.Random(1)
    rows = [{"prompt": "".join(draw.choice("12abxy") for _ in range(8))} for _ in range(150)]
    path = tmp_path / "open.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_sprinter_learns_what_the_target_accepts(open_file: Path, tmp_path: Path) -> None:
    made = outpace.train(
        LOUD,
        "sprinter",
        tmp_path / "gate",
        prompts=[open_file],
        draft_model=QUIET,
        tokens=1500,
        answer_tokens=20,
        options={"error": 0.2},
    )
    figures = made.provenance["figures"]
    assert figures["auc"] > 0.6
    assert figures["log_loss"] < figures["log_loss_of_the_share"]
    assert 0.0 < figures["standing"] < 1.0
    assert figures["error"] <= 0.2
    settings = {"gate": str(made.folder)}
    answer = outpace.generate(LOUD, "ab", method="sprinter", draft_model=QUIET, settings=settings, max_new_tokens=20)
    assert answer.metrics["lossy"].startswith("sprinter(threshold=")
    asking = outpace.generate(
        LOUD, "ab", method="sprinter", draft_model=QUIET, settings={**settings, "threshold": 1.0}, max_new_tokens=20
    )
    assert asking.tokens == outpace.generate(LOUD, "ab", method="none", max_new_tokens=20).tokens
    with pytest.raises(BadInput, match="was trained for draft model"):
        LOUD.method("sprinter", settings, draft_model=noisy("other", 3))
    with pytest.raises(BadInput, match="was trained for other weights"):
        SPELLER.method("sprinter", settings, draft_model=QUIET)


def test_bild_chooses_thresholds_within_the_limit(open_file: Path, tmp_path: Path) -> None:
    made = outpace.train(
        LOUD, "bild", tmp_path / "gate", prompts=[open_file], draft_model=QUIET, tokens=1500, answer_tokens=20
    )
    thresholds, figures = made.provenance["thresholds"], made.provenance["figures"]
    assert set(thresholds) == {"fallback", "rollback"}
    assert figures["excess_nll"] < 0.1
    assert sorted(path.name for path in made.folder.iterdir()) == [CONFIG, PROVENANCE]
    method = LOUD.method("bild", {"gate": str(made.folder)}, draft_model=QUIET)
    assert method.lossy == f"rollback(distance={thresholds['rollback']:g})"
    own = LOUD.method("bild", {"gate": str(made.folder), "rollback": 0.0}, draft_model=QUIET)
    assert own.rule.exact
    strict = outpace.train(
        LOUD,
        "bild",
        tmp_path / "strict",
        prompts=[open_file],
        draft_model=QUIET,
        tokens=800,
        answer_tokens=20,
        options={"excess_nll": 0},
    )
    assert strict.provenance["figures"]["excess_nll"] == 0.0


def test_the_same_seed_makes_the_same_gate(open_file: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"prompts": [open_file], "draft_model": QUIET, "tokens": 800, "answer_tokens": 20}
    for name in ("one", "two"):
        outpace.train(LOUD, "sprinter", tmp_path / name, **given, seed=4)
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()


# --------------------------------------------------------------------------------------------------------- commands


def test_the_command_trains_a_gate_or_says_why_not(cli: Run, tmp_path: Path, open_file: Path) -> None:
    """The toy models of the command line are one model: it accepts whatever it drafts itself."""
    common = (
        "--out",
        str(tmp_path / "gate"),
        "--prompts",
        str(open_file),
        "--draft-model",
        "toy",
        "--answer-tokens",
        "8",
    )
    same = cli("train", "sprinter", "--tokens", "300", *common)
    refused(same, "draft tokens are accepted: a gate needs at least 20, of both kinds")
    assert not (tmp_path / "gate").exists()
    ran = cli("train", "bild", "--tokens", "400", *common, "--param", "excess_nll=0.2")
    assert ran.code == 0, ran
    assert "fallback" in ran.out and "rollback" in ran.out
    assert "--method bild --param bild.gate=" in ran.out.replace("\n", "")
    again = cli("train", "bild", "--tokens", "400", *common)
    refused(again, "is not an empty folder; give --out another one")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sprinter", "--size", "tiny"], "--size is for heads; the training of a gate ('sprinter') takes --prompts"),
        (["pad", "--resume"], "--resume is for heads"),
        (["pad", "--param", "missed=2"], "gate 'pad', setting 'missed'"),
        (["bild", "--param", "nothing=2"], "has the setting 'nothing'"),
        (["bild", "--tokens", "0"], "--tokens must be at least 1"),
        (["bild", "--max-minutes", "0"], "--max-minutes must be above 0"),
        (["bild", "--answer-tokens", "0"], "--answer-tokens must be at least 1"),
        (["pad", "--prompts", "{open}"], "a gate for pad is trained on tasks whose answers can be checked"),
        (["sprinter", "--prompts", "missing.jsonl"], "cannot read prompts from missing.jsonl"),
        (["medusa", "--draft-model", "toy"], "--draft-model is for gates (bild, pad, sprinter)"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    cli: Run, tmp_path: Path, open_file: Path, argv: list[str], said: str
) -> None:
    ran = cli("train", *[one.format(open=open_file) for one in argv], "--out", str(tmp_path / "gate"))
    refused(ran, said)
    assert not (tmp_path / "gate").exists()
