"""Files and folders that appear whole or not at all, with the mode that the user's umask gives; and JSON objects.

Content is written under another name beside its place, put on the disk (fsync), and renamed: whoever opens the place
finds what was there before or all of what is there now, also after a kill or a power cut. A kill may leave the other
name behind, hidden and ending in ``.unfinished``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput

_UNFINISHED = ".unfinished"


def home_expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` and ``~user`` replaced. Raises BadInput for a user without a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(f"'{os.fspath(path)}': there is no such user's home folder; give the whole path") from None


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Where to write a file: it is renamed to ``path`` when the block ends without an error, and removed otherwise.

    A link is followed. What is no regular file (:func:`is_special`) is written to as it is: renaming would put a file
    in the place of a device. Raises OSError where the file cannot be written.
    """
    if is_special(path):
        yield path
        return
    path = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=_UNFINISHED, dir=path.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        settle(unfinished)
        unfinished.replace(path)
        _flush(path.parent)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill: it is renamed to ``folder`` when the block ends without an error, and removed otherwise.

    Folders above it are made. Raises OSError where it cannot be written, and where something other than an empty folder
    has its name.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}.", suffix=_UNFINISHED, dir=folder.parent))
    try:
        yield unfinished
        settle(unfinished)
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        unfinished.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write all of ``content`` to ``path``, or leave what was there before. Raises OSError."""
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(content)


def file_version(stat: os.stat_result) -> tuple[int, ...]:
    """What tells a file from others and from what it was before.

    Device, inode, size, and when its content and its entry were last changed, in nanoseconds.
    """
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def version_at(path: Path) -> tuple[int, ...] | None:
    """The :func:`file_version` of what is at ``path``; None where nothing is."""
    return file_version(path.stat()) if path.exists() else None


def is_special(path: Path) -> bool:
    """Whether ``path`` is a device, a pipe or a socket, or a name of an open stream such as /dev/stdout."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return True
    while path.is_symlink():  # /dev/stdout -> /proc/self/fd/1 -> the file that the shell redirects to
        if path.parent.resolve().is_relative_to("/proc"):
            return True
        path = path.parent / path.readlink()
    return False


def settle(path: Path) -> None:
    """Give a file or a folder, with all in it, the mode that files have here, and put it on the disk (fsync).

    Libraries that write through private temporary files leave those files' mode. Raises OSError.
    """
    mask = os.umask(0)
    os.umask(mask)
    for one in (*path.rglob("*"), path):
        one.chmod((0o777 if one.is_dir() else 0o666) & ~mask)
        _flush(one)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BadInput for a file that cannot be read or holds something else."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} cannot be read: it holds no JSON object")
    return found


def parse_json(text: str | bytes) -> Any:
    """A JSON value. Raises ValueError for what is none, and for one that is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
