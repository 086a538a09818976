"""Greedy decoding beside transformers and vLLM: each in its own process, in turn, on the same prompts.

transformers decodes with its defaults and with a static cache, for which it compiles its forward and replays CUDA
graphs. The protocol, the clock and the statistics are those of ``outpace bench-peers``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from typing import Any

from outpace.bench.peers.comparison import encode
from outpace.bench.peers.entries import Entry, Question
from outpace.bench.peers.libraries import PEERS
from outpace.bench.peers.peer_rows import compared
from outpace.bench.peers.processes import OURS, WORKERS, Job, Plan, WorkerProcess, available, context_for
from outpace.bench.peers.round_robin import RoundRobin
from outpace.bench.peers.weights import find
from outpace.bench.statistics import speedup, speedup_interval
from outpace.heads.shipped import shipped
from outpace.prompts.questions import load_prompts
from outpace.targets.base import Target

_SHARE = 0.3
"""Of the device's memory that vLLM may take: the other processes hold theirs at the same time."""
_TIMEOUT = 1800.0
"""Seconds for loading or one answer; compiling is part of a first answer."""


def methods(target: Target) -> tuple[str, ...]:
    """Plain decoding, a copy from the text so far, and the shipped EAGLE-3 head where one is made for this target."""
    return ("none", "sam", *sorted({head.kind for head in shipped(target)} & {"eagle3"}))


def decoding(
    name: str, chosen: Seq[str], dtype: str, device: str, *, prompts: int, length: int, vllm_python: str | None = None
) -> dict[str, Any]:
    """``peers`` and ``ours``: rows of ``outpace bench-peers``; ``ratios`` of ours to each peer, with intervals.

    ``passed``: every configuration of ours answered.
    """
    weights = find(name, dtype)
    questions, _ = encode(weights, load_prompts(None, prompts), length)
    job = Job(weights, None, dtype, 1, context_for(max(len(one.tokens) for one in questions), length))
    plan = _plan(job, chosen, device, vllm_python)
    # What is compiled for the longest prompt serves the others; every process answers it once before anything counts.
    longest = max(questions, key=lambda one: len(one.tokens))
    warm_up = Question("warm-up", "", longest.tokens)
    run = RoundRobin(plan, questions, warm_up, length=length, threads=1, timeout=_TIMEOUT, offline=weights.local)
    complete = run.go()
    found = compared(plan.entries, questions)
    ids = [question.id for question in questions]
    mine = [entry for entry in plan.entries if entry.ours]
    ratios = [_ratio(entry, peer, ids) for entry in mine for peer in plan.entries if not peer.ours]
    for entry in plan.entries:
        rate = entry.decode_rate(ids)
        print(f"{entry.label}: {entry.error or 'no answer' if rate is None else f'{rate:.1f} tokens/s'}")
    for one in plan.skipped:
        print(f"{one['name']}: {one['why']}")
    lines = [_line(one) for one in ratios if one["ratio"] is not None]
    print("\n".join(lines))
    passed = complete and all(entry.error is None and len(entry.answers) == len(ids) for entry in mine)
    summary = "; ".join(lines) or "nothing to compare"
    return {"passed": passed, "summary": summary, "ratios": ratios, "skipped": plan.skipped, **found}


def _plan(job: Job, chosen: Seq[str], device: str, vllm_python: str | None) -> Plan:
    # Not the environment of make peers: its vLLM is one for the CPU.
    named = vllm_python or (sys.executable if find_spec("vllm") else None)
    pythons, skipped = available([PEERS["transformers"], *([PEERS["vllm"]] if named else [])], named)
    if named is None:
        skipped.append({"name": "vllm", "why": "not installed here; --vllm-python PATH names an interpreter with it"})
    plan = Plan(skipped=skipped)
    where = {"device": device}
    ours = [Entry(OURS, method, ours=True, precision=job.dtype) for method in chosen]
    plan.add(_process(sys.executable, "ours.py", ours, job.settings({one: {} for one in chosen}, job.dtype) | where))
    for config, given in (("plain", {}), ("static-cache", {"static_cache": True})):
        settings = job.settings({config: given}, job.dtype) | where
        entry = Entry("transformers", config, ours=False)
        plan.add(_process(pythons["transformers"], "transformers.py", [entry], settings))
    if "vllm" in pythons:
        engine = {} if device == "cpu" else {"gpu_memory_utilization": _SHARE}
        settings = job.settings({"plain": {}}, job.dtype) | {"engine": engine}
        vllm = _process(pythons["vllm"], "vllm.py", [Entry("vllm", "plain", ours=False)], settings)
        vllm.foreign = True
        plan.add(vllm)
    return plan


def _process(python: str, worker: str, entries: list[Entry], settings: dict[str, Any]) -> WorkerProcess:
    return WorkerProcess(entries, [python, str(WORKERS / "serve.py"), str(WORKERS / worker)], settings)


def _ratio(mine: Entry, peer: Entry, ids: Seq[str]) -> dict[str, Any]:
    """Of decode rates, on the prompts that both answered."""
    both = [one for one in ids if one in mine.answers and one in peer.answers]
    pair = mine.rates(both), peer.rates(both)
    found = {"ratio": None, "ci95": None} if not both else {"ratio": speedup(*pair), "ci95": speedup_interval(*pair)}
    return {"ours": mine.label, "peer": peer.label, **found}


def _line(ratio: dict[str, Any]) -> str:
    low, high = ratio["ci95"] or (float("nan"), float("nan"))
    return f"{ratio['ours']} over {ratio['peer']}: {ratio['ratio']:.2f} [{low:.2f}, {high:.2f}]"
