"""Blocks of requests on all servers, which take turns in slices of time, and what was found so far."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from outpace.bench.peers.cpu_contention import CpuContention
from outpace.bench.peers.stopping import TimeLimit
from outpace.bench.results import plain_figures
from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.files import write_atomically
from outpace.core.progress import stage
from serving_load.client import Client, Rounds, rounds_of
from serving_load.conversations import Conversation
from serving_load.figures import Bounds, cell, compared
from serving_load.loads import Block, Body, arrival_times, closed, open_loop
from serving_load.servers import Running, Variant
from serving_load.slices import Slices
from serving_load.tables import headings, line, ratio_line

_WARM_UP = 2
"""Conversations that each row answers before anything is measured."""
_FEWEST = 12
"""Requests of a block, of which a rate is known well enough."""


@dataclass(frozen=True, slots=True)
class Load:
    """One column of cells: which conversations come, and how. ``rate``: requests per second; None: a closed loop."""

    workload: str
    conversations: Sequence[Conversation]
    requests: int
    users: int = 0
    rate: float | None = None

    @property
    def name(self) -> str:
        """As tables and the JSON object name it."""
        how = f"{self.users} user{'s'[: self.users > 1]}" if self.rate is None else f"{self.rate:g} requests/s"
        return f"{self.workload}, {how}"

    def blocks(self) -> Iterator[list[Conversation]]:
        """The conversations of each block. A block is long enough for all users to be active during most of it."""
        turns = sum(len(one.turns) for one in self.conversations) / len(self.conversations)
        total = max(1, round(self.requests / turns))
        size = (
            max(2 * self.users, math.ceil(_FEWEST / turns))
            if self.rate is None
            else math.ceil(max(_FEWEST, 8 * self.rate))
        )
        count = max(1, round(total / size))
        ends = [round(total * at / count) for at in range(count + 1)]
        for begin, end in pairwise(ends):
            yield [self.conversations[at % len(self.conversations)] for at in range(begin, end)]

    def run(self, client: Client, block: Sequence[Conversation], body: Body, name: str, seed: int) -> Block:
        """One block on one server."""
        if self.rate is None:
            return closed(client, block, body, self.users, name)
        turns = sum(len(one.turns) for one in block) / len(block)
        return open_loop(client, block, body, arrival_times(self.rate / turns, len(block), seed), name)


@dataclass(slots=True)
class Results:
    """What was measured so far, and the JSON object of it."""

    path: Path | None
    bounds: Bounds
    about: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)
    contention: CpuContention = field(default_factory=CpuContention)

    def put(self, model: str, load: Load, blocks: dict[str, list[Block]], pairs: Sequence[tuple[str, str]]) -> None:
        """Enter a load's cells, as far as they are, and rewrite the file."""
        cores = machine.usable_cpus()
        found = {
            "model": model,
            "load": load.name,
            "workload": load.workload,
            "users": load.users or None,
            "rate": load.rate,
            "servers": {name: cell(mine, self.bounds, cores) for name, mine in blocks.items() if mine},
            "ratios": [
                {"of": one, "to": other, **compared(blocks[one], blocks[other])}
                for one, other in pairs
                if blocks[one] and len(blocks[one]) == len(blocks[other])
            ],
        }
        self.cells = [one for one in self.cells if (one["model"], one["load"]) != (model, load.name)] + [found]
        self.write()

    def write(self, *, complete: bool = False) -> None:
        """Replace the file by one that holds what was measured so far."""
        if self.path is None:
            return
        found = {"complete": complete, **self.about, "cpu_taken_by_others": self.contention.share, "cells": self.cells}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(plain_figures(found), indent=1).encode())

    def show(self, model: str, load: Load) -> None:
        """Print a load's cells."""
        found = next((one for one in self.cells if (one["model"], one["load"]) == (model, load.name)), None)
        if found is None:
            return
        print(headings(load.name))
        for name, one in found["servers"].items():
            print(line(name, one))
        for one in found["ratios"]:
            print(ratio_line(f"{one['of']} / {one['to']}", one))
        sys.stdout.flush()


