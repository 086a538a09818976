"""``outpace serve --ray``: replicas on Ray Serve, and the ingress that stands in front of them in this process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outpace.cli.service_options import ServiceOptions
from outpace.core.machine import usable_cpus
from outpace.core.progress import stage
from outpace.integrations.ray.cluster import check_fits, connected, require_ray
from outpace.integrations.ray.deployment import Deployed, Scale, deploy, undeploy

if TYPE_CHECKING:
    from outpace.integrations.ray.replica import ReplicaEngine
    from outpace.serving.tenants import Terms
    from outpace.serving.tls import Certificate

_DRAIN_SECONDS = 600.0
"""For the requests of a replica that is replaced, where --time-limit does not bound them."""


@dataclass(frozen=True, slots=True)
class Replication:
    """``outpace serve --ray``, checked: what each replica loads, and how many there are."""

    options: ServiceOptions
    how: Deployed

    @classmethod
    def checked(cls, options: ServiceOptions, replicas: str) -> Replication:
        """Raises BadInput for a missing Ray, a wrong number of replicas, and more of them than fit."""
        scale = Scale.parse(replicas)
        require_ray("outpace serve --ray")
        threads = options.hardware.threads or max(1, usable_cpus() // scale.most)
        check_fits(scale.most, threads)
        neighbors = max(1, min(scale.most, usable_cpus() // threads))
        gpu = (options.hardware.device or "").startswith("cuda")
        drain = _DRAIN_SECONDS if options.time_limit is None else options.time_limit + 10
        own = replace(options, hardware=replace(options.hardware, threads=threads), neighbors=neighbors)
        return cls(own, Deployed(scale, options.max_batch, options.max_queue, threads, int(gpu), drain))

    def open_engine(self) -> ReplicaEngine:
        """What a replica answers with; called in its process."""
        from outpace.integrations.ray.in_process_call import ForwardedTenants
        from outpace.integrations.ray.replica import AppEngine
        from outpace.serving.app import build_app

        service = self.options.open(ForwardedTenants())
        return AppEngine(build_app(service, most_bytes=sys.maxsize), service)


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
        options = replication.options
        replicas = deploy(replication.open_engine, replication.how)
        return Ingress(replicas, Tenants(keys), Log(options.log_requests), time_limit=options.time_limit)

    with connected():
        try:
            least = replication.how.scale.least
            with stage(f"starting {least} replica{'s' if least > 1 else ''}"):
                ingress = start()
            listening = open_socket(host, port)
            where = url(listening, host, "http" if tls is None else "https")
            app = ingress.app(most_bytes=most_bytes, origins=origins)
            with _restarting(lambda: deploy(replication.open_engine, replication.how)):
                return run(app, ingress, listening, lambda: print(f"ready: {where}", file=sys.stderr, flush=True), tls)
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
