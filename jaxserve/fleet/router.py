"""PrefixRouter: Ray Serve's hold on the policy."""

# Ray has no wheels for every Python.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxserve.fleet.policy import PrefixPolicy


class PrefixRouter(RequestRouter):
    """A router of Ray Serve by `PrefixPolicy`. A request's only argument is its digests.

    Serve brings the replicas' reports (`record_routing_stats`) with the list of replicas.
    """

    def initialize_state(self, slots: int = 1, **_: Any) -> None:
        """Take over the arguments of the deployment's setting."""
        self._policy: PrefixPolicy[ReplicaID] = PrefixPolicy(slots)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over the replicas that run, and their reports."""
        super().update_replicas(replicas)
        self._policy.keep(replica.replica_id for replica in replicas)
        for replica in replicas:
            self._policy.report(replica.replica_id, replica.routing_stats)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates in order, each alone: the first is taken."""
        args = [] if pending_request is None else pending_request.args
        digests = args[0] if args and isinstance(args[0], list) else []
        found = {replica.replica_id: replica for replica in candidate_replicas}
        ranked = self._policy.rank(found, digests)
        if ranked:
            self._policy.send(ranked[0], digests)
        return [[found[name]] for name in ranked]
