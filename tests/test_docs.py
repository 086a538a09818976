"""What the documents say is so: code blocks run, every figure is defined, commands and links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import outpace
from cli_support import Run
from outpace.core.metrics import RequestMetrics
from outpace.model import Model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def block(page: str, language: str = "python") -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)
    assert len(found) == 1, f"{page} should have one block of {language}"
    return str(found[0])


@pytest.mark.model
def test_the_readme_s_ten_lines_run(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = block("README.md")
    assert len(code.strip().splitlines()) <= 10
    monkeypatch.setattr(outpace, "load", lambda name: smollm2, raising=False)
    exec(compile(code, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "tokens a round" in shown
    assert len(shown) > 60


def test_every_figure_is_defined() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    from test_cli_bench import ROW

    for name in {*RequestMetrics().figures(), *ROW}:
        assert f"| `{name}` |" in text, f"docs/metrics.md does not define {name}"


def commands() -> list[str]:
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    return [line.strip() for line in lines if line.startswith("    outpace ")]


NOT_RUN = ("bench", "bench-peers", "doctor", "certify", "train")


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_in_the_documents_are_valid(
    cli: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command parses, and runs on a toy model unless it takes long or needs what a toy has not."""
    words = shlex.split(command, comments=True)[1:]
    if words[0] in NOT_RUN or words[0].endswith("-head") or "bigrams" in words or "--head" in words:
        words.append("--help")  # behind its options, which are parsed first
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("notes")
    if "notes.datastore" in words:
        assert cli("datastore", "build", "notes.txt", "--out", "notes.datastore").code == 0
    stdin = "what is this?"
    if "<" in words:
        words = words[: words.index("<")]
    ran = cli(*words, stdin=stdin)
    assert ran.code == 0, ran.err


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_rooms_in_the_architecture_are_the_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^  (\w+(?:\.py|/))  ", text, re.M))
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "src" / "outpace").iterdir()
        if path.name not in ("__pycache__", "__main__.py", "py.typed")
    }
    assert named == there
