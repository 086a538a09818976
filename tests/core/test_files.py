"""Files and folders appear whole or not at all, with the user's mode; what is no regular file stays what it is."""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, atomic_folder, is_special, read_json, settle, write_atomically


@pytest.fixture
def group_mask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_replaces_what_was_there_or_leaves_it(tmp_path: Path, group_mask: None) -> None:
    path = tmp_path / "f.bin"
    write_atomically(path, b"one")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as place:
        place.write_bytes(b"ha")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"one"
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert mode(path) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_folder_appears_filled_or_not_at_all(tmp_path: Path, group_mask: None) -> None:
    folder = tmp_path / "above" / "d"
    with pytest.raises(RuntimeError), atomic_folder(folder) as place:
        (place / "x").write_text("x")
        raise RuntimeError
    assert not list(folder.parent.iterdir())
    folder.mkdir()
    with atomic_folder(folder) as place:
        (place / "in").mkdir()
        (place / "in" / "x").write_text("x")
        (place / "in" / "x").chmod(0o600)
        assert not any(folder.iterdir())
    assert [mode(path) for path in (folder, folder / "in", folder / "in" / "x")] == [0o750, 0o750, 0o640]
    with pytest.raises(OSError, match="not empty"), atomic_folder(folder) as place:
        (place / "y").write_text("y")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError), atomic_folder(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "kept"
    assert (folder / "in" / "x").read_text() == "x"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_devices_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_atomically(Path("/dev/full"), b"x")
    (tmp_path / "link").symlink_to(os.devnull)
    for null in (Path(os.devnull), tmp_path / "link"):
        write_atomically(null, b"x")
    assert all(Path(name).is_char_device() for name in ("/dev/full", os.devnull))


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"all of it")
    reader.join()
    assert found == [b"all of it"]
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="streams have no names here")
def test_a_stream_that_leads_to_a_file_is_written_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        name = Path(f"/proc/self/fd/{file.fileno()}")
        (tmp_path / "link").symlink_to(name)
        assert is_special(tmp_path / "link")
        before = log.stat().st_ino
        write_atomically(tmp_path / "link", b"x")
    assert (log.read_bytes(), log.stat().st_ino) == (b"x", before)
    assert not is_special(log)
    assert not is_special(tmp_path / "none")


def test_modes_of_private_files_are_opened(tmp_path: Path, group_mask: None) -> None:
    private = tmp_path / "private"
    private.write_text("")
    private.chmod(0o600)
    settle(private)
    assert mode(private) == 0o640


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"a": ' * 100_000, "9" * 5000, '{"a": "\udcff"}'])
def test_json_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(BadInput, match=r"a\.json cannot be read: ") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)
