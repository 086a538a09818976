"""K/V by ancestor: what the sequences of a group become after a round."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outpace.targets.base import Scores, Sequence, Target


def gather(
    model: Target, sequences: Seq[Sequence], heirs: Seq[tuple[int, Seq[int]]], scores: Scores | None, first: int = 0
) -> list[Any]:
    """K/V of every heir, (ancestor, path of nodes). The K/V of ``sequences`` must not be used afterwards.

    A sequence with one heir gives its K/V away, one with several is copied for all but the first, and that of one
    without any is closed. ``scores``: a forward over the sequences' trees, the first of which is part ``first``; root
    and path are committed from it. None: nothing was run, and nothing is committed.
    """
    children: dict[int, list[int]] = {}
    for at, (ancestor, _) in enumerate(heirs):
        children.setdefault(ancestor, []).append(at)
    found: list[Any] = [None] * len(heirs)
    for ancestor, sequence in enumerate(sequences):
        if ancestor not in children:  # first, so that there are never more than the group owns
            model.close(sequence.kv)
    for ancestor, mine in children.items():
        for at in mine[1:]:  # before anything is committed: all begin with the same rows
            found[at] = model.fork(sequences[ancestor].kv)
        found[mine[0]] = sequences[ancestor].kv
    if scores is None:
        return found
    turn = 0
    while taking := {ancestor: mine[turn] for ancestor, mine in children.items() if turn < len(mine)}:
        # Scores commit to the K/V that their sequence has: one heir of every ancestor at a time.
        paths: list[Seq[int] | None] = [None] * len(scores)
        for ancestor, at in taking.items():
            sequences[ancestor].kv = found[at]
            paths[first + ancestor] = heirs[at][1]
        model.commit(scores, paths)
        turn += 1
    return found
