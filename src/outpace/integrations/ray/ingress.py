"""The address of several replicas: keys and limits are checked once, here, and what a dead replica owes is replayed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence as Seq
from contextlib import aclosing
from threading import Condition

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outpace.engine.scheduler import Closed
from outpace.integrations.ray.ingress_metrics import IngressMetrics, merged
from outpace.integrations.ray.messages import Call, Head, Message, Replicas, Tail
from outpace.integrations.ray.prefix_routing import affinity_key
from outpace.integrations.ray.replay import StreamBroken, replayed
from outpace.integrations.ray.resumed_stream import ResumedStream, resumable
from outpace.serving.app import MOST_BYTES, cross_origin
from outpace.serving.errors import ApiError, api_error
from outpace.serving.guard import Guard, about, tenant_in
from outpace.serving.logs import Log
from outpace.serving.streaming import GONE, error_response, until_gone
from outpace.serving.tenants import Tenant, Tenants

_DECODING = ("/v1/chat/completions", "/v1/completions")
_OF_ONE_REPLICA = ("/timeline",)
_NOT_FORWARDED = ("authorization", "connection", "content-length", "host", "transfer-encoding")
_NOT_SENT = ("connection", "transfer-encoding", "keep-alive")


class Ingress:
    """An ASGI application that answers by asking replicas.

    ``time_limit``: seconds in which the answer to a request must begin. Limits of tenants hold for all replicas
    together; the tokens of a prompt are known, and counted, when a replica has read it.
    """

    def __init__(
        self, replicas: Replicas, tenants: Tenants, log: Log | None = None, *, time_limit: float | None = None
    ) -> None:
        self._replicas, self._tenants, self._time_limit = replicas, tenants, time_limit
        self.log = log or Log()
        self.metrics = IngressMetrics(lambda: self._running)
        self._running = 0
        self._ending = self._abandoned = False
        self._changing = Condition()

    def app(self, *, most_bytes: int = MOST_BYTES, origins: Seq[str] = ()) -> ASGIApp:
        """The whole application: keys, the size of bodies and web pages of other origins are checked first."""
        guarded: ASGIApp = Guard(self, self._tenants, most_bytes, self._refused)
        return CORSMiddleware(guarded, **cross_origin(origins)) if origins else guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            response = await self._own(scope)
            if response is None:
                await _Forwarded(self, scope, receive, send).run()
                return
        except Exception as error:
            response = error_response(self.refusal(error))
            self.metrics.answered(response.status_code)
        await response(scope, receive, send)

    def drain(self) -> None:
        """Take no more requests, and wait for those under way."""
        with self._changing:
            self._ending = True
            self._changing.wait_for(lambda: self._abandoned or not self._running)

    def stop(self) -> None:
        """Let nobody wait for requests under way."""
        with self._changing:
            self._ending = self._abandoned = True
            self._changing.notify_all()

    def enter(self) -> None:
        """A request is under way from now on. Raises Closed when the server ends."""
        with self._changing:
            if self._ending:
                raise Closed("no more requests are taken: this server is shutting down")
            self._running += 1

    def leave(self) -> None:
        """A request has ended."""
        with self._changing:
            self._running -= 1
            self._changing.notify_all()

    def refusal(self, error: BaseException) -> ApiError:
        """What a caller is told of an error; a defect is written to the log."""
        known = api_error(error)
        if known.status == 500:
            self.log.failure("request failed", error)
        return known

    def _refused(self, error: ApiError, scope: Scope) -> None:
        """The guard has refused a request."""
        self.metrics.answered(error.status)
        self.log.refusal(str(error), **about(error, scope))

    def reply(self, call: Call) -> AsyncGenerator[Message, None]:
        """The messages of a complete reply; see :func:`replayed`."""

        def again() -> None:
            self.metrics.replayed()
            self.log.event("replayed", path=call.path, tenant=call.tenant or None)

        resumed = ResumedStream() if call.path in _DECODING and resumable(call.body) else None
        return replayed(lambda: self._replicas.ask(call), again, resumed=resumed)

    @property
    def time_limit(self) -> float | None:
        """Seconds in which an answer must begin."""
        return self._time_limit

    async def _own(self, scope: Scope) -> Response | None:
        """The answers that the ingress gives by itself; None for what a replica must answer."""
        path = scope["path"]
        if path == "/health":
            return JSONResponse({"status": "ok"})
        if path == "/ready":
            if self._ending:
                return JSONResponse({"status": "shutting down"}, 503)
            running = await self._replicas.running()
            status = "ready" if running else "no replica is running"
            return JSONResponse({"status": status, "replicas": running}, 200 if running else 503)
        if path == "/metrics":
            replies = await self._replicas.ask_all(Call("GET", path))
            texts = {one.head.replica: one.body.decode() for one in replies}
            return Response(self.metrics.text() + merged(texts), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path.startswith("/v1/") and path.endswith(_OF_ONE_REPLICA):
            replies = await self._replicas.ask_all(_call(scope, b"", tenant_in(scope)))
            if not replies:
                raise ApiError("no replica is running", 503, retry_after=5)
            best = min(replies, key=lambda one: one.head.status)
            return Response(best.body, best.head.status, media_type="application/json")
        return None


class _Forwarded:
    """One request on its way to a replica and back."""

    def __init__(self, ingress: Ingress, scope: Scope, receive: Receive, send: Send) -> None:
        self._ingress, self._scope, self._receive, self._send = ingress, scope, receive, send
        self._decodes = scope["method"] == "POST" and scope["path"] in _DECODING
        self._tenant = tenant_in(scope) if scope["path"].startswith("/v1/") else Tenant("")
        self._admitted = self._begun = self._streams = False
        self._status = GONE

    async def run(self) -> None:
        """Answer it, or refuse it in words."""
        body = (await self._receive())["body"]
        if not self._decodes:
            await until_gone(self._receive, self._guarded(body))
            return
        self._ingress.enter()
        try:
            await until_gone(self._receive, self._guarded(body))
        finally:
            self._ingress.leave()
            self._ingress.metrics.answered(self._status)

    async def _guarded(self, body: bytes) -> bool:
        try:
            if self._decodes:
                self._tenant.admit(0)
                self._admitted = True
            await self._forward(_call(self._scope, body, self._tenant))
        except TimeoutError:
            await self._refuse(_timed_out(self._ingress.time_limit))
        except OSError:  # the caller's connection is broken
            raise
        except Exception as error:
            await self._refuse(self._ingress.refusal(error))
        return True

    async def _forward(self, call: Call) -> None:
        tail: Tail | None = None
        events = 0
        try:
            async with (
                asyncio.timeout(self._ingress.time_limit) as limit,
                aclosing(self._ingress.reply(call)) as messages,
            ):
                async for message in messages:
                    if isinstance(message, Head):
                        limit.reschedule(None)
                        self._count(message)
                        await self._start(message)
                    elif isinstance(message, Tail):
                        tail = message
                    else:
                        events += message.count(b"\n\n")  # JSON has no line breaks of its own
                        await self._send({"type": "http.response.body", "body": message, "more_body": True})
        finally:
            if tail is not None:
                self._tenant.charge(tail.completion_tokens)
            elif self._streams and self._decodes:  # cut short: an event has a token or more
                self._tenant.charge(events)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _count(self, head: Head) -> None:
        """Count a reply for the tenant's limits: ``admit`` has counted one request and one token for it."""
        if not self._decodes:
            return
        self._ingress.metrics.begun(head.replica)
        if head.status >= 400:
            self._tenant.give_back(0)
        elif head.prompt_tokens:
            self._tenant.charge(head.prompt_tokens - 1)

    async def _start(self, head: Head) -> None:
        self._begun, self._streams, self._status = True, head.streams, head.status
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in head.headers]
        kept = [(name, value) for name, value in headers if name.decode() not in _NOT_SENT]
        kept.append((b"x-outpace-replica", head.replica.encode()))
        await self._send({"type": "http.response.start", "status": head.status, "headers": kept})

    async def _refuse(self, error: ApiError) -> None:
        """Tell of an error: with its status, or as an event of a stream that has begun."""
        self._status = error.status
        if isinstance(error, StreamBroken):
            self._ingress.metrics.broken()
            self._ingress.log.event("broken stream", tenant=self._tenant.name or None)
        if not self._begun:
            if self._admitted:
                self._tenant.give_back(0)
            await error_response(error)(self._scope, self._receive, self._send)
            return
        if self._streams:
            event = b"data: " + to_json(error.body) + b"\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _call(scope: Scope, body: bytes, tenant: Tenant) -> Call:
    kept = tuple((name, value) for name, value in Headers(scope=scope).items() if name not in _NOT_FORWARDED)
    return Call(
        method=scope["method"],
        path=scope["path"],
        headers=kept,
        body=body,
        query=scope["query_string"],
        tenant=tenant.name,
        priority=tenant.priority,
        key=affinity_key(tenant.name, body) if body else "",
    )


def _timed_out(limit: float | None) -> ApiError:
    return ApiError(f"no replica began to answer within {limit or 0:g} s", 504, code="time_limit_exceeded")
