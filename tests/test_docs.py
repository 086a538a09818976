"""What the documents say is so: code blocks run, every figure is defined, commands and links exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import api_reference
import cli_reference
import methods_page
import outpace
import site_check
from cli_support import Run
from outpace.cli import app
from outpace.core.metrics import RequestMetrics
from outpace.methods.registry import methods
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
    assert "tokens per round" in shown
    assert len(shown) > 60


@pytest.mark.model
@pytest.mark.parametrize("name", ["docs/quickstart.md", "docs/python.md"])
def test_the_first_examples_of_the_guides_run(
    name: str, smollm2: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outpace, "load", lambda model: smollm2, raising=False)
    exec(compile(block(name), name, "exec"), {})
    assert len(capsys.readouterr().out) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_are_valid_python(page: Path) -> None:
    for code in re.findall(r"^```py(?:thon)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
        compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_figure_is_defined() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    from test_cli_bench import ROW

    for name in {*RequestMetrics().figures(), *ROW}:
        assert f"| `{name}` |" in text, f"docs/metrics.md does not define {name}"


def commands() -> list[str]:
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    return [line.strip() for line in lines if line.startswith("    outpace ")]


NOT_RUN = ("advise", "bench", "bench-peers", "doctor", "certify", "serve", "simulate", "study", "train")


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_in_the_documents_are_valid(
    cli: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command parses, and runs on a toy model unless it takes long or needs what a toy has not."""
    words = shlex.split(command, comments=True)[1:]
    if words[0] in NOT_RUN or words[0].endswith("-head") or {"bigrams", "--head", "--ray", "copy-decode"} & set(words):
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


