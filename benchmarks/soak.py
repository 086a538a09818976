"""A soak of ``outpace serve``: thousands of requests of all kinds against a server of its own, on the loopback address.

    python benchmarks/soak.py                               # 10,000 requests to a tiny random model
    python benchmarks/soak.py --requests 300 --model smollm2 --minutes 10 --json out/soak.json

Callers of several tenants send plain, streamed, sampled and seeded requests with all kinds of fields and methods, leave
at random points, read slowly, send half a body, broken JSON, absurd values, too large prompts and bodies, wrong keys,
and bursts beyond the queue's bound; the bound on K/V is so small that requests are preempted. The server is ended by
SIGTERM in the middle of traffic, started again on the same port with a time limit, and ended once more.

Checked: every request is answered completely and as its body demands, or refused or failed in OpenAI's form; repeated
bodies get the answers of a quiet server; after the traffic nothing is held but cached prompts, and these can be
released; threads, file descriptors and memory are what they were; SIGTERM lets accepted requests end, with exit code
0; tenants learn nothing of each other by cached prompts, response times or drafts.

Exit code 1: a check failed; the summary and --json name the seed and the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.core.files import write_atomically
from soaking.caller import ask
from soaking.isolation import cached_prompts, drafts
from soaking.load import Load, Tally, quiet_answers, settled, slope
from soaking.model import write_tiny
from soaking.server import Server
from soaking.traffic import TERMS, Traffic

MOST_BYTES = 65536
CONTEXT_LENGTH = 1024
MOST_GROWTH = 0.10
"""Share of the resident memory in the middle of the traffic by which it may have grown at the end, by its slope."""
GROWTH_ALWAYS_ALLOWED = 24 * 2**20
_MAIN = 0.8
"""Share of the time that the main traffic may take; SIGTERM comes in the rest."""
ENDING = 0.04
"""Share of the requests that are left for the end by SIGTERM and for time limits, each."""


@dataclass(slots=True)
class Soak:
    """One soak. ``kv_bytes``: the bound of the server under load; None: room for about four long requests."""

    model: str
    requests: int
    seconds: float
    seed: int
    folder: Path
    callers: int = 16
    method: str = "auto"
    context_length: int = CONTEXT_LENGTH
    tools: bool = False
    kv_bytes: int = 0
    pairs: int = 30
    tally: Tally = field(default_factory=Tally)
    report: dict[str, Any] = field(default_factory=dict)
    _servers: list[Server] = field(default_factory=list)

    def server(self, name: str, *more: str, port: int = 0) -> Server:
        """Start one with the keys of all tenants."""
        keys = self.folder / "keys.json"
        keys.write_text(json.dumps(TERMS))
        common = ["--model", self.model, "--method", self.method, "--api-keys", str(keys)]
        common += ["--max-request-bytes", str(MOST_BYTES), "--threads", "1"]
        started = Server(self.folder / name, [*common, *more], port)
        self._servers.append(started)
        return started

    async def run(self) -> bool:
        """All of it. Whether every check held."""
        began = time.monotonic()
        try:
            await self._phases(began + _MAIN * self.seconds)
        except RuntimeError as error:
            self.tally.problem(str(error))
        finally:
            for one in self._servers:
                one.kill()
        self.report = {
            "model": self.model,
            "seed": self.seed,
            "seconds": round(time.monotonic() - began, 1),
            **self.tally.shown(),
            **self.report,
        }
        return not self.tally.found

    async def _phases(self, until: float) -> None:
        traffic = Traffic(self.model, self.seed, self.tools, self.context_length, MOST_BYTES)
        alone = ["--max-batch", "1", "--prefix-cache-bytes", "0", "--fixed-costs"]
        bounds = ["--max-batch", "6", "--max-queue", "32", "--kv-bytes", str(self.kv_bytes), "--fixed-costs"]
        quiet, server = await asyncio.gather(
            asyncio.to_thread(self.server, "quiet", *alone), asyncio.to_thread(self.server, "loaded", *bounds)
        )
        known = await quiet_answers(quiet, traffic, self.tally)
        load = Load(traffic, known, self.tally, self.callers)
        ending = max(20, int(self.requests * ENDING))
        await self._traffic(load, server, self.requests - 2 * ending, until)
        await self._isolation(server, quiet)
        await self._ended(quiet, "quiet server")
        await self._terminated(load, server, ending)
        limited = self.server("limited", *bounds, "--time-limit", "0.3", port=server.port)
        await self._time_limits(load, limited, ending)

    async def _traffic(self, load: Load, server: Server, count: int, until: float) -> None:
        await load.run(server, min(count // 10, 100), until)  # threads and caches that stay are there from now on
        before = await self._quiet(server)
        self.tally.memory.clear()
        began, sent = time.monotonic(), self.tally.sent
        await load.run(server, count - sent, until)
        seconds = time.monotonic() - began
        after = await self._quiet(server, before["os_threads"])
        metrics = server.metrics()
        cleared = server.census(clear=True)
        problem = self.tally.problem
        for name in ("kv_stores", "kv_bytes", "generations", "tickets", "jobs"):
            if after[name]:
                problem(f"after the traffic {after[name]} {name} are alive")
        cached = sum(value for key, value in metrics.items() if key.startswith("prefix_cache_bytes"))
        used = sum(value for key, value in metrics.items() if key.startswith("kv_cache_usage_perc")) * self.kv_bytes
        if used or cached != after["cached_bytes"]:
            problem(f"K/V in use: {used:.0f} bytes; cached: {cached:.0f}, by the census {after['cached_bytes']}")
        if cleared["cached_blocks"] or cleared["cached_bytes"]:
            problem(f"released caches hold {cleared['cached_blocks']} blocks, {cleared['cached_bytes']} bytes")
        for name in ("os_threads", "descriptors"):
            if after[name] > before[name]:
                problem(f"{name}: {before[name]} before the traffic, {after[name]} after it")
        if not any(value for key, value in metrics.items() if key.startswith("num_preemptions")):
            problem("no request was preempted, so the bound on K/V was not tested")
        self.report |= {
            "requests_per_second": round((self.tally.sent - sent) / seconds, 1),
            "preemptions": sum(value for key, value in metrics.items() if key.startswith("num_preemptions")),
            "prefix_cache_hits": sum(value for key, value in metrics.items() if key.startswith("prefix_cache_hits")),
            "before": before,
            "after": after,
            "released": cleared,
        }
        self._memory()

    def _memory(self) -> None:
        """Whether the resident memory stays flat over the second half."""
        points = self.tally.memory
        if not points:
            return
        each, requests = slope(points), points[-1][0] - points[0][0]
        middle = points[len(points) // 2][1]
        grown = each * requests / 2
        self.report["memory"] = {
            "rss_mib": [round(y / 2**20, 1) for _, y in points[:: max(1, len(points) // 12)]],
            "bytes_a_request_in_the_second_half": round(each, 1),
            "growth_in_the_second_half_mib": round(grown / 2**20, 2),
        }
        if grown > max(GROWTH_ALWAYS_ALLOWED, MOST_GROWTH * middle):
            self.tally.problem(
                f"memory grows by {each:.0f} bytes a request, {grown / 2**20:.1f} MiB in the second half"
            )

    async def _quiet(self, server: Server, threads: int | None = None) -> dict[str, Any]:
        """Wait for the end of all requests and connections, and of threads beyond so many. What the server holds."""
        if not await asyncio.to_thread(server.idle):
            self.tally.problem(f"requests without an end: {server.metrics()}")
        last: dict[str, Any] = {}

        def still() -> bool:
            nonlocal last
            previous, last = last, server.census()
            same = all(last[name] == previous.get(name) for name in ("descriptors", "os_threads"))
            return same and not last["jobs"] and (threads is None or last["os_threads"] <= threads)

        await settled(still)
        return last

    async def _terminated(self, load: Load, server: Server, count: int) -> None:
        """SIGTERM after ``count`` requests, in the middle of traffic, which goes on until the server has ended."""
        until = time.monotonic() + (1 - _MAIN) * self.seconds
        refused = self.tally.statuses["503"]
        sent = self.tally.sent
        traffic = asyncio.create_task(load.run(server, 20 * count, until, burst=1))
        await settled(lambda: self.tally.sent >= sent + count, (1 - _MAIN) * self.seconds / 2)
        sent = self.tally.sent
        load.ending = True
        server.terminate()
        await traffic
        self.report["sent_after_sigterm"] = self.tally.sent - sent
        self.report["refused_after_sigterm"] = self.tally.statuses["503"] - refused
        if self.tally.sent == sent:
            self.tally.problem("no request was sent after SIGTERM, so the end was not tested")
        await self._exit(server, "server under traffic")
        load.ending = False
        late = await ask(server.port, "/health")
        if late.status:
            self.tally.problem("after its end the server still answers")

    async def _time_limits(self, load: Load, server: Server, count: int) -> None:
        """Requests that take too long end with status 504, or an event, wherever they are."""
        limited = Load(load.traffic, {}, self.tally, load.callers)
        body = {"model": self.model, "prompt": "a b c", "max_tokens": 700, "temperature": 0, "ignore_eos": True}

        async def long(at: int) -> None:
            wish = load.traffic.wish("time limit", "/v1/completions", body | {"stream": bool(at % 2)}, "ann")
            wish.allowed = (200, 429, 504)
            await limited.one(server, wish)

        before = self.tally.statuses["504"] + self.tally.error_events
        await asyncio.gather(*(long(at) for at in range(min(count, 20))))
        if self.tally.statuses["504"] + self.tally.error_events == before:
            self.tally.problem("no request exceeded its time limit, so it was not tested")
        await self._quiet(server)
        await self._ended(server, "server with a time limit")

    async def _isolation(self, used: Server, fresh: Server) -> None:
        found = {
            "cached_prompts": await cached_prompts(used.port, self.model, self.seed, self.pairs),
            "drafts": await drafts(used.port, fresh.port, self.model, self.seed),
        }
        for one in found.values():
            for problem in one["problems"]:
                self.tally.problem(problem)
        self.report |= found

    async def _ended(self, server: Server, name: str) -> None:
        server.terminate()
        await self._exit(server, name)

    async def _exit(self, server: Server, name: str) -> None:
        code = await asyncio.to_thread(server.wait, 60)
        if code != 0:
            self.tally.problem(f"the {name} ended with {code} after SIGTERM: {server.text[-1000:]}")
        if "Traceback" in server.text or '"error"' in server.text:
            self.tally.problem(f"the log of the {name} has an error: {server.text[-3000:]}")


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="any model of outpace serve; default: a tiny random one")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=20, help="no further requests are sent after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--callers", type=int, default=16, help="requests that are sent at once")
    parser.add_argument("--method", default="auto", help="how the server drafts where a request does not say")
    parser.add_argument("--kv-bytes", type=int, help="of the server under load; default: four times a full context")
    parser.add_argument("--json", type=Path, help="where to write the report")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        soak = prepared(given.model, given.requests, given.minutes * 60, given.seed, Path(folder), given.kv_bytes)
        soak.callers, soak.method = given.callers, given.method
        fine = asyncio.run(soak.run())
    text = json.dumps(soak.report, indent=1, ensure_ascii=False)
    print(text)
    if given.json is not None:
        write_atomically(given.json, text.encode())
    print("all checks held" if fine else f"{soak.tally.found} problems; seed {given.seed}", file=sys.stderr)
    return 0 if fine else 1


def prepared(
    model: str | None, requests: int, seconds: float, seed: int, folder: Path, kv_bytes: int | None = None
) -> Soak:
    """A soak of a model, of a tiny one that is written into ``folder`` where none is named."""
    tiny = model is None
    name = str(write_tiny(folder / "tiny", CONTEXT_LENGTH)) if model is None else model
    soak = Soak(name, requests, seconds, seed, folder, tools=tiny)
    if not tiny or kv_bytes is None:
        import outpace

        target = outpace.load(name).target
        soak.context_length = target.context_length
        soak.kv_bytes = kv_bytes or 4 * target.kv_bytes(None, 384)
    else:
        soak.kv_bytes = kv_bytes
    return soak


if __name__ == "__main__":
    sys.exit(main())
