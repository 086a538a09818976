"""Converted GGUF files in the user's cache: made once, found by content.

    <cache>/gguf/<file>-<digest>-<dtype>-v<converter>/   safetensors, configuration, tokenizer, manifest.json
    <cache>/gguf/<file>-<digest>-in-place-v<converter>/  the same without weights, for files that are read in place
    <cache>/gguf/<file>-<digest>-config-v<converter>/    the same without weights, of files that are read in place
    <cache>/gguf-formats/<file>-<digest>-<format>-v<converter>/  the file in another GGUF format: bench-peers makes it
    <cache>/gguf/.tmp-*                                  a conversion under way, or what a killed one left
    <cache>/digests/*.json                               digests of files that have not changed since

An entry appears by one rename, under a lock, after everything in it is on the disk; the lock dies with its process.
Readers take no lock and never write, so a complete cache may be read-only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from filelock import FileLock, Timeout
from pydantic import BaseModel

from outpace.core.errors import BadInput, out_of_memory
from outpace.core.files import file_version, home_expanded, read_json, settle, write_atomically
from outpace.core.progress import stage
from outpace.core.version import __version__
from outpace.models import gguf_convert
from outpace.models.gguf_header import read_header
from outpace.models.placement import dtype_name
from outpace.models.quiet import explained, one_line

if TYPE_CHECKING:
    import torch

CACHE_VARIABLE = "OUTPACE_CACHE"
MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_WEIGHTS = ".safetensors"
_DESCRIPTION = 2**26
"""Bytes that a tokenizer and a configuration need at most."""
_SETTLED = 2 * 10**9  # nanoseconds after which a file's times tell whether it has changed since
_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The user's cache directory, or what OUTPACE_CACHE names."""
    named = os.environ.get(CACHE_VARIABLE)
    return home_expanded(named) if named else Path(platformdirs.user_cache_dir("outpace"))


def converted(path: Path, dtype: torch.dtype) -> Path:
    """The folder that holds this GGUF file's weights in ``dtype``, converted now if they were not before.

    Raises BadInput for a broken file and for a cache that cannot be written.
    """

    def fill(folder: Path) -> None:
        _log.info("converting %s to %s, once", path, dtype_name(dtype))
        model, tokenizer = gguf_convert.read(read_header(path), dtype)
        with stage("writing the converted model", brief=True), _writing(folder.parent):
            gguf_convert.write(model, tokenizer, folder)

    return made(path, dtype_name(dtype), lambda: read_header(path).parameters * dtype.itemsize, fill)


def made(
    path: Path, precision: str, needed: Callable[[], int], fill: Callable[[Path], object], place: str = "gguf"
) -> Path:
    """The cache's folder of this GGUF file in ``precision``; where there is none, ``fill`` fills it now.

    ``needed``: bytes of disk that this takes. ``place``: the folder of the cache. Raises BadInput for a cache that
    cannot be written.
    """
    digest = content_digest(path)
    root = cache_dir() / place
    entry = root / _entry_name(path, digest, precision)
    if is_whole(entry, digest):
        _sweep(root)
        return entry
    if (entry / MANIFEST).exists():
        _log.warning("the converted model in '%s' is damaged or of an earlier version: it is converted again", entry)
    size = needed()
    with _locked(root):
        if not is_whole(entry, digest):  # another process may have been quicker
            with _temporary(root, size) as folder:
                fill(folder)
                with _writing(root):
                    _publish(folder, entry, path, digest, precision)
    return entry


@contextmanager
def described(path: Path) -> Iterator[Path]:
    """A folder with the tokenizer and the configuration of a GGUF file whose weights are read in place.

    Made where the file was not converted before, and then kept only if the block ends without an error: a file whose
    weights turn out to be broken leaves nothing. Raises BadInput as :func:`converted` does.
    """
    digest, root = content_digest(path), cache_dir() / "gguf"
    entry = root / _entry_name(path, digest, "config")
    if is_whole(entry, digest):
        _sweep(root)
        yield entry
        return
    header = read_header(path)
    with _locked(root):
        if is_whole(entry, digest):  # another process may have been quicker
            yield entry
            return
        with _temporary(root, _DESCRIPTION) as folder:
            _log.info("converting the tokenizer and configuration of %s, once", path)
            configuration, tokenizer = gguf_convert.describe(header)
            with _writing(root):
                gguf_convert.write(configuration, tokenizer, folder)
            yield folder
            with _writing(root):
                _publish(folder, entry, path, digest, "config")


