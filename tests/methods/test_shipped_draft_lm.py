"""The draft LM that is shipped for a model is its default draft model, and --draft-model takes any draft LM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_support import Run, refused, toy
from outpace.api.calls import generate
from outpace.core.errors import BadInput
from outpace.heads import shipped
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.kinds import find_kind, plan
from outpace.methods.learned.distill.target import HeadTarget
from outpace.model import Model
from outpace.targets.table import TableTarget

METHODS = ("draft-model", "rsd", "sampled-tree", "specinfer", "hsd", "hetvocab")


def written(model: Model, folder: Path, kind: str = "draft-lm", vocabulary: int = 16, seed: int = 0) -> Path:
    """A head without training for this very model, on disk."""
    config = plan(find_kind(kind), facts(model.target, model.name), size="tiny", vocabulary=vocabulary)
    save(new_head(config, model.target, torch.arange(vocabulary), seed), folder, {})
    return folder


@pytest.fixture
def with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The toy model, for which a draft LM of 16 tokens is shipped."""
    model = toy()
    written(model, tmp_path / "shipped" / "toy-draft-lm")
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    return model


def drafts_of(model: Model, name: str, **named: Any) -> Any:
    found: Any = model.method(name, **named).drafter
    return found.draft


@pytest.mark.parametrize("name", METHODS)
def test_methods_with_a_draft_model_run_out_of_the_box(name: str, with_one: Model) -> None:
    plain = generate(with_one, "abc abc", method="none", max_new_tokens=20)
    found = generate(with_one, "abc abc", method=name, max_new_tokens=20)
    assert found.tokens == plain.tokens
    assert found.metrics["drafting_rounds"] > 0
    assert with_one.method(name).drafts_with == ("the shipped draft model 'draft-lm'",)
    generate(with_one, "abc abc", method=name, max_new_tokens=20, temperature=0.9)


def test_which_draft_model_it_is(with_one: Model, tmp_path: Path) -> None:
    own = str(written(with_one, tmp_path / "own", vocabulary=9))
    by_default, by_name, by_folder = (
        drafts_of(with_one, "draft-model"),
        drafts_of(with_one, "draft-model", draft_model="draft-lm"),
        drafts_of(with_one, "draft-model", draft_model=own),
    )
    assert all(isinstance(one, HeadTarget) for one in (by_default, by_name, by_folder))
    assert [len(one.d2t) for one in (by_default, by_name, by_folder)] == [16, 16, 9]
    assert isinstance(drafts_of(with_one, "draft-model", draft_model=toy("other")), TableTarget)
    assert len(drafts_of(with_one, "draft-model", head=own).d2t) == 9, "a draft LM that --head names comes first"
    both = with_one.method(
        "merge", {"parts": ["rsd#mine", "rsd#theirs"]}, draft_model={"mine": own, "theirs": "draft-lm"}
    )
    parts: Any = both.drafter
    assert [len(part.draft.d2t) for part in parts.parts] == [9, 16]
    with pytest.raises(BadInput, match="is a head of kind eagle3, which is no language model"):
        with_one.method("draft-model", draft_model=str(written(with_one, tmp_path / "eagle", "eagle3")))
    with pytest.raises(BadInput, match=r"load a draft model with outpace\.load"):
        with_one.method("draft-model", draft_model="somewhere")


def test_only_for_the_weights_that_it_was_made_for(with_one: Model) -> None:
    other = Model("other", TableTarget(with_one.target.vocab_size, seed=99), with_one.tokenizer, frozenset())
    with pytest.raises(BadInput, match="needs a draft model, and none is shipped for this model: give --draft-model"):
        other.method("draft-model")
    with pytest.raises(BadInput, match="no draft LM is shipped for 'other'"):
        other.method("draft-model", draft_model="draft-lm")


def test_it_is_no_part_that_nobody_asked_for(with_one: Model) -> None:
    """Methods that take a draft model where one was named do not take a shipped one."""
    assert with_one.method("triforce").drafts_with == ()
    assert with_one.method("auto").drafts_with != ("the shipped draft model 'draft-lm'",)


def test_commands_take_it(cli: Run, with_one: Model, tmp_path: Path) -> None:
    own = str(written(with_one, tmp_path / "own", vocabulary=9))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc abc abc\n")
    common = ["--prompts", str(prompts), "-n", "8", "--json", "-"]
    ran = cli("bench", "--methods", "draft-model,rsd,specinfer,hsd", *common)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert [row["error"] for row in told["methods"]] == [None] * 5
    assert all(row["drafting_rounds"] for row in told["methods"][1:])
    assert told["settings"]["drafts_with"]["rsd"] == ["the shipped draft model 'draft-lm'"]
    ran = cli("bench", "--methods", "draft-model#mine", "--draft-model", f"mine={own}", *common)
    assert json.loads(ran.out)["settings"]["drafts_with"] == {"draft-model#mine": ["draft model 'mine'"]}
    assert cli("generate", "abc", "--method", "rsd", "--draft-model", "draft-lm", "-n", "3").code == 0
    eagle = str(written(with_one, tmp_path / "eagle", "eagle3"))
    refused(cli("generate", "abc", "--method", "rsd", "--draft-model", eagle), "kind eagle3", "--head")
    shown = cli("methods", "rsd").out
    assert "a draft model (shipped for toy)" in shown
