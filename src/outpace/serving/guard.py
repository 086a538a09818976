"""Guard: what is checked before a request's body is read: its key, and how large it is."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.serving.errors import ApiError
from outpace.serving.service import Service
from outpace.serving.streaming import error_response
from outpace.serving.tenants import Tenant

_TENANT = "outpace.tenant"


class Guard:
    """Paths under ``/v1/`` need a key where there are keys; no body may be longer than ``most_bytes``."""

    def __init__(self, app: ASGIApp, service: Service, most_bytes: int) -> None:
        self._app, self._service, self._most = app, service, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if scope["path"].startswith("/v1/"):
                scope[_TENANT] = self._service.tenants.find(headers.get("authorization"))
                _check_type(scope["method"], headers)
            body = await self._read(headers, receive)
        except ApiError as error:
            self._service.metrics.refused.labels(str(error.status)).inc()
            await error_response(error)(scope, receive, send)
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

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
    found: Tenant = request.scope[_TENANT]
    return found