def measure(
    results: Results,
    model: str,
    loads: Sequence[Load],
    running: Running,
    common: dict[str, Any],
    limit: TimeLimit,
    timeout: float,
) -> None:
    """All loads, block by block; all rows answer a block in slices of time (:mod:`serving_load.slices`). Raises Stopped
    when the time limit is reached."""
    rows = running.variants
    clients = {one.server.name: Client(one.server.url, timeout) for one in rows}
    pairs = pairs_of(rows)

    def body(one: Variant) -> Body:
        return lambda messages, salt: one.body(messages, salt, common)

    with stage("warming up", total=len(rows), unit="servers") as at:
        for number, one in enumerate(rows, 1):
            for first in loads[0].conversations[:_WARM_UP]:
                [*_, last] = closed(clients[one.server.name], [first], body(one), 1, "warm-up").replies
                if last.error is not None:
                    raise BadInput(f"{one.name} does not answer: {last.error}")
            at.move(number)
    for load in loads:
        blocks: dict[str, list[Block]] = {one.name: [] for one in rows}
        planned = list(load.blocks())
        try:
            # What is measured once on a machine, costs of a batch of this size among it, is measured here.
            with stage(f"{load.name}, warming up", total=len(rows), unit="servers") as at:
                for one in rows:
                    limit.check()
                    running.give_turn(one.server)
                    load.run(clients[one.server.name], planned[0], body(one), f"{load.name} warm-up", 0)
                    at.move(at.done + 1)
            with stage(load.name, total=len(planned), unit="blocks") as at:
                for number, said in enumerate(planned):
                    limit.check()
                    turns = (*rows[number % len(rows) :], *rows[: number % len(rows)])
                    name = f"{load.name} {number}"
                    work = {
                        one.name: partial(load.run, block=said, body=body(one), name=name, seed=number) for one in turns
                    }
                    for row, block in _in_slices(results, running, turns, work, timeout).items():
                        blocks[row].append(block)
                    results.put(model, load, blocks, pairs)
                    at.move(number + 1)
        finally:
            results.show(model, load)


def _in_slices(
    results: Results,
    running: Running,
    rows: Sequence[Variant],
    work: Mapping[str, Callable[[Client], Block]],
    timeout: float,
) -> dict[str, Block]:
    """A block of each row, all at the same time, while their servers take turns. With each server's own count of its
    rounds; the CPU time of other programs is noted."""
    running.go_on()
    counted = {one.name: rounds_of(one.server.url) for one in rows}
    found, failed = dict[str, Block](), list[BaseException]()
    results.contention.begin([one.server.pid for one in rows])
    with Slices([one.server for one in rows]) as slices:

        def answer(one: Variant) -> None:
            client = Client(one.server.url, timeout * len(rows), slices.clock(one.server))
            try:
                found[one.name] = work[one.name](client)
            except BaseException as error:
                failed.append(error)
            finally:
                client.close()
                slices.ended(one.server)

        threads = [threading.Thread(target=answer, args=(one,), daemon=True) for one in rows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results.contention.end()
    if failed:
        raise failed[0]
    for one in rows:
        if (before := counted[one.name]) is not None and (now := rounds_of(one.server.url)) is not None:
            found[one.name].rounds = Rounds(now.drafted - before.drafted, now.all - before.all)
    return found


def pairs_of(rows: Sequence[Variant]) -> list[tuple[str, str]]:
    """What is compared: our first method with the others of its dtype, and each row of ours with the other servers."""
    own = [one for one in rows if "speculation" in one.fields]
    firsts = {one.kind: one for one in reversed(own)}
    pairs = [(firsts[one.kind].name, one.name) for one in own if one is not firsts[one.kind]]
    return pairs + [(one.name, other.name) for one in own for other in rows if other not in own]