def converted_before(path: Path) -> Path | None:
    """A folder that holds this GGUF file's tokenizer and configuration, if it was converted before."""
    digest = content_digest(path)
    entries = sorted(
        (cache_dir() / "gguf").glob(_entry_name(path, digest, "*")), key=lambda one: "-config-" not in one.name
    )
    return next((entry for entry in entries if is_whole(entry, digest, weights=False)), None)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / ".lock")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _temporary(root: Path, needed: int) -> Iterator[Path]:
    """A folder to fill, removed at the end unless it was renamed. ``needed``: bytes. Call with the lock held."""
    _remove_leftovers(root)
    with _writing(root):
        if shutil.disk_usage(root).free < needed:
            raise BadInput(_cannot_write(root, f"{needed / 1e6:,.0f} MB are needed and the disk is full"))
        folder = root / f"{_TEMPORARY}{uuid.uuid4().hex}"
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _entry_name(path: Path, digest: str, precision: str) -> str:
    stem = re.sub(r"[^\w.\-]", "_", path.stem)[:60]
    return f"{stem}-{digest[:16]}-{precision}-v{gguf_convert.CONVERTER}"


class _Kept(BaseModel):
    """A file of an entry: its size in bytes, and the CRC-32 of its content."""

    size: int
    crc32: int


class _Manifest(BaseModel):
    """``manifest.json`` of an entry. ``digest``: SHA-256 of the GGUF file that was converted."""

    source: str
    digest: str
    dtype: str
    files: dict[str, _Kept]
    outpace: str = __version__
    transformers: str


def is_whole(entry: Path, digest: str, *, weights: bool = True) -> bool:
    """Whether an entry is of this content and has every file as it was written; ``weights``: those of weights, too.

    Reads all of these once: 0.1 s for the 270 MB of the embedded model's weights. Raises BadInput where memory is too
    small for that.
    """
    try:
        manifest = _Manifest.model_validate(read_json(entry / MANIFEST))
        files = {name: kept for name, kept in manifest.files.items() if weights or not name.endswith(_WEIGHTS)}
        return manifest.digest == digest and all(_kept(entry / name) == kept for name, kept in files.items())
    except (OSError, ValueError, BadInput) as error:  # pydantic's errors are ValueErrors
        if out_of_memory(error):  # which says nothing about the entry
            raise BadInput(f"cannot read '{entry}': not enough memory; use a smaller model or dtype") from error
        return False


def _kept(path: Path) -> _Kept:
    size = path.stat().st_size
    if not size:
        return _Kept(size=0, crc32=0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Kept(size=size, crc32=zlib.crc32(data))


def content_digest(path: Path) -> str:
    """SHA-256 of a file, remembered for as long as its identity, size and times stay the same."""
    with explained(f"cannot read '{path}'"):
        seen = list(file_version(path.stat()))
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    note = cache_dir() / "digests" / f"{place}.json"
    with suppress(BadInput, KeyError):
        noted = read_json(note)
        if noted["seen"] == seen and _SHA256.fullmatch(str(noted["digest"])):
            return str(noted["digest"])
    with explained(f"cannot read '{path}'"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A file written a moment ago may change again within the resolution of its times.
    if time.time_ns() - max(seen[-2:]) > _SETTLED:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps({"seen": seen, "digest": digest}).encode())
    return digest


def _publish(folder: Path, entry: Path, source: Path, digest: str, dtype: str) -> None:
    """Give a filled folder its manifest and its name."""
    from transformers import __version__ as transformers_version

    files = {str(file.relative_to(folder)): _kept(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    about = _Manifest(source=source.name, digest=digest, dtype=dtype, files=files, transformers=transformers_version)
    (folder / MANIFEST).write_text(about.model_dump_json(indent=1), encoding="utf-8")
    settle(folder)
    if entry.exists():  # incomplete: something damaged it after it was made
        shutil.rmtree(entry)
    folder.replace(entry)


def _sweep(root: Path) -> None:
    """Remove what killed conversions left, unless one is at work now or the cache is not ours to write."""
    with suppress(OSError, Timeout):
        if any(root.glob(f"{_TEMPORARY}*")):
            with FileLock(root / ".lock", timeout=0):
                _remove_leftovers(root)


def _remove_leftovers(root: Path) -> None:
    """Call with the lock held: then nobody is at work in them."""
    for leftover in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _cannot_write(root: Path, why: str) -> str:
    advice = f"free some space or set {CACHE_VARIABLE} to another directory"
    return f"cannot write the converted model to '{root}': {why}; {advice}"


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Anything that fails inside is the cache's fault: full, read-only, not a directory."""
    try:
        yield
    except BadInput:
        raise
    except OSError as error:
        raise BadInput(_cannot_write(root, error.strerror or str(error))) from error
    except Exception as error:  # safetensors wraps the operating system's error in its own
        raise BadInput(_cannot_write(root, one_line(error))) from error
