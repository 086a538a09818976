"""Which head a method drafts with: the one that the caller named, or one that comes with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.checkpoint import CONFIG, read_provenance
from outpace.heads.fingerprint import alike, probe
from outpace.heads.head_folder import HeadFolder, open_head
from outpace.heads.layouts.own import own_config
from outpace.targets.base import Target

SHIPPED = Path(__file__).parent / "weights"


def find_head(kinds: Sequence[str], named: Sequence[str | Path], target: Target) -> Head:
    """A head of one of ``kinds`` for this target: from the ``named`` folders, else a shipped one.

    A named folder may be of any layout that is read. Raises BadInput where there is none, and for a named one that is
    damaged or was made for another target.
    """
    found = find_folder(kinds, named, target)
    if found is not None:
        return found.load(target)
    if named:
        have = ", ".join(sorted({open_head(one).kind for one in named}))
        raise BadInput(f"this method drafts with a head of kind {' or '.join(kinds)}, and --head gave {have}")
    raise BadInput(
        f"this method drafts with a trained head, and none is shipped for this model: train one with "
        f"'outpace train {kinds[0]} --model MODEL --out FOLDER', and give --head FOLDER"
    )


def find_folder(kinds: Sequence[str], named: Sequence[str | Path], target: Target) -> HeadFolder | None:
    """Where :func:`find_head` finds a head of one of ``kinds``; None where there is none."""
    fitting = (one for one in map(open_head, named) if one.kind in kinds)
    return next(fitting, None) or next((one for one in shipped(target) if one.kind in kinds), None)


def measured(method: str, kind: str, named: Sequence[str | Path], target: Target) -> float | None:
    """The greedy speed-up that was measured of a method with its head, as ``training.json`` in the head's folder says.

    None where it was not measured with these very weights (``outpace eval-head --record`` does).
    """
    found = find_folder([kind], named, target)
    try:
        about = (None if found is None else read_provenance(found.files.path)) or {}
        record = about["measured"]["temperature 0"]
        speed = next(float(row["speedup"]) for row in record["drafters"] if row["method"] == method)
        return speed if found is not None and record["weights"] == found.files.fingerprint else None
    except (BadInput, KeyError, TypeError, ValueError, StopIteration):  # not measured, or by another program
        return None


def shipped(target: Target) -> list[HeadFolder]:
    """The shipped heads that were made for this target, by name."""
    fitting, seen = [], None
    for path in sorted(SHIPPED.glob(f"*/{CONFIG}")):
        found = open_head(path.parent)
        theirs = own_config(found.files).target
        sizes = (theirs.hidden_size, theirs.vocab_size, theirs.num_layers)
        if sizes != (target.hidden_size, target.vocab_size, target.num_layers):
            continue
        seen = seen or probe(target)
        if alike(theirs.fingerprint, seen):
            fitting.append(found)
    return fitting
