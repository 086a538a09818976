"""The heads that come with the package, and what was measured of a head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outpace.core.errors import BadInput
from outpace.core.files import read_json
from outpace.heads.head_config import CONFIG, HeadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from outpace.heads.head_folder import HeadFolder, HeadOwner
    from outpace.targets.base import Target

SHIPPED = Path(__file__).parent / "weights"


def measured(folder: HeadFolder, method: str) -> float | None:
    """The greedy speed-up that was measured of a method with this head, as ``training.json`` beside it says.

    0 for a head that its training has found not to gain; None where it was not measured with these very weights
    (``outpace eval-head --record`` does).
    """
    from outpace.heads.checkpoint import read_provenance

    try:
        about = read_provenance(folder.files.path) or {}
        if "measured" not in about and about.get("trial", {}).get("gains") is False:
            return 0.0
        record = about["measured"]["temperature 0"]
        speed = next(float(row["speedup"]) for row in record["drafters"] if row["method"] == method)
        return speed if record["weights"] == folder.files.fingerprint else None
    except (BadInput, KeyError, TypeError, ValueError, AttributeError, StopIteration):  # or by another program
        return None


def shipped(target: Target) -> list[HeadFolder]:
    """The shipped heads that were made for this target, by name."""
    from outpace.heads.fingerprint import alike, probe
    from outpace.heads.head_folder import open_head
    from outpace.heads.layouts.own import own_config

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


def find_head(named: str | Path, model: Callable[[], HeadOwner], name: str = "") -> HeadFolder:
    """The head in a folder, or the one of a kind that is shipped for the model, which is then loaded. ``name``: the
    user's for the model. Raises BadInput for neither."""
    from outpace.heads.head_folder import open_head

    kind, kinds = str(named), sorted(shipped_for())
    if Path(named).is_dir():
        return open_head(named)
    why = f"no kind of head that is shipped ({', '.join(kinds)})"
    if kind in kinds:
        owner = model()
        offered = {one.kind: one for one in shipped(owner.target)}
        if kind in offered:
            return offered[kind]
        which = f"; these are: {', '.join(sorted(offered))}" if offered else ""
        why = f"no head of this kind is shipped for '{name or owner.name}'{which}"
    raise BadInput(f"there is no head at '{kind}': no such folder, and {why}")


def shipped_for() -> dict[str, list[str]]:
    """By kind of head, the names of the models that one is shipped for. No model is loaded."""
    found: dict[str, list[str]] = {}
    for path in sorted(SHIPPED.glob(f"*/{CONFIG}")):
        config = HeadConfig.model_validate(read_json(path))
        found.setdefault(config.kind, []).append(config.target.name)
    return found
