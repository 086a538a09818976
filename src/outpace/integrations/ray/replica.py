"""Replica: one copy of the engine, as Ray Serve runs it: it answers calls and tells whether it is well."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from time import monotonic
from typing import Protocol

from starlette.types import ASGIApp

from outpace.integrations.ray.in_process_call import call_app
from outpace.integrations.ray.messages import Call, Message, Reply, collected
from outpace.serving.service import Service

STUCK_SECONDS = 120.0
"""After which an engine that has requests, and ends no step, counts as broken."""


class Unhealthy(Exception):
    """The replica cannot answer any more: another one must take its place."""


class ReplicaEngine(Protocol):
    """What computes a replica's answers: outpace's engine in this process, or another server's process."""

    def ask(self, call: Call, replica: str) -> AsyncGenerator[Message, None]:
        """The reply to a call; ``replica``: the name of this replica."""
        ...

    def check(self) -> None:
        """Raise Unhealthy where it cannot answer any more."""
        ...

    def close(self) -> None:
        """End what runs outside this process."""
        ...


class AppEngine:
    """outpace's own server, in this process."""

    def __init__(self, app: ASGIApp, service: Service, clock: Callable[[], float] = monotonic) -> None:
        self._app, self._service, self._clock = app, service, clock
        self._seen: dict[str, tuple[int, float]] = {}

    def ask(self, call: Call, replica: str) -> AsyncGenerator[Message, None]:
        """The reply of the application."""
        return call_app(self._app, call, replica)

    def check(self) -> None:
        """Raise Unhealthy where a decoder has requests and has ended no step for a long time."""
        now = self._clock()
        for name, one in self._service.offered.items():
            steps, since = self._seen.get(name, (-1, now))
            if not one.decoder.running or one.decoder.steps != steps:
                self._seen[name] = one.decoder.steps, now
            elif now - since > STUCK_SECONDS:
                raise Unhealthy(f"model '{name}': no step has ended for {now - since:.0f} s")

    def close(self) -> None:
        """All of it ends with this process."""


class Replica:
    """One replica. ``open_engine`` loads the models: it is called once, in the replica's process."""

    def __init__(self, open_engine: Callable[[], ReplicaEngine], name: Callable[[], str]) -> None:
        self._name = name()
        self._engine = open_engine()

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        """The messages of a reply, as they come."""
        async with aclosing(self._engine.ask(call, self._name)) as messages:
            async for message in messages:
                yield message

    async def whole(self, call: Call) -> Reply:
        """A whole reply."""
        return await collected(self._engine.ask(call, self._name))

    def check_health(self) -> None:
        """Called by Ray Serve every few seconds; a replica that raises here three times is replaced."""
        self._engine.check()

    def __del__(self) -> None:
        """Called by Ray Serve when the replica's requests have ended and its process is about to."""
        if (engine := getattr(self, "_engine", None)) is not None:  # None: it could not be opened
            engine.close()
