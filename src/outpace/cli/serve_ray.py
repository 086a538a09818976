"""``outpace serve --ray``: replicas on Ray Serve, and the ingress that stands in front of them in this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from outpace.core.machine import usable_cpus
from outpace.core.progress import stage
from outpace.integrations.ray.cluster import check_fits, connected, require_ray
from outpace.integrations.ray.deployment import Deployed, Scale, deploy, undeploy
from outpace.integrations.ray.process_engine import replica_command

if TYPE_CHECKING:
    from outpace.cli.serve_vllm import Engine
    from outpace.cli.service_options import ServiceOptions
    from outpace.integrations.ray.replica import ReplicaEngine
    from outpace.serving.tenants import Terms
    from outpace.serving.tls import Certificate

_DRAIN_SECONDS = 600.0
"""For the requests of a replica that is replaced, where --time-limit does not bound them."""
_BATCH_OF_VLLM = 64
"""Requests of one replica above which another one helps: vLLM decodes more of them together than outpace's own engine,
and its own bound depends on the machine."""


@dataclass(frozen=True, slots=True)
class Replication:
    """``outpace serve --ray``, checked: what opens a replica's engine in its process, and how many replicas there are.

    ``log_requests`` and ``time_limit`` are for the ingress.
    """

    open_engine: Callable[[], ReplicaEngine]
    how: Deployed
    log_requests: bool = False
    time_limit: float | None = None

    @classmethod
    def checked(
        cls, engine: Engine, arguments: Sequence[str], options: ServiceOptions, max_batch: int | None, replicas: str
    ) -> Replication:
        """Replicas of outpace's own engine with ``options``, or of another one, for which each replica is started with
        ``arguments``, those of ``outpace serve``. ``max_batch``: None where none was given.

        Raises BadInput for a missing Ray, and a wrong number of replicas.
        """
        scale = Scale.parse(replicas)
        require_ray("outpace serve --ray")
        hardware, limit = options.hardware, options.time_limit
        threads = hardware.threads or max(1, usable_cpus() // scale.most)
        open_engine: Callable[[], ReplicaEngine]
        if engine.other:
            batch = max_batch or _BATCH_OF_VLLM
            open_engine = partial(_open_process, replica_command(arguments, threads))
        else:
            neighbors = max(1, min(scale.most, usable_cpus() // threads))
            own = replace(options, hardware=replace(hardware, threads=threads), neighbors=neighbors)
            batch, open_engine = options.max_batch, partial(_open_outpace, own)
        gpus = int((hardware.device or "").startswith("cuda"))
        drain = _DRAIN_SECONDS if limit is None else limit + 10
        how = Deployed(scale, batch, options.max_queue, threads, gpus, drain)
        return cls(open_engine, how, options.log_requests, limit)

    def check_fits(self) -> None:
        """Raise BadInput for more replicas than this machine has CPUs for, where they run on it."""
        check_fits(self.how.scale.most, self.how.cpus)


def _open_outpace(options: ServiceOptions) -> ReplicaEngine:
    """outpace's own server; called in the replica's process."""
    from outpace.integrations.ray.in_process_call import ForwardedTenants
    from outpace.integrations.ray.replica import AppEngine
    from outpace.serving.app import build_app

    service = options.open(ForwardedTenants())
    return AppEngine(build_app(service, most_bytes=sys.maxsize), service)


def _open_process(command: Sequence[str]) -> ReplicaEngine:
    """Another server's process, whose end is the replica's: Ray then starts another at once, and no request is sent to
    one that cannot answer. Called in the replica's process."""
    from outpace.integrations.ray.process_engine import ProcessEngine

    return ProcessEngine(command, died=partial(os._exit, 1))


def serve_replicas(
    replication: Replication,
    host: str,
    port: int,
    keys: dict[str, Terms] | None,
    tls: Certificate | None,
    origins: Sequence[str],
    most_bytes: int,
) -> bool:
    """Start the replicas and serve until SIGTERM or Ctrl-C, as :func:`outpace.serving.server.run` does."""
    from outpace.integrations.ray.ingress import Ingress
    from outpace.serving.logs import Log
    from outpace.serving.server import open_socket, run, url
    from outpace.serving.tenants import Tenants

    def start() -> Ingress:
        replicas = deploy(replication.open_engine, replication.how)
        return Ingress(replicas, Tenants(keys), Log(replication.log_requests), time_limit=replication.time_limit)

    with connected():
        try:
            least = replication.how.scale.least
            with stage(f"starting {least} replica{'s' if least > 1 else ''}"):
                ingress = start()
            listening = open_socket(host, port)
            where = url(listening, host, "http" if tls is None else "https")
            app = ingress.app(most_bytes=most_bytes, origins=origins)
            callers = replication.how.scale.most * (replication.how.batch + replication.how.queue)
            with _restarting(lambda: deploy(replication.open_engine, replication.how)):
                return run(
                    app, ingress, listening, lambda: print(f"ready: {where}", file=sys.stderr, flush=True), tls, callers
                )
        finally:
            undeploy()


@contextmanager
def _restarting(restart: Callable[[], object]) -> Iterator[None]:
    """SIGHUP replaces the replicas one by one, while the others answer."""
    restarting = threading.Lock()

    def run() -> None:
        with restarting:
            try:
                restart()
                print("all replicas have been replaced", file=sys.stderr, flush=True)
            except Exception as error:
                print(f"the replicas could not be replaced: {error}", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=run, daemon=True).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
