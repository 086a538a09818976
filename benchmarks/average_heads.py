"""The mean of two heads' weights, of which one was trained from the other: often better than both (LOG.md).

    python benchmarks/average_heads.py eagle3 heads/part-1 --out heads/mean [--share 0.5] [--model smollm2]

A head that was trained further on other text gains there and loses elsewhere; the mean keeps most of both (Wortsman et
al. 2022, arXiv 2203.05482, "model soups"; arXiv 2109.01903 for the line between a model and what was trained from it).
``share``: of the second head. ``training.json`` of the result names both, and what was spent on the second.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.machine import describe
from outpace.heads import checkpoint
from outpace.heads.shipped import find_head


def averaged(first: str, second: str, out: Path, share: float, name: str) -> None:
    """Write the mean. Raises BadInput for heads that have not the same shapes and words, and for a folder in use."""
    if not 0.0 < share < 1.0:
        raise BadInput(f"--share must be between 0 and 1, not {share:g}")
    if out.exists():
        raise BadInput(f"{out} exists; give another folder")
    model = outpace.load(name)
    folders = [find_head(one, lambda: model) for one in (first, second)]
    one, other = (folder.load(model.target) for folder in folders)
    words = (one.draft_vocabulary.d2t, other.draft_vocabulary.d2t)
    mine, theirs = one.state_dict(), other.state_dict()
    shapes = ({key: value.shape for key, value in state.items()} for state in (mine, theirs))
    if one.config.kind != other.config.kind or next(shapes) != next(shapes) or not torch.equal(*words):
        raise BadInput(f"{first} and {second} are not of one kind, size and draft vocabulary")
    mean = {
        key: torch.lerp(mine[key].float(), value.float(), share) if value.is_floating_point() else value
        for key, value in theirs.items()
    }
    one.load_state_dict(mean)
    spent = [_spent(folder.files.path) for folder in folders]
    command = ["python", "benchmarks/average_heads.py", Path(first).name, Path(second).name, "--share", f"{share:g}"]
    about: dict[str, Any] = {
        **spent[1],
        "mean": {
            "command": shlex.join(command),
            "share": share,
            "weights": [folder.files.fingerprint for folder in folders],
            "first": spent[0],
        },
        "machine": describe(),
    }
    checkpoint.save(one, out, about)


def _spent(folder: Path) -> dict[str, Any]:
    """How a head was trained, as its provenance has it."""
    about = checkpoint.read_provenance(folder) or {}
    names = ("command", "data", "seed", "parameters", "steps", "tokens", "seconds", "from")
    return {name: about[name] for name in names if name in about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    try:
        averaged(given.first, given.second, given.out, given.share, given.model)
    except OutpaceError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
