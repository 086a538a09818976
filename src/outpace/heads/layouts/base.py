"""Layout: how the heads of one kind are stored in a folder, outpace's own way or another engine's.

A folder of another engine's layout is self-contained: it holds what a head borrows from its target as well. To add a
layout: a subclass in ``layout.py`` of the method's folder, decorated with ``layout`` of the registry beside this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.head_config import HeadConfig
from outpace.heads.layouts.files import HeadFiles, Package
from outpace.targets.base import Target

D2T, ROWS = "draft_vocabulary.d2t", "draft_vocabulary.rows"
"""Names of the vocabulary map (Vd,) and of the LM head (Vd, hidden) among a head's tensors."""


@dataclass(frozen=True, slots=True)
class About:
    """What other engines need to know of the target.

    ``name``: what they load, a hub id or a folder; ``architecture``: its transformers class; ``idle``: a token that no
    text uses, for layouts whose masks are tokens. ``provenance`` is written as ``training.json``. ``tokenizer`` writes
    the tokenizer into a folder, for layouts that are whole models.
    """

    name: str
    architecture: str = "LlamaForCausalLM"
    idle: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Callable[[Path], object] | None = None


@dataclass(slots=True)
class StoredHead:
    """What a folder holds, in outpace's terms, not yet checked (:mod:`outpace.heads.head_checks`).

    ``tensors``: by outpace's names, D2T among them, and ROWS where the file has an LM head; ``called``: the file's
    names where they differ. What tells the target's weights, whichever the layout has: ``fingerprint``; ``embedding``
    (V, hidden), of which row ``masked`` is the head's own; ``lm_head`` (Vd, hidden).
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    called: Mapping[str, str] = field(default_factory=dict)
    fingerprint: list[float] | None = None
    embedding: Tensor | None = None
    masked: int | None = None
    lm_head: Tensor | None = None

    def name(self, tensor: str) -> str:
        """What the file calls a tensor."""
        return self.called.get(tensor, tensor)


class Layout(ABC):
    """One way to store heads of one kind. Several layouts may have one ``name``, each for another kind."""

    name: ClassVar[str]
    kind: ClassVar[str] = ""
    """The kind of head that it holds."""
    writes: ClassVar[bool] = True
    """Whether heads can be exported to it."""

    @abstractmethod
    def kind_of(self, files: HeadFiles) -> str | None:
        """The kind of head that a folder holds, None where the folder is not of this layout."""

    @abstractmethod
    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        """A folder's content. Raises BadInput for what outpace does not support."""

    def package(self, head: Head, target: Target, about: About) -> Package:
        """The head as this layout stores it. Raises BadInput for what the layout cannot express."""
        raise BadInput(f"layout '{self.name}' is read and not written")
