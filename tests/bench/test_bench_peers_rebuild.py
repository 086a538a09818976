"""bench-peers and a compiled library that this CPU does not run: another build, made once and kept in the cache."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from outpace.bench.peers import rebuild
from outpace.bench.peers.entries import Answer, Entry, Question
from outpace.bench.peers.peers_report import PeersReport
from outpace.bench.peers.rebuild import FOR_THIS_CPU, WITHOUT_TILES, rebuilt, remedy_for
from outpace.bench.peers.round_robin import RoundRobin
from outpace.bench.peers.workers import pip_build
from peers_support import QUESTIONS, comparison_of, fake, plan_of, run_of

PIP = """
import os, pathlib, sys, time

arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    print(os.environ["CFLAGS"], *arguments, sep="|", file=log)
if {broken!r} == "slow":
    time.sleep(60)
if {broken!r}:
    print("  error: subprocess-exited-with-error")
    print("  CMake Error at CMakeLists.txt:3 (project):")
    print("    No CMAKE_CXX_COMPILER could be found.")
    print("ERROR: Failed building wheel for llama-cpp-python")
    raise SystemExit(1)
folder = pathlib.Path(arguments[arguments.index("--target") + 1])
(folder / "rebuilt").touch()
"""


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A CPU with tiles, an installed llama-cpp-python, and an empty cache, whose folder this is."""
    monkeypatch.setattr(rebuild, "cpu_flags", lambda: frozenset({"avx2", "amx_tile"}))
    monkeypatch.setattr(rebuild, "version", lambda name: "0.3.36")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch: pytest.MonkeyPatch, place: Path, *, broken: bool | str = False) -> Path:
    """Let `python -m pip` in workers be this one; returns its log."""
    package = place / "pip_of_the_test" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PIP.format(log=str(place / "pip.log"), broken=broken))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return place / "pip.log"


