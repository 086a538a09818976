"""A call of an ASGI application in this process: the reply's messages, and the tokens that count for the tenant.

The ingress has checked the key and the limits; a replica is told only who asks. What the application would charge to
the tenant's limits is reported to the ingress instead, because a limit holds for all replicas together.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import ASGIApp, Message as AsgiMessage, Scope

from outpace.integrations.ray.messages import Call, Head, Message, ReplicaLost, Tail
from outpace.serving.tenants import Tenant, Tenants, Terms

_LEAVING_SECONDS = 10.0
"""In which an application must end a call whose caller has left."""
_TENANTS = 10_000
"""Whose locks are kept, the last ones."""


@dataclass(slots=True)
class Account:
    """Tokens of one call."""

    tenant: str = ""
    priority: int = 0
    prompt: int = 0
    completion: int = 0


_ACCOUNT: ContextVar[Account | None] = ContextVar("outpace-account", default=None)


class _CountedTenant(Tenant):
    """The tenant of one call: without limits of its own, it counts into the call's account."""

    def __init__(self, account: Account) -> None:
        super().__init__(account.tenant, Terms(key="checked by the ingress", priority=account.priority))
        self._account = account

    def admit(self, prompt_tokens: int) -> None:
        self._account.prompt = prompt_tokens

    def give_back(self, prompt_tokens: int) -> None:
        self._account.prompt = 0

    def charge(self, tokens: int) -> None:
        self._account.completion += tokens


class ForwardedTenants(Tenants):
    """The tenants of a replica: whoever the ingress says."""

    def __init__(self) -> None:
        super().__init__(None)
        self._grammars: OrderedDict[str, asyncio.Lock] = OrderedDict()
        """By tenant, of all its calls: one of its grammars is compiled at a time."""

    def find(self, authorization: str | None) -> Tenant:
        """The tenant of the call under way."""
        tenant = _CountedTenant(_ACCOUNT.get() or Account())
        tenant.grammars = self._grammars.setdefault(tenant.name, tenant.grammars)
        self._grammars.move_to_end(tenant.name)
        if len(self._grammars) > _TENANTS:
            self._grammars.popitem(last=False)
        return tenant


async def call_app(app: ASGIApp, call: Call, replica: str) -> AsyncGenerator[Message, None]:
    """The reply of an ASGI application. A reader who stops reading makes the application see a caller who leaves.

    Parts of the body that have collected meanwhile come as one.
    """
    account = Account(call.tenant, call.priority)
    context = copy_context()
    context.run(_ACCOUNT.set, account)
    line = _Line(call.body)
    task = asyncio.get_running_loop().create_task(line.run(app, _scope(call)), context=context)
    try:
        async for message in line.messages():
            if message["type"] == "http.response.start":
                headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"])
                yield Head(message["status"], headers, replica, account.prompt)
            elif message["body"]:
                yield message["body"]
        await task
        if not line.complete:
            raise ReplicaLost("the application ended without an answer")
        yield Tail(account.completion)
    finally:
        line.leaving.set()
        if not task.done():
            await asyncio.wait({task}, timeout=_LEAVING_SECONDS)
            task.cancel()


class _Line:
    """The connection between a caller and an application, as ASGI has it."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._sent: asyncio.Queue[AsgiMessage | None] = asyncio.Queue()
        self.leaving = asyncio.Event()
        self.complete = False
        """Whether the application has sent the end of its answer."""

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the application; what it raises is raised here, after what it has sent."""
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def messages(self) -> AsyncIterator[AsgiMessage]:
        """What the application sends, until its answer is complete or it ends."""
        message = await self._sent.get()
        while message is not None and not self.complete:
            if message["type"] == "http.response.body":
                parts = [message.get("body", b"")]
                self.complete = not message.get("more_body", False)
                while not self.complete and not self._sent.empty():
                    message = self._sent.get_nowait()
                    if message is None:
                        break
                    parts.append(message.get("body", b""))
                    self.complete = not message.get("more_body", False)
                yield {"type": "http.response.body", "body": b"".join(parts)}
            else:
                yield message
            if message is not None and not self.complete:
                message = await self._sent.get()

    async def _receive(self) -> AsgiMessage:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiMessage) -> None:
        self._sent.put_nowait(message)


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": quote(call.path).encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in call.headers],
        "client": ("ingress", 0),
        "server": ("replica", 0),
    }
