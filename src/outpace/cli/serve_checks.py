"""What ``outpace serve`` refuses before it loads a model: each check raises BadInput."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outpace.cli import options as opt
from outpace.cli.session import Drafting
from outpace.core.errors import BadInput


def lossless_settings(drafting: Drafting, method: str, *, files: bool = False) -> dict[str, dict[str, Any]]:
    """The settings of the server's own method. Raises BadInput for settings that do not exist, and for a lossy rule.

    ``files``: look at the draft models, heads and the datastore as well, where they are this machine's.
    """
    from outpace.core.sampling import SamplingParams

    if files:
        drafting.check()
    settings = drafting.settings([method], SamplingParams())
    from outpace.methods.registry import find

    if any(not find(label).lossless for label in settings):
        raise BadInput(
            f"method '{method}' is lossy and never the default of a server; let requests choose it (speculation.method)"
        )
    if any(not rule.lossless for rule in drafting.rules(settings)):
        raise BadInput(
            "a lossy rule is never the default of a server; leave it out, and let requests choose it (speculation.rule)"
        )
    return settings


def check_least(**given: tuple[int | None, int]) -> None:
    """Raise BadInput for an option whose value is below its minimum: name=(value, minimum)."""
    for name, (value, least) in given.items():
        if value is not None and value < least:
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def check_service(names: list[str], port: int, time_limit: float | None) -> None:
    """Raise BadInput for models named twice, and for a port or a time limit that cannot be."""
    if len(set(names)) < len(names):
        raise BadInput("--model names the same model twice; a model's id in the API is its name")
    check_port(port)
    if time_limit is not None:
        opt.check_time_limit(time_limit)


def check_port(port: int) -> None:
    """Raise BadInput for what is no port; 0 is any that is free."""
    if not 0 <= port <= 65535:
        raise BadInput(f"--port must be between 0 and 65535, not {port}")


def check_trace(trace: Path | None, texts: bool, names: list[str], *, ray: bool) -> None:
    """Raise BadInput for a trace that could not be written, or would mix several models or replicas."""
    opt.check_trace(trace, texts)
    if trace is None:
        return
    if ray:
        raise BadInput("--trace is for one server; with --ray each replica decodes a part of the requests")
    if len(names) > 1:
        raise BadInput("--trace records the requests to one model; give --model once")
    from outpace.traces.trace_writer import check_new

    check_new(trace)


def check_origin(origin: str) -> None:
    """Browsers send scheme, host and port; anything else would never be equal to it."""
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+", origin):
        raise BadInput(f"--cors-origin {origin}: write scheme and host, such as https://chat.example.com, or * for all")
