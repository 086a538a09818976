"""Methods are found, listed and described without torch: the command line answers at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("accelerate", "gguf", "numpy", "safetensors", "scipy", "torch", "transformers")
REPORT = f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"


def loaded(program: str) -> list[str]:
    """Which of ``HEAVY`` an interpreter has imported after ``program``, which sees ``sys`` and ``main``."""
    code = f"import sys\nfrom outpace.cli import main\n{program}\n{REPORT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stderr.splitlines()[-1].replace("'", '"'))
    return found


def test_declaring_every_method_imports_nothing_heavy() -> None:
    program = "from outpace.methods.registry import methods\nassert len(methods()) > 30"
    assert loaded(program) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["methods"],
        ["methods", "--json"],
        ["methods", "eagle3"],
        ["methods", "draft-model"],
        ["methods", "nothing"],
        ["generate", "x", "--method", "nothing"],
    ],
    ids=" ".join,
)
def test_commands_about_methods_import_nothing_heavy(arguments: list[str]) -> None:
    assert loaded(f"main({arguments!r})") == []


def test_a_packages_own_method_may_import_torch_at_its_top(tmp_path: Path) -> None:
    """A method of another package needs no care for this; its settings may be named in a string or not."""
    (tmp_path / "elsewhere.py").write_text(
        "import torch\n"
        "from pydantic import BaseModel\n"
        "from outpace.methods.registry import Context, Parts, register\n"
        "class Settings(BaseModel):\n"
        "    scale: float = float(torch.ones(1))\n"
        "@register('elsewhere', family='x', paper='-', summary='s')\n"
        "def build(context: Context, settings: Settings) -> Parts:\n"
        "    raise NotImplementedError\n"
    )
    (tmp_path / "elsewhere-1.dist-info").mkdir()
    (tmp_path / "elsewhere-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    (tmp_path / "elsewhere-1.dist-info" / "entry_points.txt").write_text("[outpace.methods]\nelsewhere = elsewhere\n")
    program = (
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from outpace.methods.registry import find\n"
        "assert list(find('elsewhere').settings.model_fields) == ['scale']"
    )
    assert loaded(program) == ["numpy", "torch"]
