"""What the ingress and a replica send to each other: a call, and the messages of its reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as a replica gets it. ``tenant``: whose key it had, and ``priority``: that tenant's highest.

    ``key``: requests with the same key go to the same replica while its load allows it.
    """

    method: str
    path: str
    headers: Headers = ()
    body: bytes = b""
    query: bytes = b""
    tenant: str = ""
    priority: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a reply. ``prompt_tokens``: those that count for the tenant's limit; 0 if there is no prompt."""

    status: int
    headers: Headers
    replica: str
    prompt_tokens: int = 0

    @property
    def streams(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(name.lower() == "content-type" and "event-stream" in value for name, value in self.headers)


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a reply that is complete."""

    completion_tokens: int = 0


Message = Head | bytes | Tail
"""A reply is a Head, any number of parts of the body, and a Tail."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    head: Head
    body: bytes


class ReplicaLost(Exception):
    """The replica that computed a reply died, or cannot be reached."""


class Replicas(Protocol):
    """The running replicas, as the ingress sees them."""

    def ask(self, call: Call) -> AsyncGenerator[Message, None]:
        """The reply of one replica. Raises ReplicaLost, and QueueFull where none has room."""
        ...

    async def ask_all(self, call: Call) -> list[Reply]:
        """The reply of every replica that can be reached."""
        ...

    async def running(self) -> int:
        """How many replicas take requests."""
        ...


async def collected(messages: AsyncGenerator[Message, None]) -> Reply:
    """All messages of a reply as one. Raises ReplicaLost for one that has no end."""
    head: Head | None = None
    parts: list[bytes] = []
    async for message in messages:
        if isinstance(message, Head):
            head = message
        elif isinstance(message, bytes):
            parts.append(message)
        elif head is not None:
            return Reply(head, b"".join(parts))
    raise ReplicaLost("the reply has no end")
