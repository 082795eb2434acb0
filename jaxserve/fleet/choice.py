"""The endpoint that chooses a replica by the body of a request, for HAProxy, and its router.

`keep_to_loopback` limits the internal ports of replicas to the loopback address.
"""

# Ray has no wheels for some versions of Python.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve._private import replica as serve_replica
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.fleet.prefixes import PrefixPolicy, digests_of

NAME = "jaxserve-choice"
REPORT_SECONDS = 1.0
_MOST_REQUESTS = 10_000


class PrefixRouter(RequestRouter):
    """A request router of Ray Serve that chooses replicas by `PrefixPolicy`.

    The first argument of a routed call is the list of the request's prefix digests. Ray Serve
    passes the reports of the replicas (`record_routing_stats`) with the list of replicas.
    """

    def initialize_state(self, slots: int = 1, **_: Any) -> None:
        """Create the policy for replicas with this number of slots.

        Ray Serve passes `request_router_kwargs` as arguments.
        """
        self._policy: PrefixPolicy[ReplicaID] = PrefixPolicy(slots)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Pass the list of running replicas and their newest reports to the policy.

        Ray Serve calls this method when the list or a report has changed.
        """
        super().update_replicas(replicas)
        self._policy.keep(replica.replica_id for replica in replicas)
        for replica in replicas:
            self._policy.report(replica.replica_id, replica.routing_stats)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidate replicas in order of preference for a request, in lists of one.

        The first argument of `pending_request` is the list of digests. Ray Serve sends the request
        to the first replica, and the policy records this choice.
        """
        args = [] if pending_request is None else pending_request.args
        digests = args[0] if args and isinstance(args[0], list) else []
        by_name = {replica.replica_id: replica for replica in candidate_replicas}
        ranked = self._policy.rank(by_name, digests)
        if ranked:
            self._policy.send(ranked[0], digests)
        return [[by_name[name]] for name in ranked]


@serve.ingress()
class PrefixChoice:
    """A Ray Serve deployment that tells HAProxy to which replica it must send a request.

    The replica is chosen by `PrefixRouter` from the body of the request. Without a replica the
    answer has status 503, and so has HAProxy's answer.

    Args:
        secret: secret of the fleet, with which digests are computed.
    """

    def __init__(self, replicas: DeploymentHandle, secret: bytes) -> None:
        keep_to_loopback()
        self._replicas = replicas
        self._secret = secret
        self._replicas._init()

    @staticmethod
    def router_config(slots: int) -> RequestRouterConfig:
        """Return the configuration with which the deployment of replicas uses a `PrefixRouter`.

        `slots` is the number of requests that a replica runs at once.
        """
        settings: dict[str, Any] = {
            "request_router_class": f"{PrefixRouter.__module__}.{PrefixRouter.__name__}",
            "request_router_kwargs": {"slots": slots},
            "request_routing_stats_period_s": REPORT_SECONDS,
        }
        return RequestRouterConfig(**settings)

    @staticmethod
    def bind_to(replicas: serve.Application, secret: bytes) -> serve.Application:
        """Return this deployment as a Ray Serve application that chooses among `replicas`."""
        deployment = serve.deployment(
            PrefixChoice,
            name=NAME,
            num_replicas=2,  # so that one may fail
            max_ongoing_requests=_MOST_REQUESTS,
            ray_actor_options={"num_cpus": 0},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        return deployment.bind(replicas, secret)

    def __serve_build_asgi_app__(self) -> Any:
        """Return an ASGI application that answers POST /internal/route with `choose`.

        Ray Serve calls the application in this process. Any other path gets 404.
        """
        return Starlette(routes=[Route("/internal/route", self.choose, methods=["POST"])])

    async def choose(self, request: Request) -> Response:
        """Answer with JSON of host, port and name of the replica for the request in the body.

        No slot of the replica is reserved, because HAProxy sends the request itself. The answer has
        status 503 if no replica is ready.
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


LOOPBACK = "127.0.0.1"
_replica: Any = serve_replica


def keep_to_loopback() -> None:
    """Make Ray Serve bind the internal port of this process's replica to the loopback address.

    Without this, Ray Serve opens the port on all interfaces, without a check of Ray's token. In a
    cluster of several machines the call has no effect, because other machines call the replica. It
    must precede the opening of the port. Idempotent.
    """
    add = _replica.add_port_to_grpc_server
    if ray.util.get_node_ip_address() != LOOPBACK or add.__name__ == "add_local_port":
        return

    def add_local_port(server: Any, address: str) -> int:
        return add(server, address.replace("[::]", LOOPBACK))

    _replica.add_port_to_grpc_server = add_local_port
