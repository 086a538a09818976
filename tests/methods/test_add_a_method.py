"""The examples of docs/add-a-method.md, exactly as they stand on the page, as modules of somebody else's package."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cli_support import Run
from outpace.certify.exact import certify_exact, matrix, rotating_slice
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods import registry
from outpace.methods.registry import Context
from outpace.targets.table import TableTarget, random_table

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-method.md").read_text(encoding="utf-8")
CODE: list[str] = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
EXAMPLE, SETTINGS = CODE


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.methods()  # discover first, so that what is restored afterwards is complete
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def loaded(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code as a module."""
    (folder / "bigrams.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "bigrams", raising=False)
    return importlib.import_module("bigrams")


def with_settings() -> str:
    return EXAMPLE[: EXAMPLE.index("@register")] + SETTINGS


def test_the_example_is_a_whole_drafter_in_few_lines() -> None:
    assert len(EXAMPLE.splitlines()) < 35
    assert all(f"def {name}(" in EXAMPLE for name in ("begin", "propose", "observe"))


def test_the_example_is_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(EXAMPLE, tmp_path, monkeypatch)

    def make(context: Context) -> Method:
        return registry.build("bigrams", context)

    certificate = certify_exact("bigrams", make, rotating_slice(matrix(5), 5, 8))
    assert certificate.lossless is True, certificate.verdict
    assert all(check.passed for check in certificate.checks)


def test_the_example_generates_in_fewer_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(EXAMPLE, tmp_path, monkeypatch)
    target = TableTarget(12, random_table(12, 8))
    answers = []
    for name in ("none", "bigrams"):
        decoder = Decoder(target)
        one = decoder.submit(Request((1, 2), registry.build(name, Context(target)), max_new_tokens=60))
        decoder.run()
        answers.append(one.tokens)
    assert answers[0] == answers[1]
    assert one.metrics.accepted > 5 and one.metrics.rounds < 60


def test_settings_reach_the_command_line(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(with_settings(), tmp_path, monkeypatch)
    likely = ["--logit-bias", "3=6", "--logit-bias", "4=6"]  # few letters, so that bigrams come back
    ran = {}
    for method, more in (("none", []), ("bigrams", ["--param", "num_draft_tokens=6"])):
        for temperature in ("0", "1"):
            out = cli(
                "generate",
                "ab",
                *likely,
                "--method",
                method,
                *more,
                "-t",
                temperature,
                "--seed",
                "3",
                "-n",
                "80",
                "--json",
            ).out
            ran[method, temperature] = json.loads(out)
    assert ran["bigrams", "0"]["tokens"] == ran["none", "0"]["tokens"]
    assert ran["bigrams", "0"]["metrics"]["mean_acceptance_length"] > 1
    assert ran["bigrams", "1"]["metrics"]["acceptance_rate"] > 0
    shown = cli("methods", "bigrams").out
    assert "Little gain in prose" in shown and "draft tokens per round" in shown
    refused = cli("generate", "abc", "--method", "bigrams", "--param", "num_draft_tokens=-1")
    assert refused.code == 2 and "num_draft_tokens" in refused.err


def test_python_commands_on_the_page_run(tmp_path: Path) -> None:
    (tmp_path / "bigrams.py").write_text(EXAMPLE, encoding="utf-8")
    commands = re.findall(r"^    (python -c .*)$", PAGE, re.M)
    assert commands
    for command in commands:
        ran = subprocess.run(
            [sys.executable, *shlex.split(command)[1:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip() and "not lossless" not in ran.stdout
        assert ran.stderr == ""
