"""``outpace serve`` as a child process that tells on SIGUSR1 what it holds.

    python -m soaking.child REPORT serve --model ...

At the signal the command, otherwise unchanged, releases its caches of prompts if the file ``REPORT.clear`` exists,
counts what is alive in the process, and writes a JSON object to the file REPORT.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

POOLS = ("asyncio_", "uvloop_", "outpace-grammars_")
"""So the names of the workers of bounded pools begin. A pool starts one where all others are busy, and keeps it."""


def census(clear: bool) -> dict[str, Any]:
    """What is alive: sequences' K/V, requests, jobs; cached blocks; memory, file descriptors, and threads beside the
    workers of bounded pools."""
    from outpace.core.turns import ROUNDS
    from outpace.engine.prefix_cache import PrefixCache
    from outpace.engine.request import Generation
    from outpace.engine.shared_decoder import Ticket
    from outpace.serving.jobs import Job
    from outpace.targets.kv_store import KVStore

    gc.unfreeze()  # what the server loaded is counted too
    gc.collect()
    caches = [one for one in gc.get_objects() if isinstance(one, PrefixCache)]
    if clear:
        with ROUNDS:
            for one in caches:
                one.shrink(0)
    alive = gc.get_objects()
    stores = [one for one in alive if isinstance(one, KVStore) and one.bytes_with(0)]
    names = [one.name for one in threading.enumerate()]
    workers = sum(name.startswith(POOLS) for name in names)
    return {
        "kv_stores": len(stores),
        "kv_bytes": sum(one.bytes_with(0) for one in stores),
        "cached_blocks": sum(map(len, caches)),
        "cached_bytes": sum(one.bytes for one in caches),
        "generations": sum(isinstance(one, Generation) for one in alive),
        "tickets": sum(isinstance(one, Ticket) for one in alive),
        "jobs": sum(isinstance(one, Job) for one in alive),
        "objects": len(alive),
        "thread_names": sorted(names),
        "os_threads": len([*Path("/proc/self/task").iterdir()]) - workers,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "rss": _rss(),
    }


def _rss() -> int:
    """Resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(argv: list[str]) -> int:
    """Run the command line with the signal's handler."""
    from outpace.cli import main as command

    report = Path(argv[0])

    def tell(number: int, frame: object) -> None:
        found = census(report.with_name(report.name + ".clear").exists())
        part = report.with_name(report.name + ".part")
        part.write_text(json.dumps(found))
        part.rename(report)

    # Some methods import it at their first use, and it brings a thread of its own: better before threads are counted.
    import scipy.linalg  # noqa: F401

    signal.signal(signal.SIGUSR1, tell)
    return command(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
