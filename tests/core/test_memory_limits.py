"""Free memory: the limits of control groups count, where there are any."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.core import machine


def group(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def own(tmp_path: Path, path: str) -> Path:
    file = tmp_path / "own"
    file.write_text(f"4:memory:/elsewhere\n0::{path}\n")
    return file


def left(tmp_path: Path, path: str) -> list[int]:
    return machine._left_in_groups(own(tmp_path, path), tmp_path / "groups")


def test_what_a_container_s_limit_leaves(tmp_path: Path) -> None:
    group(tmp_path / "groups", "1000", 700, cached=200)
    assert left(tmp_path, "/") == [500]


def test_every_group_above_counts(tmp_path: Path) -> None:
    group(tmp_path / "groups" / "system.slice" / "outpace.service", "max", 700)
    group(tmp_path / "groups" / "system.slice", "900", 1000)
    assert left(tmp_path, "/system.slice/outpace.service") == [0]


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert left(tmp_path, "/") == []
    assert machine._left_in_groups(tmp_path / "none", tmp_path) == []


def test_free_memory_is_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_left_in_groups", lambda *_: [12345])
    assert machine.free_memory() == 12345
