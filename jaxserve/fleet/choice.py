"""The endpoint at which HAProxy asks for the replica for a request's body, and its router."""

# Ray has no wheels for every Python.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.fleet.loopback import keep_to_loopback
from jaxserve.fleet.policy import PrefixPolicy
from jaxserve.fleet.prefixes import digests_of

NAME = "jaxserve-choice"
REPORT_SECONDS = 1.0
_MOST_REQUESTS = 10_000


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


@serve.ingress()
class PrefixChoice:
    """Deployment whose answers are the replicas to which HAProxy sends requests.

    The answer is `PrefixRouter`'s. Where there is none HAProxy answers 503.

    Args:
        replicas: handle of the deployment to choose from.
        secret: of the fleet.
    """

    def __init__(self, replicas: DeploymentHandle, secret: bytes) -> None:
        keep_to_loopback()
        self._replicas = replicas
        self._secret = secret
        self._replicas._init()

    @staticmethod
    def router_config(slots: int) -> RequestRouterConfig:
        """Return the setting by which the replicas' deployment gets its router."""
        settings: dict[str, Any] = {
            "request_router_class": f"{PrefixRouter.__module__}.{PrefixRouter.__name__}",
            "request_router_kwargs": {"slots": slots},
            "request_routing_stats_period_s": REPORT_SECONDS,
        }
        return RequestRouterConfig(**settings)

    @staticmethod
    def bind_to(replicas: serve.Application, secret: bytes) -> serve.Application:
        """Return the application that chooses between the replicas."""
        made = serve.deployment(
            PrefixChoice,
            name=NAME,
            num_replicas=2,  # one of them may die
            max_ongoing_requests=_MOST_REQUESTS,
            ray_actor_options={"num_cpus": 0},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        return made.bind(replicas, secret)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, which Serve calls in this process."""
        return Starlette(routes=[Route("/internal/route", self.choose, methods=["POST"])])

    async def choose(self, request: Request) -> Response:
        """Answer with the replica for the body of a request.

        No slot of the replica is held for it: HAProxy sends the request itself.
        """
        digests = digests_of(await request.body(), self._secret)
        try:
            async with self._replicas.choose_replica(digests, _reserve=False) as selection:
                replica = selection._replica
        except (DeploymentUnavailableError, RuntimeError) as error:
            return JSONResponse({"detail": str(error)}, 503)
        if replica.backend_http_endpoint is None:
            return JSONResponse({"detail": "the replica has no port yet"}, 503)
        host, port = replica.backend_http_endpoint
        name = replica.replica_id.to_full_id_str()
        return JSONResponse({"host": host, "port": port, "replica_id": name})
