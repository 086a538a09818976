"""Layout: how heads of some kinds are written for other engines, and read from them.

A folder of another layout is self-contained: what a head borrows from its target is written out, and compared with the
target when it is read. Adding a layout: a subclass in a module of this package, an instance in :func:`layouts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.files import read_json
from outpace.heads.base import Head, HeadConfig, kinds
from outpace.heads.checkpoint import PROVENANCE, assembled
from outpace.heads.fingerprint import ALIKE
from outpace.heads.incompatible import IncompatibleHead
from outpace.heads.layouts.files import CONFIG, Package, read_tensors, tensor_names, write_folder
from outpace.targets.base import Target


@dataclass(frozen=True, slots=True)
class About:
    """What other engines want to know of the target.

    ``name``: what they load, a hub id or a folder; ``architecture``: its transformers class; ``idle``: a token that no
    text uses, for layouts whose masks are tokens. ``provenance`` goes along as ``training.json``. ``tokenizer`` writes
    the tokenizer into a folder, for layouts that are whole models.
    """

    name: str
    architecture: str = "LlamaForCausalLM"
    idle: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Callable[[Path], object] | None = None


@dataclass(slots=True)
class Foreign:
    """A head of another layout in outpace's terms.

    ``tensors``: by outpace's names, ``words.ids`` among them, and ``words.rows`` where its LM head is its own;
    ``called``: what the file calls them. ``embedding``: (V, hidden), where there is one, and ``masked`` the row of it
    that is the head's own.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    called: dict[str, str]
    embedding: Tensor | None = None
    masked: int | None = None


Names = Callable[[], frozenset[str]]


class Layout(ABC):
    """One layout."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    """What it can hold."""
    writes: ClassVar[bool] = True

    @abstractmethod
    def kind_of(self, config: Mapping[str, Any], names: Names) -> str | None:
        """The kind of head that a ``config.json`` describes, None where it is not of this layout.

        ``names`` gives the names of the tensors, for where that does not tell.
        """

    def express(self, head: Head, target: Target, about: About) -> Package:
        """The head as this layout has it. Raises BadInput for what the layout cannot say."""
        raise BadInput(f"layout '{self.name}' is read and not written")

    @abstractmethod
    def understand(self, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
        """A folder's content in outpace's terms. Raises BadInput for what outpace cannot say."""


@cache
def layouts() -> dict[str, Layout]:
    """Every layout by name."""
    from outpace.heads.layouts.eagle import EagleLayout
    from outpace.heads.layouts.hf import HuggingFace
    from outpace.heads.layouts.medusa import MedusaLayout
    from outpace.heads.layouts.speculators import Speculators
    from outpace.heads.layouts.zlab import ZLab

    return {one.name: one for one in (Speculators(), EagleLayout(), MedusaLayout(), HuggingFace(), ZLab())}


def find_layout(name: str, kind: str) -> Layout:
    """The layout of this name for a kind of head. Raises BadInput with the layouts that there are for it."""
    known = [one.name for one in layouts().values() if one.writes]
    if name not in known:
        raise BadInput(f"unknown layout '{name}'; known: {', '.join(known)}")
    if kind not in layouts()[name].kinds:
        fitting = [one.name for one in layouts().values() if one.writes and kind in one.kinds]
        have = f"it is written as: {', '.join(fitting)}" if fitting else "no layout of other engines has this kind"
        raise BadInput(f"layout '{name}' has no heads of kind '{kind}'; {have}")
    return layouts()[name]


def write(head: Head, target: Target, folder: Path, layout: str, about: About) -> None:
    """Write a head for other engines: ``folder`` holds all that it needs, or does not appear."""
    package = find_layout(layout, head.kind).express(head, target, about)
    if about.provenance:
        package.json[PROVENANCE] = dict(about.provenance)
    write_folder(folder, package, about.tokenizer if layout == "hf" else None)


def detect(folder: Path) -> tuple[Layout, str] | None:
    """Layout and kind of head of a folder, None where it is of no layout that is known."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    config = read_json(path)
    names = cache(lambda: tensor_names(folder))
    for layout in layouts().values():
        kind = layout.kind_of(config, names)
        if kind is not None:
            return layout, kind
    return None


def opened(folder: Path, target: Target) -> tuple[Layout, Foreign]:
    """A folder of another layout, understood and not yet checked against the target's weights."""
    found = detect(folder)
    if found is None:
        names = ", ".join(layouts())
        raise BadInput(f"'{folder}' holds no head of a known layout; known: outpace, {names}")
    layout, kind = found
    if kind not in kinds():
        raise BadInput(f"'{folder}' holds a head of layout '{layout.name}' whose kind '{kind}' is not known here")
    return layout, layout.understand(read_json(folder / CONFIG), read_tensors(folder), target, folder)


def read(folder: Path, target: Target) -> Head:
    """A head of another layout. Raises BadInput, in one line, for one that is damaged or does not fit the target."""
    _, foreign = opened(folder, target)
    check_embedding(foreign, target, folder)
    return assembled(foreign.config, foreign.tensors, target, folder, foreign.called)


def check_embedding(foreign: Foreign, target: Target, where: Path) -> float:
    """How alike its embedding is to the target's, a cosine; 1.0 where it has none. Raises BadInput for another's.

    The file has no fingerprint: the embedding tells one model's weights from another's.
    """
    if foreign.embedding is None:
        return 1.0
    name = "embed_tokens"
    shape = (target.vocab_size, target.hidden_size)
    if tuple(foreign.embedding.shape) != shape:
        raise IncompatibleHead(
            f"the head at '{where}': {name} has shape {tuple(foreign.embedding.shape)}, this model's {shape}", "shapes"
        )
    tokens = torch.arange(target.vocab_size)
    if foreign.masked is not None:
        tokens = tokens[tokens != foreign.masked]
    tokens = tokens[:: max(1, len(tokens) // 4096)]
    theirs, ours = foreign.embedding[tokens].float(), target.embed(tokens).float().cpu()
    cosine = float((theirs * ours).sum() / (theirs.norm() * ours.norm()).clamp_min(1e-12))
    if not cosine >= ALIKE:
        raise IncompatibleHead(
            f"the head at '{where}' was made for other weights than this model's, or with an embedding of its own, "
            f"which is not read: its {name} and the model's have cosine {cosine:.3f}",
            "fingerprint",
        )
    return cosine
