"""Replicas on Ray under load, and one that is killed: is every accepted request accounted for?

Starts ``outpace serve --ray``, asks for conversations of two turns (half of the users as streams), kills one replica's
process in the middle, and compares what came with the answers of the same server before the kill. Each request must
end in one of these ways: complete, with the text that it had undisturbed; a stream that ends with an error event, after
a beginning of that text; refused with a status code. Anything else is lost. Needs outpace[serve,ray].

    python benchmarks/ray_replicas.py --replicas 2 --kill 1 --json out/ray_replicas.json
    python benchmarks/ray_replicas.py --sampled --kill 2
    python benchmarks/ray_replicas.py --serve "--engine vllm --method pld --dtype float32 --kv-bytes 268435456
        --max-model-len 1024 --engine-arg=--enforce-eager" --tokens 48
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped, unused-ignore]

PATH = "/v1/chat/completions"
REPLICA = "ray::ServeReplica:outpace:engine"
_QUESTIONS = (
    "Name {n} animals that live in the sea, and say one thing about each of them.",
    "Write {n} short sentences about a journey by train through the mountains.",
    "Explain in {n} steps how bread is baked at home.",
    "List {n} tools that a gardener needs, and what each is for.",
)
SAMPLED = 0.8
"""The temperature of sampled answers."""
_FOLLOWING = "Now say the same in other words."


@dataclass(slots=True)
class Ended:
    """How one request ended. ``outcome``: complete, broken (an error event), refused (a status) or lost."""

    outcome: str
    text: str = ""
    status: int = 0
    replica: str = ""
    detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    streamed: bool = False


def ask(url: str, body: dict[str, Any], timeout: float = 300.0) -> Ended:
    """Send one request and read its answer."""
    begun = time.perf_counter()
    ended = _ask(url, body, timeout)
    ended.seconds, ended.streamed = time.perf_counter() - begun, bool(body.get("stream"))
    return ended


def _ask(url: str, body: dict[str, Any], timeout: float) -> Ended:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return Ended("lost", detail=f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    replica = answer.headers.get("x-outpace-replica", "")
    if answer.status != 200:
        return Ended("refused", status=answer.status, replica=replica, detail=read.decode()[:200])
    found = _streamed(read) if body.get("stream") else _whole(read)
    found.status, found.replica = 200, replica
    return found


def _whole(read: bytes) -> Ended:
    try:
        found = json.loads(read)
        usage = found["usage"]
        return Ended(
            "complete",
            found["choices"][0]["message"]["content"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=_cached(usage),
            tokens=usage["completion_tokens"],
        )
    except (ValueError, KeyError) as error:
        return Ended("lost", detail=f"{error}: {read[:200]!r}")


def _streamed(read: bytes) -> Ended:
    found, reason = Ended("lost", detail="the stream has no end"), ""
    events = [line[6:] for line in read.decode().splitlines() if line.startswith("data: ")]
    for event in events:
        if event == "[DONE]":
            if found.outcome != "broken":
                found.outcome, found.detail = ("complete", "") if reason else ("lost", "no finish_reason")
            break
        chunk = json.loads(event)
        if "error" in chunk:
            found.outcome, found.detail = "broken", chunk["error"]["code"]
            continue
        for choice in chunk["choices"]:
            found.text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
        if usage := chunk.get("usage"):
            found.prompt_tokens, found.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            found.cached_tokens = _cached(usage)
    return found


def _cached(usage: dict[str, Any]) -> int:
    """Tokens of the prompt that were cached; 0 from an engine that does not tell."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


@contextmanager
def served(options: Sequence[str], log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of a server, ended by SIGTERM."""
    command = [sys.executable, "-m", "outpace", "serve", "--ray", "--port", "0", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            yield _ready(process, log), process
            process.send_signal(signal.SIGTERM)
            process.wait(120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _ready(process: subprocess.Popen[bytes], log: Path, patience: float = 300.0) -> str:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("ready: "):
                return line.removeprefix("ready: ").strip()
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"the server did not become ready: {log.read_text(errors='replace')[-2000:]}")


def replicas(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes of a server's replicas, the oldest first."""
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        try:
            if " ".join(one.cmdline()).startswith(REPLICA):
                found.append(one)
        except psutil.Error:
            continue
    return sorted(found, key=lambda one: one.create_time())


def conversations(count: int, model: str, tokens: int, *, sampled: bool = False) -> list[dict[str, Any]]:
    """First turns; every second one is streamed. ``sampled``: half of them, streamed or not, above temperature 0."""
    found = []
    for number in range(count):
        question = _QUESTIONS[number % len(_QUESTIONS)].format(n=number + 2)
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": SAMPLED if sampled and number % 4 > 1 else 0,
        }
        if number % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        found.append(body)
    return found


