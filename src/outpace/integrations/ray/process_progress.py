"""Progress: does another server's process go on? One that hangs answers no request and does not end.

An engine can hang while its server still answers, so vLLM's own figures are looked at: with requests, they change with
every step.
"""

from __future__ import annotations

import http.client
import urllib.error
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import monotonic

from outpace.core.loopback import urlopen
from outpace.integrations.ray import replica
from outpace.integrations.ray.messages import Message
from outpace.integrations.ray.replica import Unhealthy

LOOK_SECONDS = 5.0
_PATIENCE = 30.0
_OF_VLLM = b"vllm:"


class Progress:
    """When a server at ``url`` last went on."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._figures, self._since, self._running = b"", monotonic(), 0

    async def counted(self, messages: AsyncGenerator[Message, None]) -> AsyncGenerator[Message, None]:
        """The messages of a reply, which the server works on meanwhile."""
        self._running += 1
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield message
        finally:
            self._running -= 1

    def look(self) -> None:
        """Ask the server for its figures. Takes as long as it takes to answer, up to a bound."""
        try:
            with urlopen(f"{self._url}/metrics", _PATIENCE, ours=True) as answer:
                text = answer.read()
        except urllib.error.HTTPError:  # it has no figures, but it answers
            text = b""
        except (OSError, http.client.HTTPException):
            return
        figures = b"\n".join(line for line in text.splitlines() if line.startswith(_OF_VLLM))
        if not self._running or not figures or figures != self._figures:
            self._figures, self._since = figures, monotonic()

    def check(self) -> None:
        """Raise Unhealthy where it has requests and ends no step, or does not answer, for ``STUCK_SECONDS``."""
        idle = monotonic() - self._since
        if idle > replica.STUCK_SECONDS:
            raise Unhealthy(f"the engine's process: no step has ended, or it has not answered, for {idle:.0f} s")
