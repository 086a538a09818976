"""Doubles for the tests of replicas: replicas in this process, which can be told to die."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp

from outpace.integrations.ray.in_process_call import ForwardedTenants, call_app
from outpace.integrations.ray.messages import Call, Head, Message, ReplicaLost, Reply, Tail, collected
from outpace.model import Model
from outpace.serving.app import build_app
from outpace.serving.service import Service
from serving_support import service

STREAM = (("content-type", "text/event-stream; charset=utf-8"),)
WHOLE = (("content-type", "application/json"),)


def scripted(*messages: Message, dies: bool = False) -> AsyncGenerator[Message, None]:
    """A reply of these messages; then the replica dies, or the reply ends."""

    async def play() -> AsyncGenerator[Message, None]:
        for message in messages:
            yield message
        if dies:
            raise ReplicaLost("killed")

    return play()


class LocalReplicas:
    """Replicas over the toy model. ``deaths``: for each call to come, after how many messages its replica dies."""

    def __init__(self, count: int = 2, deaths: Sequence[int | None] = (), **about: Any) -> None:
        self.services = [_open(**about) for _ in range(count)]
        self.apps: list[ASGIApp] = [build_app(one) for one in self.services]
        self.deaths = list(deaths)
        self.asked: list[Call] = []

    async def ask(self, call: Call) -> AsyncGenerator[Message, None]:
        self.asked.append(call)
        dies_after = self.deaths.pop(0) if self.deaths else None
        at = len(self.asked) % len(self.apps)
        seen = 0
        async for message in call_app(self.apps[at], call, f"r{at}"):
            if seen == dies_after:
                raise ReplicaLost("killed")
            seen += 1
            yield message

    async def ask_all(self, call: Call) -> list[Reply]:
        return [await collected(call_app(app, call, f"r{at}")) for at, app in enumerate(self.apps)]

    async def running(self) -> int:
        return len(self.apps)

    def stop(self) -> None:
        for one in self.services:
            one.stop()


def _open(model: Model | None = None, **limits: Any) -> Service:
    found = service(model, **limits)
    found.tenants = ForwardedTenants()
    return found


@contextmanager
def local(*args: Any, **about: Any) -> Any:
    """Local replicas, stopped at the end."""
    replicas = LocalReplicas(*args, **about)
    try:
        yield replicas
    finally:
        replicas.stop()


__all__ = ["STREAM", "WHOLE", "Head", "LocalReplicas", "Tail", "local", "scripted"]
