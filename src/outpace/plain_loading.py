"""Loading a model for the fast target on a CPU without importing transformers, which takes longer than all the rest.

Folders of safetensors, and GGUF files whose blocks are read in place, of the architectures that the fast target knows.
Where anything is not certain (an unknown field, a missing or damaged weight, a precision without kernels) the answer is
None, and the caller loads through transformers, which knows the rest and words the refusals.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.files import read_json
from outpace.core.machine import give_back
from outpace.models.gguf_cache import content_digest, described
from outpace.models.gguf_header import read_header
from outpace.models.placement import NAMES
from outpace.models.plain_config import PlainConfig, Unclear, plain_config
from outpace.models.quiet import explained, one_line
from outpace.models.source import Source

if TYPE_CHECKING:
    import torch

    from outpace.models.tokenizers import HFTokenizer
    from outpace.targets.base import Target
    from outpace.targets.dense.decoder_spec import DecoderSpec
    from outpace.targets.dense.file_weights import FolderWeights, GGUFWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A model's parts. ``weights``: what identifies its weights; ``parameters``: how many there are."""

    target: Target
    tokenizer: HFTokenizer
    eos_ids: frozenset[int]
    architecture: str
    parameters: int
    weights: str


def load_plain(
    source: Source, precision: str, dtype: torch.dtype | None, kv_dtype: str, tokenizer: Callable[[Path], HFTokenizer]
) -> PlainModel | None:
    """A model on the fast target, or None where only transformers can tell what it is.

    ``precision``: that of the target, one of ``dense.packing.PRECISIONS``; "auto": what the weights are stored in.
    ``dtype``: what weights are read in before they are packed; None: as stored. ``kv_dtype``: how the target keeps K/V.
    ``tokenizer``: reads that of a folder.
    """
    from outpace.targets.dense.kernel_build import library

    try:
        library()  # before all else: without the kernels there is no fast target
        if source.kind == "gguf":
            _check_in_place(source.path)
            with described(source.path) as folder:
                return _load(_GGUF(source.path, folder, dtype), precision, kv_dtype, tokenizer)
        return _load(_Folder(source.path, dtype), precision, kv_dtype, tokenizer)
    except Exception as error:  # these are others' files: transformers will say what is wrong with them
        _log.debug("%s is loaded through transformers: %s", source.location, one_line(error))
        return None


class _Folder:
    """A folder of safetensors."""

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        import torch

        found = read_json(folder / "config.json")
        self.config = plain_config(found)
        self.folder = folder
        self.dtype = getattr(torch, _stored_in(found)) if dtype is None else dtype
        self._described = json.dumps(found, sort_keys=True)

    def open(self) -> FolderWeights:
        """The weights, none of them read."""
        from outpace.models.safetensors_folder import SafetensorsFolder
        from outpace.targets.dense.file_weights import FolderWeights

        return FolderWeights(self.config, SafetensorsFolder(self.folder), self.dtype)

    def digest(self) -> str:
        """Tells weights apart."""
        from outpace.models.safetensors_folder import SafetensorsFolder
        from outpace.targets.cost_table import digest

        tensors = digest(SafetensorsFolder(self.folder).stored())
        return hashlib.sha256(f"{self._described} {tensors}".encode()).hexdigest()[:32]


class _GGUF:
    """A GGUF file. ``folder``: its tokenizer and configuration."""

    def __init__(self, path: Path, folder: Path, dtype: torch.dtype | None) -> None:
        if dtype is None:
            raise Unclear("the precision of a GGUF file")
        self.config: PlainConfig = plain_config(read_json(folder / "config.json"))
        self.folder, self.dtype = folder, dtype
        self._path = path

    def open(self) -> GGUFWeights:
        """The weights, none of them read."""
        from outpace.targets.dense.file_weights import GGUFWeights

        return GGUFWeights(self.config, read_header(self._path), self.dtype)

    def digest(self) -> str:
        """Tells weights apart."""
        return content_digest(self._path)


def _check_in_place(path: Path) -> None:
    """Raise Unclear for files that are known not to be read in place, before anything of them is converted."""
    from outpace.targets.dense.file_weights import IN_PLACE

    header = read_header(path)
    if header.architecture not in IN_PLACE or header.model.rope_scaling not in ("none", "linear"):
        raise Unclear(f"architecture {header.architecture}, rotary scaling {header.model.rope_scaling}")


def _load(
    files: _Folder | _GGUF, precision: str, kv_dtype: str, tokenizer: Callable[[Path], HFTokenizer]
) -> PlainModel:
    from outpace.models.placement import dtype_name
    from outpace.models.stop_ids import configurations, stop_ids_of
    from outpace.targets.choice import check_parts
    from outpace.targets.dense.architectures import CLASSES
    from outpace.targets.dense.dense_target import DenseTarget
    from outpace.targets.dense.file_weights import spec_of
    from outpace.targets.dense.packing import PRECISIONS

    precision = dtype_name(files.dtype) if precision == "auto" else precision
    if precision not in PRECISIONS:
        raise Unclear(f"the fast target does not compute in {precision}")
    words = tokenizer(files.folder)
    give_back()  # what reading a large vocabulary needed
    stop_ids = stop_ids_of(configurations(files.folder), words, files.config.vocab_size)
    weights, identity = files.open(), files.digest()
    spec = spec_of(files.config, weights)
    target = DenseTarget(spec, precision, kv_dtype=kv_dtype)
    weights.check_all_read()
    check_parts(target, spec, identity)
    target.origin = partial(_again, files)
    return PlainModel(target, words, stop_ids, CLASSES[files.config.model_type], weights.parameters, identity)


def _again(files: _Folder | _GGUF) -> DecoderSpec:
    """The spec of the weights, read once more, with all its tensors in memory."""
    from outpace.targets.dense.file_weights import spec_of

    with explained("the model's weights cannot be read again"):
        return spec_of(files.config, files.open()).dense()


def _stored_in(found: dict[str, Any]) -> str:
    """The dtype that a configuration says weights are in. Raises Unclear."""
    name = found.get("dtype") or found.get("torch_dtype")
    if name not in NAMES:
        raise Unclear(f"dtype is {name!r}")
    return str(name)
