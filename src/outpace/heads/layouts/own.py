"""Outpace's own layout, as :func:`outpace.heads.checkpoint.save` writes it, and as earlier versions did."""

from __future__ import annotations

from typing import ClassVar

from outpace.core.errors import BadInput
from outpace.core.validation import validated
from outpace.heads.head_config import CONFIG, FORMAT, HeadConfig
from outpace.heads.layouts.base import Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles
from outpace.targets.base import Target

_FORMER = (("words.ids", "draft_vocabulary.d2t"), ("words.", "draft_vocabulary."), ("tap_norms.", "fc_norm."))
"""Beginnings of tensors' names until outpace 0.1, and what they are now."""


class OwnLayout(Layout):
    """``config.json`` is a HeadConfig; the target lends embedding and LM head, and is told by its fingerprint."""

    name: ClassVar[str] = "outpace"

    def kind_of(self, files: HeadFiles) -> str | None:
        kind = files.config.get("kind")
        return kind if isinstance(kind, str) else None

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        config = own_config(files)
        called = {_current(name): name for name in files.tensors}
        tensors = {name: files.tensors[theirs] for name, theirs in called.items()}
        return StoredHead(config, tensors, called, fingerprint=config.target.fingerprint)


def own_config(files: HeadFiles) -> HeadConfig:
    """A head's configuration. Raises BadInput for a field that is wrong, and for a format that is not known yet."""
    path = files.path / CONFIG
    config = validated(HeadConfig, files.config, lambda key, reason: BadInput(f"{path}, {key}: {reason}"))
    if config.format != FORMAT:
        raise BadInput(f"{path} is of format {config.format}, and this outpace reads format {FORMAT}; update it")
    return config


def _current(name: str) -> str:
    for former, now in _FORMER:
        if name.startswith(former):
            return now + name.removeprefix(former)
    return name
