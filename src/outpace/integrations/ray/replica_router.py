"""ReplicaRouter: Ray Serve's choice of a replica, by prompt prefix and load. Only Ray Serve imports this file."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import RequestRouter

from outpace.integrations.ray.prefix_routing import ranked


class ReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Counts what it has sent to each replica and has not come back, and ranks the replicas by it."""

    def initialize_state(self, slack: int = 4) -> None:
        """``slack``: requests that the preferred replica may have more than the least loaded one."""
        self._slack = slack
        self._loads: Counter[str] = Counter()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """One replica a rank, the best first."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        order = ranked(getattr(call, "key", ""), {name: self._loads[name] for name in by_name}, self._slack)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Count a request until its reply has ended."""
        self._loads[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """The reply has ended, or the replica has died."""
        name = replica_id.unique_id
        self._loads[name] -= 1
        if self._loads[name] <= 0:
            del self._loads[name]
