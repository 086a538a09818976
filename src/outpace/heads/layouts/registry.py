"""The layouts of other engines by name and kind of head, and writing a head in one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.head_config import PROVENANCE
from outpace.heads.kinds import discover
from outpace.heads.layouts.base import About, Layout
from outpace.heads.layouts.files import write_folder
from outpace.targets.base import Target

L = TypeVar("L", bound=type[Layout])
_LAYOUTS: list[Layout] = []


def layout(declared: L) -> L:
    """Declare a layout of another engine."""
    _LAYOUTS.append(declared())
    return declared


def layouts() -> list[Layout]:
    """Every layout of another engine, one for each name and kind of head."""
    discover()
    return sorted(_LAYOUTS, key=lambda one: (one.name, one.kind))


def find_layout(name: str, kind: str) -> Layout:
    """The layout of this name for a kind of head. Raises BadInput with the layouts that can be written."""
    written = [one for one in layouts() if one.writes]
    if name not in (known := sorted({one.name for one in written})):
        raise BadInput(f"unknown layout '{name}'; known: {', '.join(known)}")
    fitting = {one.name: one for one in written if one.kind == kind}
    if name not in fitting:
        have = f"it is written as: {', '.join(fitting)}" if fitting else "no layout of other engines has this kind"
        raise BadInput(f"layout '{name}' has no heads of kind '{kind}'; {have}")
    return fitting[name]


def write(head: Head, target: Target, folder: Path, layout_name: str, about: About) -> None:
    """Export a head: ``folder`` then holds all that another engine needs, or does not appear.

    Raises BadInput for a folder that is not empty or cannot be written, and for what the layout cannot express.
    """
    package = find_layout(layout_name, head.kind).package(head, target, about)
    if about.provenance:
        package.json[PROVENANCE] = dict(about.provenance)
    write_folder(folder, package)
