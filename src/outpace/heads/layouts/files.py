"""The files of a head's folder: tensors are read from every format in use; a folder is written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.files import atomic_folder, read_json
from outpace.heads.head_config import CONFIG, WEIGHTS
from outpace.heads.incompatible import IncompatibleHead
from outpace.models.quiet import one_line

_NAMES = (
    WEIGHTS,
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.pt",
)
_ASIDE = ("token_map.pt", "mask_embedding.pt", "trainer.pt", "training_args.bin")
"""Files beside the weights that hold none."""


@dataclass(slots=True)
class Package:
    """A folder to be written: ``config.json``, tensors in one file, and what else belongs to them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = WEIGHTS
    json: dict[str, Any] = field(default_factory=dict)
    """Further JSON files by name."""
    saved: dict[str, Any] = field(default_factory=dict)
    """What ``torch.save`` is to write, tensors and numbers alone, by file name."""
    also: Callable[[Path], object] | None = None
    """Writes further files into the folder."""


def check_new(folder: Path) -> None:
    """Raise BadInput unless ``folder`` is free to be written: not there, or empty."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"cannot write '{folder}': it is a file")
    if folder.is_dir() and any(folder.iterdir()):
        raise BadInput(f"cannot write '{folder}': the folder is not empty; give a new one")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """:func:`atomic_folder` for a head: raises BadInput where ``folder`` is not free or cannot be written."""
    check_new(folder)
    try:
        with atomic_folder(folder) as unfinished:
            yield unfinished
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BadInput(f"cannot write '{folder}': {error}") from error


def write_folder(folder: Path, package: Package) -> None:
    """The folder with all of ``package``, under its name when it is complete. Raises BadInput where it cannot be."""
    with new_folder(folder) as place:
        tensors = {name: value.detach().cpu().contiguous() for name, value in package.tensors.items()}
        save_file(tensors, place / package.weights, metadata={"format": "pt"})
        for name, content in {CONFIG: package.config, **package.json}.items():
            (place / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name, value in package.saved.items():
            torch.save(value, place / name)
        if package.also is not None:
            package.also(place)


class HeadFiles:
    """A folder of a head: ``path``, ``config`` (its ``config.json``), and its tensors, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises BadInput for no folder, and for one without a ``config.json`` that can be read."""
        if not path.is_dir():
            raise BadInput(f"there is no head at '{path}': no such folder")
        if not (path / CONFIG).exists():
            raise BadInput(f"there is no head at '{path}': it has no {CONFIG}")
        self.path = path
        self.config = read_json(path / CONFIG)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors: of safetensors, of an index of several files, or of a pickle that holds nothing but weights.

        Raises IncompatibleHead for files that are missing or damaged.
        """
        path = _weights_of(self.path)
        return _sharded(self.path, path) if path.name.endswith(".index.json") else _one_file(path)

    @property
    def fingerprint(self) -> str:
        """Which weights these are: a hash of the files that hold them, as they are now. Raises as ``tensors`` does."""
        path, found = _weights_of(self.path), hashlib.sha256()
        for one in _shards(self.path, path) if path.name.endswith(".index.json") else [path]:
            try:
                with one.open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise IncompatibleHead(f"{one} cannot be read ({error.strerror or error})", "weights") from error
        return found.hexdigest()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tensors, without reading them where the format allows it. Raises as ``tensors`` does."""
        path = _weights_of(self.path)
        if path.name.endswith(".index.json"):
            return frozenset(_placed(path))
        if path.suffix != ".safetensors":
            return frozenset(self.tensors)
        try:
            with safe_open(path, "pt") as file:
                return frozenset(file.keys())
        except (SafetensorError, OSError) as error:
            raise IncompatibleHead(f"{path} is damaged or cut short ({error})", "weights") from error


def _weights_of(folder: Path) -> Path:
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        found = [path for path in sorted(folder.glob(pattern)) if path.name not in _ASIDE]
        if len(found) == 1:
            return found[0]
        if found:
            raise IncompatibleHead(
                f"'{folder}' holds several files of weights and no index ({found[0].name}, ...)", "weights"
            )
    raise IncompatibleHead(
        f"there are no weights at '{folder}': it has no {WEIGHTS}, nor other *.safetensors, *.bin or *.pt", "weights"
    )


def _placed(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, Mapping) or not all(isinstance(name, str) for name in placed.values()):
        raise IncompatibleHead(f"{index} has no weight_map", "weights")
    return dict(placed)


def _shards(folder: Path, index: Path) -> list[Path]:
    files = sorted(set(_placed(index).values()))
    if outside := [name for name in files if Path(name).name != name]:
        raise IncompatibleHead(f"{index} names a file outside its folder: {outside[0]}", "weights")
    return [folder / name for name in files]


def _sharded(folder: Path, index: Path) -> dict[str, Tensor]:
    placed = _placed(index)
    tensors: dict[str, Tensor] = {}
    for path in _shards(folder, index):
        tensors |= _one_file(path)
    if missing := sorted(set(placed) - set(tensors)):
        raise IncompatibleHead(
            f"{index} names tensor {missing[0]}, which {placed[missing[0]]} does not hold", "weights"
        )
    return tensors


def _one_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise IncompatibleHead(f"{path} is missing; complete the download", "weights")
    if path.suffix in (".bin", ".pt"):
        return _pickled(path)
    try:
        found: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise IncompatibleHead(f"{path} is damaged or cut short ({error})", "weights") from error
    return found


def _pickled(path: Path) -> dict[str, Tensor]:
    found = load_pickle(path)
    if not isinstance(found, Mapping) or not all(isinstance(one, Tensor) for one in found.values()):
        raise IncompatibleHead(f"{path} holds something else than tensors by name", "weights")
    return {str(name): value.detach() for name, value in found.items()}


def load_pickle(path: Path) -> Any:
    """What ``torch.save`` wrote, weights alone: a pickle that would run code is refused."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise IncompatibleHead(
            f"{path} is damaged, or holds more than weights, which is not loaded; ask for safetensors", "weights"
        ) from error
    except (RuntimeError, OSError, EOFError, BadZipFile, ValueError, KeyError) as error:
        raise IncompatibleHead(f"{path} is damaged or cut short ({one_line(error)})", "weights") from error
