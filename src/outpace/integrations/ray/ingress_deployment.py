"""The ingress as a deployment of Ray Serve, for clusters where Ray's own proxy takes the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from outpace.integrations.ray.deployment import Deployed, RayReplicas, application
from outpace.integrations.ray.ingress import Ingress
from outpace.integrations.ray.replica import ReplicaEngine
from outpace.serving.logs import Log
from outpace.serving.tenants import Tenants, read_keys

_CPUS = 0.5


class IngressReplica:
    """One ingress. Each counts limits of tenants by itself, so there is one unless the configuration says otherwise."""

    def __init__(
        self,
        replicas: Any,
        api_keys: Path | None,
        log_requests: bool,
        time_limit: float | None,
        most_bytes: int,
        origins: Sequence[str],
    ) -> None:
        tenants = Tenants(None if api_keys is None else read_keys(api_keys))
        ingress = Ingress(RayReplicas(replicas), tenants, Log(log_requests), time_limit=time_limit)
        self.passed_on: ASGIApp = ingress.app(most_bytes=most_bytes, origins=origins)


class _OfThisReplica:
    """Passes requests on to the application of the ingress in this process."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ray import serve

        if scope["type"] == "lifespan":  # asked for before the ingress is there, which needs nothing of it
            for _ in range(2):
                await send({"type": f"{(await receive())['type']}.complete"})
            return
        replica = serve.get_replica_context().servable_object
        await replica.passed_on(scope, receive, send)


def ingress_application(open_engine: Callable[[], ReplicaEngine], how: Deployed, **about: Any) -> Any:
    """The ingress in front of replicas, as an application of Ray Serve."""
    from ray import serve

    # Its own name, so that a configuration file can set its options.
    ingress = serve.deployment(
        serve.ingress(_OfThisReplica())(IngressReplica),
        name="ingress",
        max_ongoing_requests=how.scale.most * (how.batch + how.queue),
        ray_actor_options={"num_cpus": _CPUS},
        graceful_shutdown_timeout_s=how.drain_seconds,
    )
    return ingress.bind(application(open_engine, how), **about)
