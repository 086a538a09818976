"""A streaming client of OpenAI's chat API that costs little time: it shares the machine with the servers it measures.

It notes when each part of an answer arrived, and reads what arrived only after the end.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PATH = "/v1/chat/completions"
_READ = 65536


@dataclass(slots=True)
class Reply:
    """One answer. Times are those of the client's clock.

    ``scheduled``: when the request was due, which is when its latencies begin; ``sent``: when it was sent.
    ``arrivals``: when each chunk that brought text arrived. A server that speculates puts several tokens into a chunk.
    ``tokens``: output tokens by the server's own ``usage``; of a server that reports none, the number of chunks.
    """

    scheduled: float
    sent: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    counted: bool = False
    """Whether ``tokens`` is from the server's ``usage``."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    turn: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return self.arrivals[0] - self.scheduled if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds between two chunks that brought text."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first, however they were divided into chunks."""
        if self.tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def latency(self) -> float:
        """Seconds from when it was due to the last byte."""
        return self.ended - self.scheduled

    def tokens_before(self, moment: float) -> float:
        """Output tokens that had arrived by then; a chunk counts for an equal share of the tokens."""
        if not self.arrivals:
            return 0.0
        return self.tokens * sum(at <= moment for at in self.arrivals) / len(self.arrivals)


class Client:
    """Asks one server. Safe for threads: idle connections are kept and handed to whoever asks next."""

    def __init__(self, url: str, timeout: float = 600.0, clock: Callable[[], float] = perf_counter) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port
        self._timeout, self.clock = timeout, clock
        self._idle: list[http.client.HTTPConnection] = []

    def ask(self, body: dict[str, Any], scheduled: float | None = None) -> Reply:
        """Stream one answer. ``scheduled``: when it was due; None: now. An error is noted in the reply."""
        sent = self.clock()
        reply = Reply(sent if scheduled is None else scheduled, sent)
        parts: list[tuple[float, bytes]] = []
        connection = None
        try:
            connection, answer = self._sent(json.dumps(body).encode())
            while part := answer.read1(_READ):
                parts.append((self.clock(), part))
            reply.ended = self.clock()
            if answer.status == 200:
                _read(reply, parts)
            else:
                reply.error = f"status {answer.status}: {b''.join(part for _, part in parts)[:200].decode()}"
            self._idle.append(connection)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection is not None:
                connection.close()
            reply.ended = self.clock()
            reply.error = f"{type(error).__name__}: {error}"
        return reply

    def _sent(self, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection, and the answer that begins on it; a server may have closed an idle connection meanwhile."""
        while True:
            try:
                connection, fresh = self._idle.pop(), False
            except IndexError:
                connection, fresh = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout), True
            try:
                connection.request("POST", PATH, body, {"Content-Type": "application/json"})
                return connection, connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if fresh:
                    raise

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class Rounds(NamedTuple):
    """Rounds of requests, by a server's own counters: those in which anything was drafted, and all."""

    drafted: int
    all: int


_ROUNDS = ("outpace:spec_decode_num_drafts_total", "outpace:spec_decode_num_rounds_total")


def rounds_of(url: str, timeout: float = 20.0) -> Rounds | None:
    """What the server has counted so far, of all its models; None where it is no server of outpace."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    counted = {name: 0.0 for name in _ROUNDS if f"\n{name}{{" in text}
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in counted:
            counted[name] += float(line.rpartition(" ")[2])
    return Rounds(*(int(counted[name]) for name in _ROUNDS)) if len(counted) == len(_ROUNDS) else None


def _read(reply: Reply, parts: list[tuple[float, bytes]]) -> None:
    """Enter the server-sent events of an answer."""
    rest, done, texts = b"", False, []
    for moment, part in parts:
        *events, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                    continue
                text = _event(reply, json.loads(data))
                if text:
                    texts.append(text)
                    reply.arrivals.append(moment)
    reply.text = "".join(texts)
    if not reply.counted:
        reply.tokens = len(reply.arrivals)
    if not done and reply.error is None:
        reply.error = "the stream ended before data: [DONE]"


def _event(reply: Reply, event: dict[str, Any]) -> str:
    """Enter one event; returns the text that it brings."""
    if "error" in event:
        reply.error = str(event["error"])[:200]
        return ""
    if usage := event.get("usage"):
        reply.counted = True
        reply.tokens, reply.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for name, value in (usage.get("speculation") or {}).items():
            if name in ("drafted", "accepted", "rounds"):
                setattr(reply, name, value)
    text = ""
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            text += call.get("function", {}).get("arguments") or ""
    return text
