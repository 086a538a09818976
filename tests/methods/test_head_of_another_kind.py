"""A head of another kind than a method asks for is refused; a shipped head never takes its place unsaid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli_support import Run, refused, toy
from outpace.core.errors import BadInput
from outpace.heads import shipped
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.kinds import find_kind, plan
from outpace.model import Model

SMALL = {"max_nodes": 3, "depth": 2, "topk": 2}


def written(kind: str, model: Model, folder: Path, seed: int = 0) -> Path:
    """A head without training for this very model, on disk."""
    config = plan(find_kind(kind), facts(model.target, "toy"), size="tiny", vocabulary=16)
    save(new_head(config, model.target, torch.arange(16), seed), folder, {})
    return folder


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Folders by kind; an eagle3 and a medusa head are shipped for the toy model besides."""
    model = toy()
    for kind in ("eagle3", "medusa"):
        written(kind, model, tmp_path / "shipped" / f"toy-{kind}", seed=7)
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    return {kind: str(written(kind, model, tmp_path / kind)) for kind in ("eagle3", "medusa", "bpd")}


def test_a_named_head_of_another_kind_is_refused(heads: dict[str, str]) -> None:
    model = toy()
    model.method("eagle3", SMALL)  # the shipped one
    model.method("eagle3", SMALL, head=[heads["medusa"], heads["eagle3"]])
    for method in ("eagle3", "merge"):
        settings = SMALL if method == "eagle3" else {"parts": ["sam", "eagle3"], "settings": {"eagle3": SMALL}}
        with pytest.raises(BadInput, match="'eagle3' drafts with a head of kind eagle3, and --head gave medusa"):
            model.method(method, settings, head=heads["medusa"])
    with pytest.raises(BadInput, match="of kind bpd"):
        model.method("auto", {"learned": ["eagle3", "medusa"]}, head=heads["bpd"])


def test_commands_refuse_it_too(cli: Run, heads: dict[str, str]) -> None:
    said = ("'eagle3'", "kind eagle3", "--head gave medusa")
    refused(cli("generate", "abc", "--method", "eagle3", "--head", heads["medusa"], "-n", "3"), *said)
    refused(cli("bench", "--methods", "eagle3,pld", "--head", heads["medusa"], "--limit", "1", "-n", "3"), *said)


def test_where_another_method_drafts_with_the_head_the_shipped_one_is_used_and_named(
    cli: Run, heads: dict[str, str]
) -> None:
    prompts = Path(heads["bpd"]).parent / "prompts.txt"
    prompts.write_text("abc abc abc\n")
    common = ["bench", "--methods", "eagle3,medusa,pld", "--prompts", str(prompts), "-n", "4"]
    ran = cli(*common, "--head", f"mine={heads['medusa']}")
    assert ran.code == 0, ran.err
    assert "eagle3 drafts with the shipped head 'eagle3'" in ran.out
    assert "medusa drafts with head 'mine' (medusa)" in ran.out
