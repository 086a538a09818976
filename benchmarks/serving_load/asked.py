"""The rows and the loads that the options ask for."""

from __future__ import annotations

import argparse

from outpace.bench.peers.libraries import PEERS
from outpace.bench.peers.processes import OURS, available
from outpace.bench.peers.weights import find
from serving_load.conversations import WORKLOADS, questions, traces
from serving_load.measuring import Load
from serving_load.servers import SERVERS, Variant, Wanted, llama_cpp, ours, vllm

_VLLM, _LLAMA = SERVERS[1:]

_OPEN = 16
"""Requests that servers answer together where there are arrivals alone."""


def rows_of(options: argparse.Namespace, model: str) -> tuple[list[Variant], dict[str, str]]:
    """The rows of one model, and the servers that are not installed. Raises BadInput."""
    needs_weights = _VLLM in options.servers or _LLAMA in options.servers
    weights = find(model, "bfloat16") if needs_weights else None
    peers = [PEERS["vllm"]] if _VLLM in options.servers else []
    if _LLAMA in options.servers:
        peers.append(PEERS["llama-cpp-python"])
    pythons, missing = available(peers, options.vllm_python)
    skipped = {one["name"]: f"{one['why']} ({one['install']})" for one in missing}
    wanted = Wanted(
        model,
        options.threads,
        max(options.users, default=_OPEN),
        options.context,
        options.methods,
        options.dtypes,
        weights.folder if weights else "",
        weights.gguf if weights else None,
        weights.gguf_kind if weights else "",
        pythons.get("vllm"),
        options.vllm_kv_gib,
        options.serve_option,
    )
    rows = ours(wanted) if OURS in options.servers else []
    if wanted.vllm is not None:
        rows.append(vllm(wanted))
    if "llama-cpp-python" in pythons:
        if wanted.gguf is None:
            skipped[_LLAMA] = f"needs a GGUF file; {model} is none"
        else:
            rows.append(llama_cpp(wanted))
    return rows, skipped


def loads_of(options: argparse.Namespace) -> list[Load]:
    """All loads, in order. Raises BadInput for a file of prompts that cannot be read."""
    found = []
    singles = questions(options.prompts)
    for workload in options.workloads:
        said = singles if workload == WORKLOADS[0] else traces()
        found += [Load(workload, said, options.requests, users) for users in options.users]
        if workload == WORKLOADS[0]:
            found += [Load(workload, said, options.requests, rate=rate) for rate in options.rates]
    return found
