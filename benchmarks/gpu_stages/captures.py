"""Whether a forward of each shape is captured and replayed, what that costs, and after how many forwards it pays."""

from __future__ import annotations

from typing import Any

from gpu_stages.subject import BATCHES, ROWS, Subject, memory
from outpace.core.tree import TokenTree
from outpace.targets.base import Sequence
from outpace.targets.dense.graphs import BUCKETS

_LENGTH = 40
_TIMES = 3
"""How often a forward is timed."""


def captures(subject: Subject) -> dict[str, Any]:
    """``passed``: every shape was captured at its second use and replayed at its third. Memory in bytes."""
    shapes: list[dict[str, Any]] = []
    counts = subject.target.counts
    for batch in BATCHES:
        for rows in ROWS:
            if batch * rows > BUCKETS[-1]:
                continue
            sequences = subject.opened([_LENGTH] * batch)
            trees = [(sequence, subject.chain(rows)) for sequence in sequences]
            replayed, refused = counts.replayed, counts.refused

            def score(trees: list[tuple[Sequence, TokenTree]] = trees) -> None:
                subject.target.score(trees)

            score()  # of a new shape: as it is
            held = memory(subject.device)
            capture = subject.timed(score)
            more = memory(subject.device) - held
            replay = subject.seconds(score, _TIMES)
            captured = counts.replayed - replayed > _TIMES and counts.refused == refused
            with subject.without_capture():
                eager = subject.seconds(score, _TIMES)
            shape = {
                "batch": batch,
                "rows": rows,
                "captured": captured,
                "eager_ms": 1e3 * eager,
                "capture_ms": 1e3 * capture,
                "replay_ms": 1e3 * replay,
                "bytes": more,
                "why": counts.why if counts.refused > refused else "",
            }
            shapes.append(shape)
            print(_line(shape), flush=True)
            subject.close(sequences)
    good = sum(shape["captured"] for shape in shapes)
    return {"passed": good == len(shapes), "summary": f"{good} of {len(shapes)} shapes captured", "shapes": shapes}


def _line(shape: dict[str, Any]) -> str:
    where = f"batch {shape['batch']:>2} x {shape['rows']:>2} rows: "
    if not shape["captured"]:
        return f"{where}NOT captured: {shape['why'] or 'no reason given'}"
    gain = shape["eager_ms"] - shape["replay_ms"]
    worth = f"pays off after {shape['capture_ms'] / gain:.0f} forwards" if gain > 0 else "does not pay off"
    return (
        f"{where}eager {shape['eager_ms']:.2f} ms, capture {shape['capture_ms']:.1f} ms, replay "
        f"{shape['replay_ms']:.2f} ms, {shape['bytes'] / 2**20:.0f} MiB more, {worth}"
    )
