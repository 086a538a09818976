"""Milliseconds of a forward by rows, batch and context, captured and not, beside the time to read the weights."""

from __future__ import annotations

from typing import Any

from gpu_stages.subject import BATCHES, ROWS, Subject, bandwidth

CONTEXTS = (256, 2048)
_EAGER = 5
"""How often an eager forward is timed, whose time is no close matter."""


def forwards(subject: Subject, megabytes: int = 2048) -> dict[str, Any]:
    """``ms`` and ``eager_ms`` of scoring a chain after ``context`` tokens in each sequence; ``floor_ms``: reading the
    weights at the bandwidth measured here, K/V left out. Shapes that are not captured have ``captured`` False."""
    target = subject.target
    speed = bandwidth(subject, megabytes)
    floor = 1e3 * target.weight_bytes / speed
    print(f"{speed / 1e9:.0f} GB/s; floor {floor:.3f} ms: {target.weight_bytes / 1e9:.2f} GB of {target.dtype} weights")
    table = []
    for context in dict.fromkeys(min(one, target.context_length - ROWS[-1] - 1) for one in CONTEXTS):
        print(f"after {context} tokens, milliseconds (times the floor; eager): T = {', '.join(map(str, ROWS))}")
        for batch in BATCHES:
            sequences = subject.opened([context] * batch)
            cells = [_cell(subject, sequences, rows) for rows in ROWS]
            table += [{"context": context, "batch": batch, **cell} for cell in cells]
            shown = "  ".join(f"{c['ms']:.2f} ({c['ms'] / floor:.1f}x; {c['eager_ms']:.1f})" for c in cells)
            print(f"batch {batch:>2}: {shown}", flush=True)
            subject.close(sequences)
    summary = f"{table[0]['ms']:.3f} ms at T = 1, {table[0]['ms'] / floor:.2f} times the floor"
    return {"passed": True, "summary": summary, "gb_per_second": speed / 1e9, "floor_ms": floor, "forwards": table}


def _cell(subject: Subject, sequences: list[Any], rows: int) -> dict[str, Any]:
    trees = [(sequence, subject.chain(rows)) for sequence in sequences]
    replayed = subject.target.counts.replayed
    seconds = subject.seconds(lambda: subject.target.score(trees))
    captured = subject.target.counts.replayed > replayed
    with subject.without_capture():
        eager = subject.seconds(lambda: subject.target.score(trees), min(_EAGER, subject.repeat))
    return {"rows": rows, "ms": 1e3 * seconds, "eager_ms": 1e3 * eager, "captured": captured}
