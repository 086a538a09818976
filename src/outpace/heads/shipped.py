"""Which head a method drafts with: the one that the caller named, or one that comes with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outpace.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.checkpoint import CONFIG, load, read_config
from outpace.heads.fingerprint import alike, probe
from outpace.targets.base import Target

SHIPPED = Path(__file__).parent / "weights"


def find_head(kinds: Sequence[str], named: Sequence[str | Path], target: Target) -> Head:
    """A head of one of ``kinds`` for this target: from the ``named`` folders, else a shipped one.

    Raises BadInput where there is none, and for a named one that is damaged or was made for another target.
    """
    configs = [(Path(one), read_config(Path(one))) for one in named]
    for folder, config in configs:
        if config.kind in kinds:
            return load(folder, target)
    for folder in shipped(target):
        if read_config(folder).kind in kinds:
            return load(folder, target)
    if configs:
        have = ", ".join(sorted({config.kind for _, config in configs}))
        raise BadInput(f"this method drafts with a head of kind {' or '.join(kinds)}, and --head gave {have}")
    raise BadInput(
        f"this method drafts with a trained head, and none is shipped for this model: train one with "
        f"'outpace train {kinds[0]} --model MODEL --out FOLDER', and give --head FOLDER"
    )


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
