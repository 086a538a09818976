"""Which head a method drafts with: the one that the caller named, or one that comes with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.checkpoint import CONFIG, is_ours, load, read_config, read_provenance
from outpace.heads.fingerprint import alike, probe
from outpace.heads.layouts.base import detect, read
from outpace.targets.base import Target

SHIPPED = Path(__file__).parent / "weights"


def find_head(kinds: Sequence[str], named: Sequence[str | Path], target: Target) -> Head:
    """A head of one of ``kinds`` for this target: from the ``named`` folders, else a shipped one.

    A named folder may be of any layout that is read. Raises BadInput where there is none, and for a named one that is
    damaged or was made for another target.
    """
    folder = find_folder(kinds, named, target)
    if folder is not None:
        return load_any(folder, target)
    if named:
        have = ", ".join(sorted({kind_at(Path(one)) for one in named}))
        raise BadInput(f"this method drafts with a head of kind {' or '.join(kinds)}, and --head gave {have}")
    raise BadInput(
        f"this method drafts with a trained head, and none is shipped for this model: train one with "
        f"'outpace train {kinds[0]} --model MODEL --out FOLDER', and give --head FOLDER"
    )


def find_folder(kinds: Sequence[str], named: Sequence[str | Path], target: Target) -> Path | None:
    """Where :func:`find_head` finds a head of one of ``kinds``; None where there is none."""
    for one in named:
        if kind_at(Path(one)) in kinds:
            return Path(one)
    return next((folder for folder in shipped(target) if read_config(folder).kind in kinds), None)


def measured(method: str, kind: str, named: Sequence[str | Path], target: Target) -> float | None:
    """The greedy speed-up that was measured of a method with its head, as the head's folder says.

    Of the method as it is, which comes before its other shapes. None where nobody has measured it (``outpace eval-head
    --record`` does).
    """
    folder = find_folder([kind], named, target)
    try:
        about = (None if folder is None else read_provenance(folder)) or {}
        rows = about["measured"]["temperature 0"]["drafters"]
        return next(float(row["speedup"]) for row in rows if row["drafter"] == method)
    except (BadInput, KeyError, TypeError, ValueError, StopIteration):  # nobody did, or by another program
        return None


def kind_at(folder: Path) -> str:
    """The kind of head in a folder, of whatever layout. Raises BadInput where there is none."""
    if not is_ours(folder) and folder.is_dir():
        found = detect(folder)
        if found is not None:
            return found[1]
    return read_config(folder).kind


def load_any(folder: Path, target: Target) -> Head:
    """The head in a folder, of whatever layout. Raises BadInput, in one line, where it does not fit."""
    if is_ours(folder) or not folder.is_dir() or detect(folder) is None:
        return load(folder, target)
    return read(folder, target)


def shipped(target: Target) -> list[Path]:
    """Folders of the shipped heads that were made for this target, by name."""
    fitting, seen = [], None
    for path in sorted(SHIPPED.glob(f"*/{CONFIG}")):
        theirs = read_config(path.parent).target
        sizes = (theirs.hidden_size, theirs.vocab_size, theirs.num_layers)
        if sizes != (target.hidden_size, target.vocab_size, target.num_layers):
            continue
        seen = seen or probe(target)
        if alike(theirs.fingerprint, seen):
            fitting.append(path.parent)
    return fitting
