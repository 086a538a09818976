"""The command that starts vLLM's server: interpreter, model, speculation and environment.

``vllm serve`` of the build for CPUs stops at its own metadata, which is of another name than it asks for, so the
module behind it is started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.bench.peers.worker import environment
from outpace.core.machine import usable_cpus
from outpace.integrations.vllm.interpreter import Interpreter
from outpace.integrations.vllm.plugin_path import plugin_path
from outpace.integrations.vllm.proposer_options import KEY
from outpace.integrations.vllm.speculative_config import Speculation

MODULE = "vllm.entrypoints.openai.api_server"
REFUSED = "min_p and logit_bias"
"""What vLLM answers with status 400 where it speculates."""
_DRAIN = "--shutdown-timeout"
DRAIN = 30
"""Seconds in which a server that was told to end may finish its answers. vLLM's own default, 0, cuts them."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``model``: the folder or hub id that vLLM loads; ``name``: what requests call it. None leaves a value to vLLM.

    ``threads`` of a CPU; ``kv_bytes`` for keys and values; ``further``: arguments for vLLM as they are.
    """

    model: str
    name: str
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_bytes: int | None = None
    threads: int | None = None
    offline: bool = False
    further: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that can be started. ``variables``: of the environment, beside those that are set already."""

    command: list[str]
    variables: dict[str, str]
    speculation: Speculation
    options: ServerOptions
    notes: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the process: ours, without what belongs to our interpreter."""
        return {**environment(self.threads, foreign=True, offline=self.options.offline), **self.variables}

    @property
    def drain_seconds(self) -> float:
        """How long it finishes its answers when it is told to end: ``DRAIN``, or what the user's arguments say."""
        found = float(DRAIN)
        for name, value in zip(self.command, [*self.command[1:], ""], strict=True):
            given = name.removeprefix(f"{_DRAIN}=") if name != _DRAIN else value
            if given != name and given.isdecimal():
                found = float(given)
        return found

    @property
    def threads(self) -> int:
        return self.options.threads or usable_cpus()

    def public(self) -> dict[str, Any]:
        """What ``--print --json`` prints."""
        return {
            "command": self.command,
            "speculative_config": self.speculation.config,
            "method": self.speculation.method,
            "draft_length_from": self.speculation.length_source or None,
            "environment": self.variables,
            "notes": self.notes,
        }


@dataclass(slots=True)
class _Arguments:
    """Command-line arguments, in order."""

    given: list[str] = field(default_factory=list)

    def add(self, name: str, value: object) -> None:
        if value is not None:
            self.given += [name, value if isinstance(value, str) else json.dumps(value)]


def launch(speculation: Speculation, options: ServerOptions, interpreter: Interpreter) -> Launch:
    """The command for a server with this speculation. Raises BadInput for a cache that cannot be written."""
    arguments = _Arguments()
    arguments.add("--model", options.model)
    arguments.add("--served-model-name", options.name)
    arguments.add("--dtype", options.dtype)
    arguments.add("--host", options.host)
    arguments.add("--port", str(options.port))
    arguments.add("--max-model-len", options.max_model_len)
    arguments.add("--max-num-seqs", options.max_num_seqs)
    arguments.add("--kv-cache-memory-bytes", options.kv_bytes)
    arguments.add(_DRAIN, str(DRAIN))
    arguments.add("--speculative-config", speculation.config)
    if speculation.plugin is not None:
        told = {"method": speculation.plugin.method, **speculation.plugin.model_dump(exclude_defaults=True)}
        arguments.add("--additional-config", {KEY: told})
    command = [interpreter.path, "-m", MODULE, *arguments.given, *options.further]
    notes = list(speculation.notes)
    if speculation.config is not None:
        notes.append(f"requests with {REFUSED} get status 400: vLLM refuses them where it speculates")
    if interpreter.version is None:
        notes.append(f"{interpreter.path} has no vLLM; name the interpreter that has it: --vllm-python PATH")
    return Launch(command, _variables(), speculation, options, notes)


def _variables() -> dict[str, str]:
    """Of the environment: the plug-in, and what vLLM needs on a CPU. What the user has set stays."""
    wanted = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads wait for each other where another program has their core
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {"PYTHONPATH": str(plugin_path())} | {
        name: value for name, value in wanted.items() if name not in os.environ
    }
