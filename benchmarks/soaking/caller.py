"""Caller: one HTTP request over a socket of its own, sent and read as badly as the soak wants."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

LONGEST = 180.0
"""Seconds after which a request without an end counts as hung."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How a caller behaves. ``leave_after``: seconds; ``leave_at``: bytes of the answer; ``send``: bytes of the body,
    before it leaves. ``pause``: seconds between reads of a few bytes."""

    leave_after: float | None = None
    leave_at: int | None = None
    send: int | None = None
    pause: float = 0.0
    chunked: bool = False

    @property
    def leaves(self) -> bool:
        """Whether it does not wait for the end."""
        return self.leave_after is not None or self.leave_at is not None or self.send is not None


@dataclass(slots=True)
class Answer:
    """What came back. ``status`` 0: nothing did. ``complete``: the whole body did. ``failure``: of the connection."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    failure: str = ""
    hung: bool = False
    seconds: float = 0.0
    first: float = 0.0
    """Seconds to the first byte of the body."""

    def json(self) -> Any:
        """The body. Raises ValueError where it is none."""
        return json.loads(self.body)


async def ask(
    port: int,
    path: str,
    body: bytes | None = None,
    *,
    key: str | None = None,
    manners: Manners | None = None,
    content_type: str = "application/json",
) -> Answer:
    """Send one request (GET without a body) and read its answer."""
    manners, answer = manners or Manners(), Answer()
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(LONGEST if manners.leave_after is None else manners.leave_after):
            await _exchange(port, _head(path, body, key, content_type, manners), body, manners, answer, began)
    except TimeoutError:
        answer.hung = manners.leave_after is None
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.seconds = loop.time() - began
    return answer


def _head(path: str, body: bytes | None, key: str | None, content_type: str, manners: Manners) -> bytes:
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines.append(f"Content-Type: {content_type}")
        lines.append("Transfer-Encoding: chunked" if manners.chunked else f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _exchange(port: int, head: bytes, body: bytes | None, manners: Manners, answer: Answer, began: float) -> None:
    # A slow reader has a small buffer, too, or the whole answer would fit into it.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024 if manners.pause else 2**16)
    try:
        sending = asyncio.create_task(_send(writer, head, body, manners))
        try:
            if manners.send is not None:
                await sending
                return
            await _read(reader, manners, answer, began)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    finally:
        if manners.leaves:
            writer.transport.abort()
        else:
            writer.close()


async def _send(writer: asyncio.StreamWriter, head: bytes, body: bytes | None, manners: Manners) -> None:
    writer.write(head)
    if body is not None and manners.send is not None:
        writer.write(body[: manners.send])
    elif body is not None and manners.chunked:
        for at in range(0, len(body), 100):
            part = body[at : at + 100]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    elif body is not None:
        writer.write(body)
    await writer.drain()


async def _read(reader: asyncio.StreamReader, manners: Manners, answer: Answer, began: float) -> None:
    loop = asyncio.get_running_loop()
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    answer.headers, answer.status = headers, int(lines[0].split()[1])
    left = int(headers["content-length"]) if "content-length" in headers else None
    parts = bytearray()
    while left is None or left > 0:
        if left is None:
            size = int((await reader.readuntil(b"\n")).strip(), 16)
            if not size:
                await reader.readline()
                break
        else:
            size = left
        while size:
            part = await reader.read(min(size, 64 if manners.pause else 2**16))
            if not part:
                answer.body = bytes(parts)
                answer.failure = "the connection was closed within the answer"
                return
            answer.first = answer.first or loop.time() - began
            parts += part
            size -= len(part)
            left = None if left is None else left - len(part)
            if manners.leave_at is not None and len(parts) >= manners.leave_at:
                return
            if manners.pause:
                await asyncio.sleep(manners.pause)
        if left is None:
            await reader.readline()
        answer.body = bytes(parts)
    answer.body, answer.complete = bytes(parts), True
