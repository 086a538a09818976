"""Load: many callers at once, what they got, and what the server used meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from soaking.caller import Answer, ask
from soaking.server import Server
from soaking.traffic import Traffic, Wish
from soaking.verdicts import Read, judged, same

_SHOWN = 20
"""Problems that are kept in full."""


@dataclass(slots=True)
class Tally:
    """What came of the requests."""

    sent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    error_events: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    found: int = 0
    """Problems in all."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(requests so far, resident bytes of the server)."""

    def problem(self, text: str, wish: Wish | None = None, answer: Answer | None = None, number: int = 0) -> None:
        """Note something that must not be."""
        self.found += 1
        if len(self.problems) < _SHOWN:
            entry: dict[str, Any] = {"problem": text, "number": number}
            if wish is not None:
                entry |= {"kind": wish.kind, "path": wish.path, "body": (wish.body or b"")[:2000].decode("latin-1")}
                entry["manners"] = str(wish.manners)
            if answer is not None:
                entry |= {"status": answer.status, "seconds": round(answer.seconds, 3)}
            self.problems.append(entry)

    def shown(self) -> dict[str, Any]:
        """For the report."""
        return {
            "requests": self.sent,
            "kinds": dict(self.kinds.most_common()),
            "statuses": dict(self.statuses.most_common()),
            "compared_with_a_quiet_server": self.compared,
            "error_events": self.error_events,
            "problems": self.problems,
            "problems_found": self.found,
        }


class Load:
    """Sends a traffic's requests. ``known``: the answers of a quiet server to the repeated bodies."""

    def __init__(self, traffic: Traffic, known: dict[int, Read], tally: Tally, callers: int = 24) -> None:
        self.traffic, self.known, self.tally, self.callers = traffic, known, tally, callers
        self.ending = False
        """Set when the server has been sent SIGTERM."""

    async def run(self, server: Server, count: int, until: float, burst: int = 64) -> None:
        """``count`` requests, fewer where the clock (``time.monotonic``) reaches ``until``; from time to time ``burst``
        of them at once."""
        left = count

        async def work() -> None:
            nonlocal left
            while left > 0 and time.monotonic() < until and not (self.ending and server.process.poll() is not None):
                many = min(left, burst if self.traffic.random.random() < 0.002 else 1)
                left -= many
                await asyncio.gather(*(self.one(server, self.traffic.draw()) for _ in range(many)))

        watching = asyncio.create_task(self._watch(server))
        try:
            await asyncio.gather(*(work() for _ in range(self.callers)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def one(self, server: Server, wish: Wish) -> None:
        """Send one and judge its answer."""
        tally = self.tally
        tally.sent += 1
        number, ended = tally.sent, self.ending
        answer = await ask(
            server.port, wish.path, wish.body, key=wish.key, manners=wish.manners, content_type=wish.content_type
        )
        problem, read = judged(wish, answer, ended or self.ending)
        tally.kinds[wish.kind] += 1
        tally.statuses["left" if wish.manners.leaves and not answer.complete else str(answer.status)] += 1
        if read is not None and read.error is not None:
            tally.error_events += 1
        elif read is not None and not problem and wish.repeat is not None and wish.repeat in self.known:
            tally.compared += 1
            problem = same(read, self.known[wish.repeat])
        if problem:
            tally.problem(problem, wish, answer, number)

    async def _watch(self, server: Server) -> None:
        while True:
            if server.process.poll() is None:
                self.tally.memory.append((self.tally.sent, server.rss()))
            await asyncio.sleep(0.5)


async def quiet_answers(server: Server, traffic: Traffic, tally: Tally) -> dict[int, Read]:
    """The repeated bodies' answers, one after the other."""
    found: dict[int, Read] = {}
    for wish in traffic.repeated:
        assert wish.repeat is not None
        answer = await ask(server.port, wish.path, wish.body, key=wish.key)
        problem, read = judged(wish, answer)
        if problem or read is None or read.error is not None:
            tally.problem(problem or f"no answer of the quiet server: {answer.body[:300]!r}", wish, answer)
        else:
            found[wish.repeat] = read
    return found


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes a request, by least squares over the second half of the requests; 0 for too few points."""
    half = points[-1][0] / 2 if points else 0
    late = [(x, y) for x, y in points if x >= half]
    if len(late) < 3 or late[0][0] == late[-1][0]:
        return 0.0
    mean_x, mean_y = sum(x for x, _ in late) / len(late), sum(y for _, y in late) / len(late)
    return sum((x - mean_x) * (y - mean_y) for x, y in late) / sum((x - mean_x) ** 2 for x, _ in late)


async def settled(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until it is true. Whether that came in time."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.1)
    return True
