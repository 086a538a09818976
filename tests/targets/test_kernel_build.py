"""Kernels that cannot be built, do not load or are damaged: the generic target and one line, or built again."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dense_support import config, model_of
from outpace.targets.choice import choose_target
from outpace.targets.dense import binding, kernel_build, native_model
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.hf import HFTarget

# Stands in for the compiler: says the same version, and instead of linking hands out what was linked before.
_QUICK = """#!/bin/sh
case "$*" in
  *--version*) exec {compiler} --version ;;
  *-shared*) while [ "$1" != -o ]; do shift; done; echo >> {log}; sleep {seconds}; exec cp {library} "$2" ;;
esac
"""

_ASKED = "#!/bin/sh\n[ $1 = --version ] && exit 0; "


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test looks for the kernels again, in a cache of its own."""
    kernel_build.library()
    monkeypatch.setattr(binding, "library", kernel_build.library.__wrapped__)
    for module in (native_model, binding):
        monkeypatch.setattr(module, "calls", binding.calls.__wrapped__)
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    for name in ("CXX", "OUTPACE_NATIVE", "OUTPACE_NATIVE_FLAGS"):
        monkeypatch.delenv(name, raising=False)


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes no time; returns its log, a line for every library."""
    real = next(found for name in ("c++", "g++", "clang++") if (found := shutil.which(name)))
    log = tmp_path / "log"
    text = _QUICK.format(compiler=real, log=log, library=kernel_build.library()._name, seconds=0)
    monkeypatch.setenv("CXX", str(script(tmp_path / "quick", text)))
    return log


def falls_back(why: str) -> None:
    target, note = choose_target(model_of(config()))
    assert isinstance(target, HFTarget)
    assert why in note and "\n" not in note, note


def built() -> list[Path]:
    return sorted((Path(os.environ["OUTPACE_CACHE"]) / "native").iterdir())


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    falls_back("no C++ compiler was found; install g++ or clang++")


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_NATIVE", "0")
    falls_back("switched off by OUTPACE_NATIVE=0")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_ASKED + "printf 'In file\\nx.h:1: error: \\377 no\\nmore\\n' >&2; exit 1", "x.h:1: error"),
        (_ASKED + "printf 'killed\\nfor memory\\n' >&2; exit 1", "killed"),
        (_ASKED + "exit 7", "ends with 7"),
        ("#!/bin/sh\nexit 1", "does not run"),
        ("#!/bin/sh\nexit 0", "cannot be built"),
        ("no program", "does not run"),
    ],
    ids=["error", "killed", "silent", "no version", "makes nothing", "no program"],
)  # fmt: skip
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, why: str) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "cxx", text)))
    falls_back(why)
    assert not any(path.suffix == ".so" for path in (tmp_path / "cache").rglob("*"))
    assert not any((tmp_path / "cache").glob("native/.tmp-*"))


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("CXX", "/no/such/compiler", "'/no/such/compiler' does not run"),
        ("CXX", "   ", "does not run"),
        ("CXX", "g++ 'half", "CXX or OUTPACE_NATIVE_FLAGS cannot be read"),
        ("OUTPACE_NATIVE_FLAGS", '-O1 "half', "CXX or OUTPACE_NATIVE_FLAGS cannot be read"),
        ("OUTPACE_NATIVE_FLAGS", "--no-such-flag", "does not build the kernels"),
    ],
)
def test_settings_that_name_no_compiler(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str) -> None:
    monkeypatch.setenv(variable, value)
    falls_back(why)


def test_a_cache_that_cannot_be_written(quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flat").write_text("a file")
    for place in (tmp_path / "flat" / "cache", Path("/proc/no/cache")):
        monkeypatch.setenv("OUTPACE_CACHE", str(place))
        falls_back(f"cannot be built or loaded in '{place}")


def test_built_once(quick: Path) -> None:
    for _ in range(2):
        target, note = choose_target(model_of(config()))
        assert isinstance(target, DenseTarget) and not note
    assert len(quick.read_text()) == 1 and len(built()) == 1


def test_other_flags_are_another_library(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_build.library.__wrapped__()
    monkeypatch.setenv("OUTPACE_NATIVE_FLAGS", "-march=native -g")
    kernel_build.library.__wrapped__()
    assert len(quick.read_text()) == 2 and len(built()) == 2


@pytest.mark.parametrize("damage", ["empty", "header", "half", "almost", "bit"])
def test_a_damaged_library_is_built_again(quick: Path, damage: str) -> None:
    kernel_build.library.__wrapped__()
    (path,) = built()
    whole = path.read_bytes()
    path.unlink()  # this process has the old file mapped: it must not change under it
    if damage == "bit":
        at = len(whole) // 3
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    else:
        path.write_bytes(whole[: {"empty": 0, "header": 100, "half": len(whole) // 2, "almost": -10}[damage]])
    target, note = choose_target(model_of(config()))
    assert isinstance(target, DenseTarget) and not note
    assert built() == [path] and path.read_bytes() == whole and len(quick.read_text()) == 2


def test_two_at_once(quick: Path, tmp_path: Path) -> None:
    slow = tmp_path / "quick"
    slow.write_text(slow.read_text().replace("sleep 0", "sleep 1"))
    code = "from outpace.targets.dense.kernel_build import library; print(library()._name)"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert said == {str(path) for path in built()}, "the same library, and nothing left over"
