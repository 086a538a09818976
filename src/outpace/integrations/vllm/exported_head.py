"""A head as vLLM loads it: exported into the cache, once for each head and model.

    <cache>/vllm/heads/<kind>-<digest>/   self-contained: the layers, embedding and LM head, configuration

A folder that is of another engine's layout already is used as it is, once it was checked against the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.version import __version__
from outpace.heads.exchange import HUB, export_head
from outpace.heads.head_config import CONFIG
from outpace.heads.head_folder import HeadFolder
from outpace.heads.layouts.speculators import TYPE
from outpace.models.gguf_cache import cache_dir

if TYPE_CHECKING:
    from outpace.model import Model

LAYOUTS = {"eagle3": "speculators", "dflash": "speculators", "draft-lm": "hf", "medusa": "medusa"}
"""By kind of head, the layout that vLLM reads."""
_REVISION = 2
"""Of what the layouts write: one more where that changes, so that no head that was exported before is taken."""


@dataclass(frozen=True, slots=True)
class ExportedHead:
    """``folder`` that vLLM loads, and the ``head`` that it was made from. ``notes``: what the user should know."""

    folder: Path
    head: HeadFolder
    notes: tuple[str, ...] = ()


def exported(head: HeadFolder, model: Callable[[], Model], served: str, name: str = "") -> ExportedHead:
    """The head for vLLM, which serves the model from ``served``, a folder or a hub id. ``name``: the user's for it.

    Raises BadInput for a kind that vLLM does not draft with, and for a head that was made for other weights.
    """
    layout = LAYOUTS.get(head.kind)
    if layout is None:
        raise BadInput(f"vLLM does not draft with heads of kind {head.kind}; it does with {', '.join(LAYOUTS)}")
    if not head.own:
        if head.layout.name == "eagle":
            raise BadInput(f"'{head.files.path}' is of layout eagle; import it (outpace import-head), then serve that")
        head.load(model().target)
        return ExportedHead(head.files.path, head, _verifier_note(head, served, name))
    key = "\n".join((head.files.fingerprint, served, _files_of(served), layout, __version__, str(_REVISION)))
    folder = cache_dir() / "vllm" / "heads" / f"{head.kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not (folder / CONFIG).is_file():
        with stage(f"exporting the {head.kind} head", brief=True):
            try:
                export_head(model(), head.files.path, folder, layout, verifier=served)
            except BadInput:
                if not (folder / CONFIG).is_file():  # another process may have been quicker
                    raise
    return ExportedHead(folder, head)


def _files_of(served: str) -> str:
    """What tells the files of a folder from others that are put in their place; nothing of a hub id."""
    folder = Path(served)
    if not folder.is_dir():
        return ""
    found = [(one.name, one.stat()) for one in sorted(folder.iterdir()) if one.is_file()]
    # No device and inode: the key is kept on a disk that machines may share.
    return "\n".join(f"{name} {about.st_size} {about.st_mtime_ns}" for name, about in found)


def _verifier_note(head: HeadFolder, served: str, name: str) -> tuple[str, ...]:
    """A warning where a head names another model than the one that is served. Its embedding was compared, but models
    that were trained further often keep it."""
    inside = head.files.config.get("speculators_config") if TYPE in head.files.config else None
    verifier = inside.get("verifier") if isinstance(inside, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if named in (None, served, name, HUB.get(name)):
        return ()
    return (
        f"warning: the head names '{named}' as its model, and '{name or served}' is served; if these are not the "
        "weights that it was trained with, fewer draft tokens are accepted",
    )