@pytest.mark.parametrize("mode", ["crashes while loading", "crashes"])
def test_a_build_that_crashes_on_tiles_is_built_without_them(
    amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    log = fake_pip(monkeypatch, tmp_path)
    told: list[str] = []
    process = fake(tmp_path, mode, compiled="llama-cpp-python")
    plan = plan_of(process, fake(tmp_path, "good"))
    run = run_of(plan)
    run.on_note = lambda text: told.append(f"{text} {log.exists()}")
    assert run.go() is True
    mended, good = plan.entries
    assert mended.error is None
    assert set(mended.answers) == set(good.answers) == {question.id for question in QUESTIONS}
    doing = "loading" if "loading" in mode else "answering prompt 2"
    [line] = told
    assert line.startswith(f"llama-cpp-python: the process ended by SIGSEGV while {doing}")
    assert line.endswith("built again without AMX tiles, once; this takes some minutes. False"), "said before it begins"
    assert (mended.note or "").startswith(
        "rebuilt without AMX tiles: with the installed build the process ended by SIGSEGV"
    )
    [ran] = log.read_text().splitlines()
    flags, *arguments = ran.split("|")
    assert "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" in flags
    assert {"--no-deps", "--no-cache-dir", "--no-binary"} < set(arguments)
    assert arguments[-1] == "llama-cpp-python==0.3.36"
    [folder] = [one for one in (amx / "builds").iterdir() if one.is_dir()]
    assert process.build == str(folder)

    again = plan_of(fake(tmp_path, mode, compiled="llama-cpp-python"))
    second = run_of(again)
    second.on_note = told.append
    assert second.go() is True
    assert again.entries[0].error is None
    assert len(told) == len(log.read_text().splitlines()) == 1, "the second time it is in the cache"


def test_a_build_that_fails_too_leaves_both_reasons(amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, tmp_path, broken=True)
    plan = plan_of(fake(tmp_path, "crashes while loading", compiled="llama-cpp-python"), fake(tmp_path, "good"))
    assert run_of(plan).go() is True
    bad, good = plan.entries
    first, _, second = (bad.error or "").partition("; building it again without AMX tiles failed: ")
    assert first.startswith("the process ended by SIGSEGV while loading")
    reason = "CMake Error at CMakeLists.txt:3 (project): No CMAKE_CXX_COMPILER could be found."
    assert second == f"RuntimeError: {reason}"
    assert good.error is None
    assert [one.name for one in (amx / "builds").iterdir()] == [".lock"], "nothing half-built remains"


def test_one_that_crashes_in_any_build_is_built_once(
    amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = fake_pip(monkeypatch, tmp_path)
    plan = plan_of(fake(tmp_path, "crashes while loading always", compiled="llama-cpp-python"))
    run_of(plan).go()
    error = plan.entries[0].error or ""
    assert error.count("ended by SIGSEGV while loading") == 2
    assert "; rebuilt without AMX tiles, the process ended by" in error
    assert len(log.read_text().splitlines()) == 1


def test_the_time_limit_ends_a_build(amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = fake_pip(monkeypatch, tmp_path, broken="slow")
    plan = plan_of(fake(tmp_path, "crashes while loading", compiled="llama-cpp-python"))
    comparison = comparison_of(plan, max_minutes=1)
    clock = comparison.limit.clock
    comparison.limit.clock = lambda: clock() + (59 if log.exists() else 0)
    began = time.monotonic()
    assert comparison.run().complete is False
    assert log.exists()
    assert time.monotonic() - began < 50
    assert [one.name for one in (amx / "builds").iterdir()] == [".lock"]
    assert not [one for one in psutil.Process().children(recursive=True) if "pip" in one.cmdline()]


def test_a_library_that_is_not_compiled_here_is_not_built(
    amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = fake_pip(monkeypatch, tmp_path)
    plan = plan_of(fake(tmp_path, "crashes while loading"))
    run_of(plan).go()
    assert (plan.entries[0].error or "").startswith("the process ended by SIGSEGV while loading")
    assert not log.exists()


def test_which_deaths_another_build_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "cpu_flags", lambda: frozenset({"amx_tile"}))
    assert remedy_for(signal.SIGSEGV) == remedy_for(signal.SIGILL) == WITHOUT_TILES
    assert remedy_for(signal.SIGKILL) is remedy_for(None) is None
    monkeypatch.setattr(rebuild, "cpu_flags", lambda: frozenset({"avx2"}))
    assert remedy_for(signal.SIGSEGV) is None
    assert remedy_for(signal.SIGILL) == FOR_THIS_CPU


def test_a_build_for_another_cpu_is_not_taken(amx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may be on a disk that machines share."""
    made: list[dict[str, Any]] = []
    here = rebuilt("llama-cpp-python", FOR_THIS_CPU, made.append)
    assert rebuilt("llama-cpp-python", FOR_THIS_CPU, made.append) == here
    monkeypatch.setattr(rebuild, "cpu_flags", lambda: frozenset({"avx512f"}))
    assert rebuilt("llama-cpp-python", FOR_THIS_CPU, made.append) != here
    assert len(made) == 2


def test_what_a_killed_build_left_is_removed(amx: Path) -> None:
    left = amx / "builds" / ".llama-cpp-python.abc.unfinished"
    left.mkdir(parents=True)
    (left / "half").touch()
    rebuilt("llama-cpp-python", FOR_THIS_CPU, lambda _: None)
    assert not left.exists()


def test_a_library_that_pip_does_not_know_keeps_its_first_reason(
    amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(rebuild, "version", unknown)
    plan = plan_of(fake(tmp_path, "crashes while loading", compiled="llama-cpp-python"))
    assert run_of(plan).go() is True
    assert "SIGSEGV while loading" in (plan.entries[0].error or "")
    assert "llama-cpp-python" in (plan.entries[0].error or "")


def test_the_report_says_that_it_was_built_again(amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, tmp_path)
    plan = plan_of(fake(tmp_path, "a", ours=True), fake(tmp_path, "crashes while loading", compiled="llama-cpp-python"))
    found = comparison_of(plan).run().result
    [row] = found["peers"]
    assert row["note"].startswith("rebuilt without AMX tiles")
    assert any(
        "crashes while loading plain: rebuilt without AMX tiles" in note for note in PeersReport(found).report().notes
    )


def test_flags_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[dict[str, Any]] = []

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        ran.append(more["env"])
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("CFLAGS", "-O1")
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=ON")
    pip_build.load({"package": "p", "version": "1", "target": "/t", "flags": ["-mno-amx-tile"], "cmake": ["-DX=ON"]})
    assert ran[0]["CFLAGS"] == "-O1 -mno-amx-tile"
    assert ran[0]["CMAKE_ARGS"] == "-DGGML_BLAS=ON -DX=ON"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_cpu_has_flags() -> None:
    assert rebuild.cpu_flags() & {"sse2", "fp", "asimd", "isa"} or rebuild.cpu_flags() == frozenset()


def test_a_run_that_is_stopped_while_a_build_is_measured_again_has_no_half_of_it(
    amx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_pip(monkeypatch, tmp_path)
    plan = plan_of(fake(tmp_path, "crashes", compiled="llama-cpp-python"), fake(tmp_path, "good"))
    run = run_of(plan)
    ask, repaired = RoundRobin._ask, False

    def stopping(self: RoundRobin, entry: Entry, question: Question, what: str) -> Answer | None:
        if repaired and question is QUESTIONS[0]:
            raise KeyboardInterrupt
        return ask(self, entry, question, what)

    def built(text: str) -> None:
        nonlocal repaired
        repaired = True

    monkeypatch.setattr(RoundRobin, "_ask", stopping)
    run.on_note = built
    assert run.go() is False
    stopped, good = plan.entries
    assert stopped.error == "was being measured again, in another build, when the run was stopped"
    assert good.error is None and good.answers
