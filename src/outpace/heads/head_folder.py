"""HeadFolder: a folder that holds a head, of outpace's own layout or another engine's, opened once."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.head_checks import examine
from outpace.heads.head_config import CONFIG
from outpace.heads.incompatible import IncompatibleHead
from outpace.heads.kinds import find_kind
from outpace.heads.layouts.base import Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles
from outpace.heads.layouts.own import OwnLayout
from outpace.heads.layouts.registry import layouts
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Target


class HeadOwner(Protocol):
    """A model as ``outpace.load`` returns it: what heads borrow from, and what other engines want to know of it."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> Target: ...
    @property
    def tokenizer(self) -> ChatTokenizer: ...
    @property
    def eos_ids(self) -> Set[int]: ...
    @property
    def info(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class HeadIdentity:
    """Which head figures are of: its folder, and the fingerprint of the weights that were there."""

    folder: str
    weights: str


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """``kind`` of head, and the ``layout`` in which ``files`` hold it. Its tensors are read when they are needed."""

    files: HeadFiles
    layout: Layout
    kind: str

    @property
    def own(self) -> bool:
        """Whether it is of outpace's own layout."""
        return isinstance(self.layout, OwnLayout)

    def identity(self) -> HeadIdentity:
        """Folder and weights as they are now. Raises IncompatibleHead where weights are missing."""
        return HeadIdentity(str(self.files.path.resolve()), self.files.fingerprint)

    def read(self, target: Target) -> StoredHead:
        """Configuration and tensors in outpace's terms, not yet checked. Raises BadInput for what is not supported."""
        return self.layout.read(self.files, target)

    def load(self, target: Target) -> Head:
        """The head for this target, frozen. Raises IncompatibleHead for the first check that fails."""
        stored = self.read(target)
        findings, head = examine(stored, target)
        wrong = next((one for one in findings if one.problems and not one.loads), None)
        if wrong is not None or head is None:
            problem, check = (wrong.problems[0], wrong.check) if wrong else ("was not checked", "configuration")
            raise IncompatibleHead(f"the head at '{self.files.path}' {problem}", check)
        own = head.state_dict()
        head.load_state_dict({name: stored.tensors[name].to(value.dtype) for name, value in own.items()})
        return head.eval().requires_grad_(False)


def open_head(folder: str | Path) -> HeadFolder:
    """The head in a folder. Raises BadInput for a folder that holds none, and says why."""
    files = HeadFiles(Path(folder))
    for layout in (OwnLayout(), *layouts()):
        kind = layout.kind_of(files)
        if kind is not None:
            find_kind(kind)
            return HeadFolder(files, layout, kind)
    known = ", ".join(f"{one.name} ({one.kind})" for one in layouts())
    raise BadInput(
        f"{files.path / CONFIG} is not the configuration of a head, of outpace or of a layout that is read: {known}"
    )
