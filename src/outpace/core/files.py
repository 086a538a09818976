"""Files: whole or not there, readable for whoever the user's umask lets read them; and JSON that is an object."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Where to write: it takes ``path``'s name, and its place, when all went well; else nothing is left of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        yield unfinished
        share(unfinished)
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """All of ``content`` under ``path``, or what was there before."""
    with appearing(path) as unfinished:
        unfinished.write_bytes(content)


def share(path: Path) -> None:
    """Give a file the mode that files have here: libraries that write through private ones leave theirs."""
    path.chmod(0o666 & ~umask())


def umask() -> int:
    """The process's."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BadInput for what is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} cannot be read: it holds no JSON object")
    return found
