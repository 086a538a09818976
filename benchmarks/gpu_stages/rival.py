"""torch.compile as the rival of the hand-made graphs: the same layers over the same buffers, timed in turn.

Two rivals: torch.compile with graphs of its own (mode "reduce-overhead"), and its kernels in a graph of ours (mode
"max-autotune-no-cudagraphs"). Weights and buffers are marked static, because its graphs would copy them at every call
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import fields, is_dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gpu_stages.subject import Subject
from outpace.bench.statistics import speedup, speedup_interval
from outpace.targets.dense.graphs import Capture
from outpace.targets.dense.lanes import Contents

HAND = "hand-made graph"
WITHIN = 0.10
"""Where torch.compile's gain is at most this, the simpler one stays: the hand-made graph, which compiles nothing."""
_CONTEXT = 256

Forward = Callable[[], tuple[Tensor, ...]]


@torch.inference_mode()
def rival(subject: Subject, capture: Capture, rows_to_try: Seq[int], backend: str = "inductor") -> dict[str, Any]:
    """``ratio``: the hand-made graph's time over the rival's, above 1 where the rival is faster, with its interval."""
    rows = [_one(subject, count, capture, backend) for count in rows_to_try]
    advice = advise([one["ci95"][0] for row in rows for one in row["rivals"] if one.get("ci95")])
    print(advice)
    return {"passed": True, "summary": advice, "rows": rows}


def advise(gains: Seq[float]) -> str:
    """Which one to keep, by the lower ends of the intervals of torch.compile's ratios."""
    if not gains:
        return "torch.compile did not run: keep the hand-made graphs"
    if max(gains) <= 1 + WITHIN:
        return f"torch.compile is not more than {WITHIN:.0%} faster anywhere: keep the hand-made graphs"
    return f"torch.compile is at least {max(gains):.2f} times as fast somewhere, more than {WITHIN:.0%}: use it there"


def _one(subject: Subject, rows: int, capture: Capture, backend: str) -> dict[str, Any]:
    torch._dynamo.reset()  # what was compiled for other shapes
    target = subject.target
    [sequence] = subject.opened([min(_CONTEXT, target.context_length - rows - 1)])
    buffer = sequence.kv.reserve(rows)
    step = target.make_step([buffer.data], rows)
    tree, length = subject.chain(rows), sequence.kv.length
    positions = [length + depth for depth in tree.positions()]
    step.inputs.fill([Contents(length, positions, tree.row_tokens(sequence.tokens[-1]), tree.ancestor_mask())])
    work: Forward = lambda: target.forward(step, ())  # noqa: E731
    for tensor in (buffer.data, step.turns, *step.inputs.tensors(), *_tensors(target.decoder)):
        torch._dynamo.mark_static_address(tensor)
    expected = work()[0].clone()
    runs: dict[str, Callable[[], object]] = {HAND: capture(work).replay}
    made: list[dict[str, Any]] = []
    for mode, how in (("reduce-overhead", _compiled), ("max-autotune-no-cudagraphs", _in_our_graph)):
        about: dict[str, Any] = {"mode": mode}
        made.append(about)
        began = perf_counter()
        try:
            run, logits = how(work, mode, backend, capture)
        except Exception as error:  # a compiler is missing, say: the other stages can still run
            about["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            print(f"T = {rows}, {mode}: does not run: {about['error']}", flush=True)
            continue
        about["compile_seconds"] = perf_counter() - began
        about["difference"] = float((logits - expected).float().std() / expected.float().std())
        runs[mode] = run
    times = _in_turn(subject, runs)
    for about in made:
        if about["mode"] in times:
            pair = [[(1.0, seconds) for seconds in times[name]] for name in (about["mode"], HAND)]
            about |= {"ratio": speedup(*pair), "ci95": speedup_interval(*pair), "ms": _mean_ms(times[about["mode"]])}
            print(_line(rows, about, _mean_ms(times[HAND])), flush=True)
    subject.close([sequence])
    return {"rows": rows, "hand_ms": _mean_ms(times[HAND]), "rivals": made}


def _line(rows: int, about: dict[str, Any], hand: float) -> str:
    low, high = about["ci95"] or (float("nan"), float("nan"))
    return (
        f"T = {rows}, {about['mode']}: {about['ms']:.3f} ms, hand-made {hand:.3f} ms, ratio {about['ratio']:.2f} "
        f"[{low:.2f}, {high:.2f}], compiled in {about['compile_seconds']:.0f} s, logits differ by "
        f"{about['difference']:.1e} standard deviations"
    )


def _compiled(work: Forward, mode: str, backend: str, _: Capture) -> tuple[Callable[[], object], Tensor]:
    """torch.compile with its own graphs."""
    compiled = _compile(work, mode, backend)

    def run() -> tuple[Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # what it returned before may be overwritten
        return compiled()

    for _call in range(3):  # compiles, warms up, captures
        logits = run()[0]
    return run, logits.clone()


def _in_our_graph(work: Forward, mode: str, backend: str, capture: Capture) -> tuple[Callable[[], object], Tensor]:
    """torch.compile's kernels, captured as the hand-made graph is."""
    compiled = _compile(work, mode, backend)
    compiled()  # compiles, and measures kernels, which a capture does not allow
    captured = capture(compiled)
    captured.replay()
    return captured.replay, captured.output[0].clone()


def _compile(work: Forward, mode: str, backend: str) -> Forward:
    options: dict[str, Any] = {"mode": mode} if backend == "inductor" else {}
    found: Forward = torch.compile(work, backend=backend, dynamic=False, fullgraph=True, **options)
    return found


def _in_turn(subject: Subject, runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each, in turn, another one first each time."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(-2, max(2, subject.repeat)):
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            seconds = subject.timed(runs[name])
            if number >= 0:  # those before are a warm-up
                times[name].append(seconds)
    return times


def _mean_ms(seconds: list[float]) -> float:
    return 1e3 * sum(seconds) / len(seconds)


def _tensors(found: object) -> Iterator[Tensor]:
    """All tensors of a decoder: its weights."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _tensors(one)
    elif is_dataclass(found):
        for one in fields(found):
            yield from _tensors(getattr(found, one.name))
    elif hasattr(found, "__dict__"):
        yield from _tensors(vars(found))
