"""Errors as OpenAI's API reports them: a status code, and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from typing import Any

from outpace.core.errors import BadInput, OutpaceError
from outpace.engine.scheduler import Closed, DeadlineExceeded, QueueFull

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(OutpaceError):
    """A request that is refused or has failed. ``param``: the field that is the reason; ``code``: for programs.

    ``retry_after``: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        param = None if self.param is None else encodable(self.param)
        return {"error": {"message": encodable(str(self)), "type": kind, "param": param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status code."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def encodable(text: str) -> str:
    """A text without lone surrogates, which JSON can write and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def api_error(error: BaseException) -> ApiError:
    """What a caller is told of an error. Of a defect the message is only in the server's log."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(str(error), 429, code="queue_full", retry_after=error.retry_after)
        case Closed():
            return ApiError(str(error), 503, code="shutting_down", retry_after=5)
        case DeadlineExceeded():
            return ApiError(str(error), 504, code="time_limit_exceeded")
        case BadInput():
            return ApiError(str(error))
        case _:
            return ApiError("the server failed while it computed the answer; its log has the reason", 500)
