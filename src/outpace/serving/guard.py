"""Guard: what is checked before a request's body is read: its key, and how large it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.engine.scheduler import Closed
from outpace.serving.errors import ApiError, api_error
from outpace.serving.streaming import error_response
from outpace.serving.tenants import Tenant, Tenants

_TENANT = "outpace.tenant"
_ENDS = "the server is shutting down, and the whole body has not come"
BODY_SECONDS = 60.0
"""In which a whole body must have come."""
_LONGEST = 200
"""Characters of a path or a field's name in the log: callers choose them."""


class Guard:
    """Paths under ``/v1/`` need a key where there are keys; no body may be longer than ``most_bytes``.

    ``refused`` is called with the error and the scope of every request that is refused here.
    """

    def __init__(
        self, app: ASGIApp, tenants: Tenants, most_bytes: int, refused: Callable[[ApiError, Scope], object]
    ) -> None:
        self._app, self._tenants, self._most, self._refused = app, tenants, most_bytes, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if scope["path"].startswith("/v1/"):
                scope[_TENANT] = self._tenants.find(headers.get("authorization"))
                _check_type(scope["method"], headers)
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(headers, receive)
        except TimeoutError:
            await self._refuse(ApiError(f"the body did not come within {BODY_SECONDS:g} s", 408), scope, receive, send)
            return
        except asyncio.CancelledError:  # the server ends, and has waited for it long enough
            await self._refuse(api_error(Closed(_ENDS)), scope, receive, send)
            return
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused(error, scope)
        await error_response(error)(scope, receive, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises ApiError 413 for one that is too long."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._most:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ApiError("the connection was closed before the whole body had been sent")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(f"the body of a request may have {self._most:,} bytes at most", 413, code="request_too_large")


def _check_type(method: str, headers: Headers) -> None:
    if method == "POST" and "json" not in headers.get("content-type", ""):
        raise ApiError("the body must be JSON; send the header 'Content-Type: application/json'")


def tenant_of(request: Request) -> Tenant:
    """Who asks."""
    return tenant_in(request.scope)


def about(error: ApiError, scope: Scope) -> dict[str, Any]:
    """What the log says of a request that was refused."""
    tenant: Tenant | None = scope.get(_TENANT)
    return {
        "tenant": (tenant.name or None) if tenant else None,
        "http_method": scope["method"],
        "path": scope["path"][:_LONGEST],
        "status": error.status,
        "code": error.code,
        "param": None if error.param is None else error.param[:_LONGEST],
    }


def tenant_in(scope: Scope) -> Tenant:
    """Who asks, from the scope of a call that the guard has let pass."""
    found: Tenant = scope[_TENANT]
    return found
