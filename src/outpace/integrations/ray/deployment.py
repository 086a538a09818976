"""The deployment of replicas on Ray Serve, and the way to them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from outpace.core.errors import BadInput
from outpace.engine.scheduler import QueueFull
from outpace.integrations.ray.messages import Call, Message, ReplicaLost, Reply
from outpace.integrations.ray.replica import Replica, ReplicaEngine

APP, DEPLOYMENT = "outpace", "engine"
_ROUTER = "outpace.integrations.ray.replica_router:ReplicaRouter"
_ASKING_SECONDS = 10.0
_STATUS_SECONDS = 1.0
_MOST_REPLICAS = 10_000
_QUIET = {"log_level": "WARNING", "enable_access_log": False}
"""The server's own log has a line for each request, if it is asked for."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas there are: a number, or a range within which the queue decides."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Scale:
        """``N`` or ``MIN..MAX``. Raises BadInput for anything else."""
        found = re.fullmatch(r"(\d{1,5})(?:\.\.(\d{1,5}))?", text.strip())
        least = int(found[1]) if found else 0
        most = int(found[2] or found[1]) if found else 0
        if not 1 <= least <= most <= _MOST_REPLICAS:
            raise BadInput(f"--replicas takes a number from 1 on, or a range such as 1..4, not '{text}'")
        return cls(least, most)


@dataclass(frozen=True, slots=True)
class Deployed:
    """How replicas are deployed. ``batch``: requests that one decodes together; ``queue``: those that may wait in it.

    ``drain_seconds``: time that the requests of a replica have to end when it is replaced.
    """

    scale: Scale
    batch: int
    queue: int
    cpus: int
    gpus: int = 0
    drain_seconds: float = 600.0

    def options(self) -> dict[str, Any]:
        """Options of the deployment, by Ray Serve's names."""
        scale: dict[str, Any] = {"num_replicas": self.scale.least}
        if self.scale.most > self.scale.least:
            scale = {
                "autoscaling_config": {
                    "min_replicas": self.scale.least,
                    "initial_replicas": self.scale.least,
                    "max_replicas": self.scale.most,
                    "target_ongoing_requests": self.batch,
                    "upscale_delay_s": 5.0,
                    "downscale_delay_s": 300.0,
                }
            }
        return {
            **scale,
            "name": DEPLOYMENT,
            "max_ongoing_requests": self.batch + self.queue,
            "max_queued_requests": self.queue,
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "logging_config": _QUIET,
            "max_constructor_retry_count": 2,
            "health_check_period_s": 5.0,
            "health_check_timeout_s": 30.0,
            "graceful_shutdown_timeout_s": self.drain_seconds,
            "request_router_config": {
                "request_router_class": _ROUTER,
                "request_router_kwargs": {"slack": max(1, self.batch // 2)},
            },
        }


def application(open_engine: Callable[[], ReplicaEngine], how: Deployed) -> Any:
    """The replicas as an application of Ray Serve."""
    from ray import serve

    options = how.options()
    router = serve.config.RequestRouterConfig(**options.pop("request_router_config"))
    return serve.deployment(Replica, request_router_config=router, **options).bind(open_engine, replica_name)


def deploy(open_engine: Callable[[], ReplicaEngine], how: Deployed) -> RayReplicas:
    """Start replicas, or replace those that run one by one. Returns when they answer.

    Raises BadInput where a replica's engine refuses what it was given.
    """
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config=_QUIET)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # a line for each request that a dead replica had
    try:
        handle = serve.run(application(open_engine, how), name=APP, route_prefix=None)
    except RuntimeError as error:
        raise BadInput(f"the replicas do not start: {_reason()}") from error
    return RayReplicas(handle)


def undeploy() -> None:
    """End the replicas."""
    from ray import serve

    serve.delete(APP)


def replica_name() -> str:
    """The name of the replica in whose process this is called."""
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name


class RayReplicas:
    """The running replicas, by the handle of their deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True, method_name="answer")
        self._counted, self._running = 0.0, 0

    async def ask(self, call: Call) -> AsyncGenerator[Message, None]:
        """The reply of the replica that the router chooses. Raises ReplicaLost and QueueFull."""
        from ray.serve.exceptions import BackPressureError

        response = self._streaming.remote(call)
        ended = False
        try:
            async for message in response:
                yield message
            ended = True
        except BackPressureError as error:
            raise QueueFull(error.num_queued_requests, 1.0) from error
        except _lost() as error:
            ended = True
            raise ReplicaLost(str(error)) from error
        finally:
            if not ended:
                response.cancel()

    async def ask_all(self, call: Call) -> list[Reply]:
        """The replies of all replicas that answer in time."""
        response = self._handle.broadcast("whole", call)
        found = await response.results_async(timeout_s=_ASKING_SECONDS, return_exceptions=True)
        return [one for one in found if isinstance(one, Reply)]

    async def running(self) -> int:
        """How many replicas run, as of a second ago."""
        now = time.monotonic()
        if now - self._counted > _STATUS_SECONDS:
            self._counted = now
            self._running = await asyncio.to_thread(_running)
        return self._running


def _lost() -> tuple[type[BaseException], ...]:
    """What Ray raises where a replica has died or cannot be reached."""
    from ray import exceptions
    from ray.serve.exceptions import ReplicaUnavailableError

    return (
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
        exceptions.ObjectLostError,
        exceptions.NodeDiedError,
        ReplicaUnavailableError,
    )


def _status() -> Any:
    from ray import serve

    return serve.status().applications.get(APP)


def _running() -> int:
    status = _status()
    if status is None or DEPLOYMENT not in status.deployments:
        return 0
    states: dict[Any, int] = status.deployments[DEPLOYMENT].replica_states
    return sum(count for state, count in states.items() if str(getattr(state, "value", state)) == "RUNNING")


def _reason() -> str:
    """Why a deployment failed: what the engine said, or the last line of Ray's message."""
    status = _status()
    text = "" if status is None else "\n".join([status.message, *(one.message for one in status.deployments.values())])
    said = re.findall(r"(?:BadInput|MissingExtra): (.+)", text)
    lines = [line for line in text.splitlines() if line.strip()]
    return said[-1] if said else lines[-1] if lines else "Ray's log has the reason"