def followed(body: dict[str, Any], answer: str) -> dict[str, Any]:
    """The second turn."""
    later = [{"role": "assistant", "content": answer}, {"role": "user", "content": _FOLLOWING}]
    return {**body, "messages": [*body["messages"], *later]}


def asked(url: str, bodies: Sequence[dict[str, Any]], users: int, during: threading.Event | None = None) -> list[Ended]:
    """Ask for all, by so many users at a time; ``during`` is set when a quarter has ended."""
    ended: dict[int, Ended] = {}
    waiting = list(enumerate(bodies))
    taking = threading.Lock()

    def user() -> None:
        while True:
            with taking:
                if not waiting:
                    return
                at, body = waiting.pop(0)
            ended[at] = ask(url, body)
            if during is not None and len(ended) >= len(bodies) // 4:
                during.set()

    threads = [threading.Thread(target=user) for _ in range(users)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return [ended[at] for at in range(len(bodies))]


def account(bodies: Sequence[dict[str, Any]], before: Sequence[Ended], after: Sequence[Ended]) -> dict[str, int]:
    """How the requests ended; a greedy answer that differs from the undisturbed one counts as that."""
    counts: Counter[str] = Counter()
    for body, undisturbed, one in zip(bodies, before, after, strict=True):
        outcome, sampled = one.outcome, body["temperature"] > 0
        if not sampled and outcome == "complete" and one.text != undisturbed.text:
            outcome = "different"
        if not sampled and outcome == "broken" and not undisturbed.text.startswith(one.text):
            outcome = "different"
        stream = "sampled stream" if sampled else "stream"
        counts[f"{outcome} {stream if one.streamed else 'whole'}"] += 1
    return dict(sorted(counts.items()))


def _share(ended: Sequence[Ended]) -> float:
    return sum(one.cached_tokens for one in ended) / max(1, sum(one.prompt_tokens for one in ended))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    given = ["--model", options.model, "--threads", str(options.threads), "--replicas", str(options.replicas)]
    bodies = conversations(options.conversations, options.model, options.tokens, sampled=options.sampled)
    with served([*given, "--log-requests", *shlex.split(options.serve)], options.log) as (url, process):
        began = time.perf_counter()
        first = asked(url, bodies, options.users)
        seconds = time.perf_counter() - began
        second = asked(url, [followed(*one) for one in _texts(bodies, first)], options.users)
        stayed = sum(one.replica == two.replica for one, two in zip(first, second, strict=True))
        killed: list[int] = []
        disturbed: list[Ended] = []
        if options.kill:
            quarter = threading.Event()
            victims = replicas(process)[: options.kill]
            asking = threading.Thread(target=lambda: disturbed.extend(asked(url, bodies, options.users, quarter)))
            asking.start()
            quarter.wait()
            for one in victims:
                one.kill()
                killed.append(one.pid)
            asking.join()
        until = time.monotonic() + 120
        while len(replicas(process)) < options.replicas and time.monotonic() < until:
            time.sleep(0.5)
        metrics = _get(url, "/metrics")
        whole_again = len(replicas(process))
    code = process.returncode
    replays = [line.split()[-1] for line in metrics.splitlines() if line.startswith("outpace:ingress_replays_total ")]
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "requests": len(bodies),
        "undisturbed": dict(Counter(one.outcome for one in (*first, *second))),
        "tokens_per_second": round(sum(one.tokens for one in first) / seconds, 1),
        "replicas_that_answered": dict(Counter(one.replica for one in first)),
        "second_turns_at_the_same_replica": stayed,
        "cached_share_of_second_turns": round(_share(second), 3),
        "killed": len(killed),
        "after_the_kill": account(bodies, first, disturbed) if killed else {},
        "replays": float(replays[0]),
        "replicas_at_the_end": whole_again,
        "exit_code": code,
        "details": [asdict(one) for one in disturbed if one.outcome != "complete"],
    }


def _texts(bodies: Sequence[dict[str, Any]], first: Sequence[Ended]) -> list[tuple[dict[str, Any], str]]:
    return [(body, one.text) for body, one in zip(bodies, first, strict=True)]


def _get(url: str, path: str) -> str:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--users", type=int, default=8, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--sampled", action="store_true", help="half of the answers above temperature 0")
    parser.add_argument("--kill", type=int, default=1, help="replicas that are killed under load")
    parser.add_argument("--serve", default="", help="further options of outpace serve, such as '--engine vllm'")
    parser.add_argument("--log", type=Path, default=Path("out/ray_replicas.log"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    found = measured(options)
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
