"""Which model is loaded, and how it runs on this machine."""

from __future__ import annotations

from typing import Annotated

from outpace.cli.options.declaration import MACHINE, option
from outpace.core.errors import BadInput
from outpace.core.machine import usable_cpus

ModelName = Annotated[
    str, option("--model", "-m", value="NAME", text="Hub id, folder, GGUF file, or 'smollm2' (embedded).")
]
FixedCosts = Annotated[
    bool,
    option(
        "--fixed-costs",
        panel=MACHINE,
        text="Choose draft lengths by nominal costs instead of measured ones, so that a seed gives the same sampled "
        "answer on every machine. [dim]\\[default: costs measured once on this machine][/]",
    ),
]
KvDtype = Annotated[
    str,
    option(
        "--kv-dtype",
        value="NAME",
        panel=MACHINE,
        text="Format of the context's keys and values: auto (16 bits; 32 in float32) or int8 (half the memory, rounds "
        "more; on a CPU).",
    ),
]
Threads = Annotated[
    int | None,
    option(
        value="N",
        panel=MACHINE,
        text="Number of CPU threads. [dim]\\[default: as PyTorch chooses, usually one per core][/]",
    ),
]


def check_threads(threads: int | None) -> None:
    """Raise BadInput for a number of threads that this machine does not have."""
    have = usable_cpus()
    if threads is not None and not 1 <= threads <= have:
        raise BadInput(f"--threads must be between 1 and {have} (this machine's), not {threads}")
