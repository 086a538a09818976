"""Which processes a comparison needs, and what each of them is told to load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.bench.peers.entries import Entry
from outpace.bench.peers.gguf_formats import OWN
from outpace.bench.peers.libraries import PEERS, Config, Peer
from outpace.bench.peers.weights import Weights
from outpace.core.errors import BadInput
from outpace.core.files import home_expanded

WORKERS = Path(__file__).parent / "workers"
OURS = "outpace"
VLLM_PYTHON = Path(".peers/vllm/bin/python")
"""Where ``make peers`` puts vLLM, from the checkout's folder."""

_PATIENCE = 60  # seconds for an interpreter to say whether it has vLLM
_SPARE = 32  # tokens of context that drafts may use beyond the answer


@dataclass(slots=True)
class WorkerProcess:
    """One process and the entries that it answers for.

    ``requantize``: the GGUF format to make of its file first. ``compiled``: the package to build again where its build
    does not run on this CPU; ``build``: the folder of one that was.
    """

    entries: list[Entry]
    command: list[str]
    settings: dict[str, Any]
    foreign: bool = False
    requantize: str | None = None
    compiled: str | None = None
    build: str | None = None


@dataclass(slots=True)
class Plan:
    """All processes, all rows (``entries``), and the peers that are not installed (``skipped``)."""

    processes: list[WorkerProcess] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def add(self, process: WorkerProcess) -> None:
        """Add a process and its rows. It is not started where none of its rows can run."""
        self.entries += process.entries
        if any(entry.error is None for entry in process.entries):
            self.processes.append(process)


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes share."""

    weights: Weights
    draft: Weights | None
    dtype: str
    threads: int
    context: int
    heads: tuple[str, ...] = ()
    gguf_formats: tuple[str, ...] = (OWN,)

    def settings(self, configs: Mapping[str, Mapping[str, Any]], dtype: str) -> dict[str, Any]:
        return {
            "model": self.weights.name,
            "folder": self.weights.folder,
            "gguf": self.weights.gguf,
            "gguf_kind": self.weights.gguf_kind,
            "draft": self.draft.name if self.draft else None,
            "draft_folder": self.draft.folder if self.draft else None,
            "draft_gguf": self.draft.gguf if self.draft else None,
            "dtype": dtype,
            "heads": list(self.heads),
            "threads": self.threads,
            "context": self.context,
            "configs": {name: dict(one) for name, one in configs.items()},
        }


def make_plan(
    job: Job, dtypes: Sequence[str], methods: Sequence[str], peers: Mapping[str, str], skipped: list[dict[str, str]]
) -> Plan:
    """Ours, a process a dtype; then the peers, a process a configuration. ``peers``: interpreter by peer's name."""
    plan = Plan(skipped=skipped)
    for dtype in dtypes:
        entries = [Entry(OURS, method, ours=True, precision=dtype) for method in methods]
        settings = job.settings({method: {} for method in methods}, dtype)
        plan.add(WorkerProcess(entries, worker_command(sys.executable, "ours.py"), settings))
    for name, python in peers.items():
        peer = PEERS[name]
        for config in peer.configs:
            if not config.draft or job.draft is not None:
                for format_ in job.gguf_formats if config.formats else (OWN,):
                    plan.add(_process(peer, config, job, python, None if format_ == OWN else format_))
    return plan


def _process(peer: Peer, config: Config, job: Job, python: str, requantize: str | None) -> WorkerProcess:
    entry = Entry(peer.name, config.name, ours=False, weights=requantize, error=_obstacle(peer, config, job))
    return WorkerProcess(
        [entry],
        worker_command(python, peer.worker),
        job.settings({config.name: config.settings}, job.dtype),
        foreign=peer.own_python,
        requantize=requantize,
        compiled=peer.name if peer.compiled else None,
    )


def worker_command(python: str, worker: str) -> list[str]:
    """A process of ``workers/serve.py`` with a file beside it."""
    return [python, str(WORKERS / "serve.py"), str(WORKERS / worker)]


def _obstacle(peer: Peer, config: Config, job: Job) -> str | None:
    """Why a configuration cannot run on these weights, known without trying."""
    if peer.reads == "gguf" and job.weights.gguf is None:
        return f"needs a GGUF file; {job.weights.name} is none"
    if peer.reads == "gguf" and config.draft and job.draft and job.draft.gguf is None:
        return f"needs a GGUF file; the draft model {job.draft.name} is none"
    return None


def context_for(longest_prompt: int, length: int) -> int:
    """Room for the longest prompt, its answer and a draft, in whole blocks of 256."""
    return -(-(longest_prompt + length + _SPARE) // 256) * 256


def available(peers: Sequence[Peer], vllm_python: str | None) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Interpreters of the peers that are installed, and the others. Raises BadInput for a named one without vLLM."""
    found: dict[str, str] = {}
    skipped = []
    for peer in peers:
        python = _own_python(vllm_python) if peer.own_python else sys.executable if find_spec(peer.module) else None
        if python is None:
            skipped.append({"name": peer.name, "why": "not installed", "install": peer.install})
        else:
            found[peer.name] = python
    return found, skipped


def _own_python(named: str | None) -> str | None:
    """The interpreter that has vLLM; None where none was named and there is none beside the current folder."""
    if named is None:
        return str(VLLM_PYTHON.absolute()) if VLLM_PYTHON.is_file() and _has_vllm(str(VLLM_PYTHON)) is True else None
    path = home_expanded(named)
    if not path.is_file():
        raise BadInput(f"--vllm-python: there is no file {named}; make peers puts one at {VLLM_PYTHON}")
    has = _has_vllm(str(path))
    if has is None:
        raise BadInput(f"--vllm-python: {named} does not run as a Python interpreter")
    if not has:
        raise BadInput(f"--vllm-python: {named} has no vllm; install it there, or run make peers")
    return str(path.absolute())  # not resolve: an environment's interpreter is a link, and the place of the link counts


def _has_vllm(python: str) -> bool | None:
    """Asked without importing it, which would take half a minute. None: this is no interpreter."""
    code = "import importlib.util, json; print(json.dumps(importlib.util.find_spec('vllm') is not None))"
    try:
        ran = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=_PATIENCE, check=True)
        return json.loads(ran.stdout) is True
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