def prose(page: Path) -> str:
    """A page without its past: what the architecture tells of version 0.1 names files that are gone."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^## Before and after\n.*?(?=^## )", "", text, flags=re.S | re.M)


_CODE = (".py", ".cpp", ".h", ".html", "", ".service")


def sources() -> list[Path]:
    folders = ("src", "tests", "benchmarks", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts]
    return [*found, *(ROOT / "deploy").iterdir()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    there = ["/" + path.relative_to(ROOT).as_posix() for path in sources()]
    named = set(re.findall(r"(?<![\w*/.-])(?:[\w.-]+/)*\w+\.py\b", prose(page)))
    # Files of the reader, which tests make.
    missing = {
        name for name in named - {"bigrams.py", "order.py"} if not any(path.endswith("/" + name) for path in there)
    }
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_code_style_are_in_the_code(page: Path) -> None:
    """Functions, classes, settings and figures: words with an underscore, and words in CamelCase."""
    texts = [path.read_text(encoding="utf-8") for path in sources() if path.suffix in _CODE]
    known = set(re.findall(r"[A-Za-z_]\w*", "\n".join([*texts, (ROOT / "pyproject.toml").read_text(encoding="utf-8")])))
    known |= {part for path in sources() for part in path.with_suffix("").parts}
    without_blocks = re.sub(r"^```.*?^```", "", prose(page), flags=re.S | re.M)
    spans = re.findall(r"`([^`]+)`", re.sub(r"[\w.-]+\.jsonl", "", without_blocks))
    words = {word for span in spans for word in re.findall(r"[A-Za-z_]\w*", span)}
    named = {word for word in words if "_" in word.strip("_") or re.match(r"[A-Z][a-z]+[A-Z]", word)}
    assert not named - known


def command_lines(page: Path) -> list[list[str]]:
    """The words of every ``outpace ...`` in code style or on a line of its own, behind ``outpace``."""
    text = re.sub(r"^ +(outpace .*)$", r"`\1`", prose(page), flags=re.M)
    return [re.sub(r"\s+#.*", "", line).split()[1:] for line in re.findall(r"`(outpace [^`]+)`", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_commands_exist(page: Path) -> None:
    for words in command_lines(page):
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        have = {"--help", "-h", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
        asked = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert not asked - have, f"{command.name}: {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_and_make_targets_exist(page: Path) -> None:
    text = prose(page)
    for line in re.findall(r"python (benchmarks/\w+\.py(?:(?!-->)[^`])*)", text):
        script, *words = re.sub(r'"[^"]*"', "", line).split()  # what is quoted is another command's
        options = [word for word in words if word.startswith("--")]
        code = (ROOT / script).read_text(encoding="utf-8")
        beside = [ROOT / "benchmarks" / f"{name}.py" for name in re.findall(r"^from (\w+) import", code, re.M)]
        code += "".join(path.read_text(encoding="utf-8") for path in beside if path.exists())
        assert not [option for option in options if f'"{option}"' not in code], line
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"`make\s+([\w-]+)", text)) <= set(targets)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_command_reference_has_every_command_and_option() -> None:
    shown = cli_reference.on_page_markdown(page("cli.md"))
    sections = dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", shown, re.M | re.S))

    def look(name: str, command: Any) -> None:
        children = getattr(command, "commands", {})
        for child, inner in children.items():
            look(f"{name} {child}".strip(), inner)
        for option in command.params if name and not children else ():
            for spelled in option.opts if option.param_type_name == "option" else ():
                assert f"<code>{spelled}</code>" in sections[name], f"{name} {spelled}"

    look("", typer.main.get_command(app))
    assert {"generate", "datastore build"} <= set(sections)
    assert "Required." in sections["generate"]
    assert "<code>256</code>" in sections["generate"], "defaults are shown"


def test_the_methods_page_has_every_method_and_setting() -> None:
    shown = methods_page.on_page_markdown(page("methods.md"))
    for info in methods():
        assert f'href="#method-{info.name}"' in shown
        section = shown.split(f"{{#method-{info.name}}}")[1].split("\n### ")[0]
        for name in info.settings.model_fields:
            assert f"<code>{name}</code>" in section, f"{info.name}.{name}"
    assert '<tr data-family="draft-model" data-trained="no" data-draft="yes" data-lossless="yes">' in shown
    assert '<tr data-family="eagle" data-trained="yes" data-draft="no" data-lossless="yes">' in shown
    assert re.search(r'<form class="filters"[^>]* hidden>', shown), (
        "without scripts there is no form, and all rows show"
    )


def test_the_api_page_has_every_public_name_once() -> None:
    marked = " ".join(re.findall(r"<!-- api: (.+?) -->", page("api.md"))).split()
    assert len(marked) == len(set(marked))
    assert set(marked) - {"*"} <= set(outpace.__all__)
    shown = api_reference.on_page_markdown(page("api.md"))
    headings = re.findall(r"^      heading: outpace\.(\w+)$", shown, re.M)
    assert sorted(headings) == sorted(name for name in outpace.__all__ if not name.startswith("__"))
    assert "<code>max_new_tokens</code>, <code>max_tokens</code>" in shown


def test_what_the_site_check_finds(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text(
        '<h2 id="there"></h2><a href="a.html#top">a</a><a href="https://example.org">x</a>'
    )
    (tmp_path / "pic.png").write_bytes(b"")
    good = '<p id="top"><img src="pic.png"><a href="b.html#there">b</a><a href="#top">top</a>'
    (tmp_path / "a.html").write_text(good)
    assert site_check.problems(tmp_path) == []
    (tmp_path / "a.html").write_text(
        f'{good}<a href="gone.html">g</a><a href="b.html#gone">g</a><img src="gone.png">'
        '<script src="https://example.org/x.js"></script><link rel="stylesheet" href="//example.org/x.css">'
        '<link rel="canonical" href="https://example.org/">'
    )
    (tmp_path / "x.css").write_text("@font-face { src: url(https://example.org/font.woff2) }")
    found = "\n".join(site_check.problems(tmp_path))
    for part in ("gone.html", "b.html#gone", "gone.png", "loads https://example.org/x.js", "loads //example.org/x.css"):
        assert part in found
    assert "x.css loads https://example.org/font.woff2" in found
    assert len(found.splitlines()) == 6


def test_no_file_holds_a_merge_that_was_not_finished() -> None:
    marks = re.compile(r"^(<{7}|>{7}) ", re.M)
    texts = [path for path in sources() if path.suffix in (".py", ".md", ".cpp", ".h", ".html", ".json")]
    pages = [ROOT / name for name in ("Makefile", "LOG.md", "CHANGELOG.md", "pyproject.toml")]
    assert not [path.name for path in (*texts, *PAGES, *pages) if marks.search(path.read_text(encoding="utf-8"))]


def test_the_makefile_reaches_for_nothing_outside_the_repository() -> None:
    assert "../" not in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_rooms_in_the_architecture_are_the_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^  (\w+(?:\.py|/))  ", text, re.M))
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "src" / "outpace").iterdir()
        if path.name not in ("__pycache__", "__main__.py", "py.typed")
    }
    assert named == there
