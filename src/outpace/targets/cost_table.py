"""CostTable: times that were measured of a target, kept for later processes on the same machine.

    <cache>/costs/<digest>.json     one table for each machine and target; the digest covers both

A time that anybody has used changes in its table only where forwards have since proved it wrong by a fifth or more,
because the machine was busy when it was measured: otherwise a seed repeats a sampled answer whose draft lengths follow
from these times. Who measures while another process does takes over what that one has written first. A table that
cannot be read, or belongs to another machine, is replaced; if none can be written, times last as long as the process.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from outpace.core import machine
from outpace.core.files import write_atomically
from outpace.models.placement import cpu_flags
from outpace.targets.threads import threads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = 1
_PATIENCE = 2.0
"""Seconds to wait for another process that is writing; then the time is kept in memory alone."""
_SAMPLE = 64


class CostTable:
    """Seconds by name. ``path``: the file, None for memory alone; ``about``: the machine and the target."""

    def __init__(self, path: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._about = json.loads(json.dumps(about or {}))
        self._known: dict[str, float] | None = None
        self.measured = 0
        """How many times were measured in this process, and not read."""

    def once(self, name: str, measure: Callable[[], float]) -> float:
        """What ``measure`` gave when this was first asked for, with as many threads as forwards use now."""
        return self.together([name], lambda: [measure()])[0]

    def together(self, names: Seq[str], measure: Callable[[], Seq[float]]) -> list[float]:
        """As :meth:`once`, for times that are measured together."""
        names = [f"{name}, {threads()} threads" for name in names]
        if self._known is None:
            self._known = self._read()
        if any(name not in self._known for name in names):
            found = self._kept(dict(zip(names, measure(), strict=True)))
            self._known |= found  # measuring may have forgotten some that were known
            self.measured += len(names)
        return [self._known[name] for name in names]

    def known(self, name: str, default: float) -> float:
        """The time of that name if it was read or measured in this process, else ``default``."""
        return (self._known or {}).get(f"{name}, {threads()} threads", default)

    def correct(self, name: str, seconds: float) -> None:
        """Replace a time that has proved wrong."""
        name = f"{name}, {threads()} threads"
        self._rewrite(lambda times: times | {name: seconds})

    def forget(self, prefix: str) -> None:
        """Remove the times whose names begin with ``prefix``, with as many threads as forwards use now."""
        end = f", {threads()} threads"
        self._rewrite(
            lambda times: {
                name: one for name, one in times.items() if not (name.startswith(prefix) and name.endswith(end))
            }
        )

    def _rewrite(self, change: Callable[[dict[str, float]], dict[str, float]]) -> None:
        self._known = change(self._read() if self._known is None else self._known)
        if self.path is None:
            return
        with suppress(OSError, Timeout), FileLock(self.path.with_suffix(".lock"), timeout=_PATIENCE):
            self._write(self.path, change(self._read()))

    def _write(self, path: Path, times: dict[str, float]) -> None:
        content = {**self._about, "seconds": dict(sorted(times.items()))}
        write_atomically(path, json.dumps(content, indent=1).encode())

    def _kept(self, times: dict[str, float]) -> dict[str, float]:
        """Write times down. Of those that another process has written, its own are returned."""
        if self.path is None:
            return times
        with suppress(OSError, Timeout):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=_PATIENCE):
                written = times | self._read()
                self._write(self.path, written)
                return {name: written[name] for name in times}
        return times

    def _read(self) -> dict[str, float]:
        """The times in the file; none where it is missing, broken, or of something else."""
        if self.path is None:
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            times = found.pop("seconds")
            whole = found == self._about and all(0.0 < one < math.inf for one in times.values())
            return {str(name): float(one) for name, one in times.items()} if whole else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


def folder() -> Path:
    """Where the tables are."""
    from outpace.models.gguf_cache import cache_dir

    return cache_dir() / "costs"


def forget() -> int:
    """Remove all tables; returns how many there were. Raises OSError where one cannot be removed."""
    tables = list(folder().glob("*.json"))
    for table in tables:
        table.unlink(missing_ok=True)
        table.with_suffix(".lock").unlink(missing_ok=True)
    return len(tables)


def table_of(weights: str, *, kind: str, precision: str, device: torch.device) -> CostTable:
    """The table of a target on this machine. ``weights``: their :func:`digest` or file's; ``kind``: of target."""
    import torch

    about = {
        "format": FORMAT,
        "machine": {
            **machine.fingerprint(),
            "instructions": instructions(),
            "kernels": kernels(),
            "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
        "target": {"weights": weights, "kind": kind, "precision": precision, "device": str(device)},
    }
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return CostTable(folder() / f"{name}.json", about)


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Tells weights apart: names, shapes and precisions, and evenly spaced elements of every tensor."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].double().cpu()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + sample.numpy().tobytes())
    return found.hexdigest()[:32]


def instructions() -> str:
    """A digest of this processor's instruction sets."""
    return hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16]


def kernels() -> str | None:
    """Which build of the compiled kernels, and what they use of this processor; None where there are none."""
    from outpace.targets.dense.binding import features
    from outpace.targets.dense.kernel_build import NotAvailable, library

    try:
        return f"{Path(library()._name).stem} {features()}"
    except NotAvailable:
        return None
