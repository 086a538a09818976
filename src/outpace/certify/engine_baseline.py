"""The baseline of a certificate of a server: it must be another server, and must not speculate itself."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from outpace.certify.endpoint import Endpoint
from outpace.certify.server_client import Server
from outpace.core.errors import BadInput

_LOOPBACK = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


def check_other_server(endpoint: Endpoint, baseline: Server) -> None:
    """Raise BadInput for a baseline that is the endpoint: nothing differs then, whatever is wrong with it."""
    server = endpoint.server
    if server.model == baseline.model and _address(server) == _address(baseline):
        instead = "give the address of the same model without speculation"
        if endpoint.outpace:
            instead = "leave out --baseline: outpace's own server is compared with itself without speculation"
        raise BadInput(f"--baseline is the endpoint itself ({baseline.url}); {instead}")


def _address(server: Server) -> tuple[str, int | None]:
    parts = urlsplit(server.url)
    host = parts.hostname or ""
    return _LOOPBACK.get(host, host), parts.port or {"http": 80, "https": 443}[parts.scheme]


def without_speculation(server: Server) -> Server:
    """outpace's own server as its baseline: its requests draft nothing."""
    return replace(server, extra={**server.extra, "speculation": {"off": True}}, name="the baseline")


def is_itself(baseline: Endpoint) -> bool:
    """Whether it is :func:`without_speculation` of the endpoint: its counters are those of the endpoint."""
    return "speculation" in baseline.server.extra


def drafts_nothing(baseline: Endpoint, before: tuple[int, int] | None) -> bool:
    """Whether a baseline is known to have drafted nothing since its counters were at ``before``. Raises BadInput for
    one that has."""
    if is_itself(baseline):
        return True
    after = baseline.speculated()
    if before is None or after is None:
        return False
    if after[0] > before[0]:
        raise BadInput(
            f"{baseline.server.where} drafted {after[0] - before[0]} tokens meanwhile: it speculates as well; give one "
            "that does not, and that nobody else uses"
        )
    return True
