"""The application for Ray Serve: replicas of the server, and a deployment that chooses by prefix.

Every process of Serve that handles the application imports this module, so it imports no JAX.
"""

# Ray has no wheels for some versions of Python.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import secrets
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray._common.utils import resources_from_ray_options
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.config import AutoscalingConfig, BackpressureConfig

from jaxserve.engine.sharing import check_sharing
from jaxserve.errors import InvalidRequest
from jaxserve.fleet.choice import PrefixChoice, keep_to_loopback
from jaxserve.fleet.gang import Gang
from jaxserve.fleet.options import FleetConfig, check_gang, check_server, resources_of
from jaxserve.server.served.admission import QUEUED_FOR_EACH_SLOT
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import slots_of
from jaxserve.settings.environment import prepare_process
from jaxserve.settings.secret_files import read_secret

NAME = "jaxserve"
HEALTH_SECONDS = 2.0
# Default numbers of slots of an engine, on a CPU and on a GPU.
_SLOTS = (32, 256)
_LEAST_QUEUE = 128
# Seconds for freeing the device of a replica, after its requests have ended.
_CLOSING_SECONDS = 5.0


@serve.ingress()
class Replica:
    """The Ray Serve deployment class of a replica: the models and the application of a server.

    The constructor loads the models in this process. With several hosts per replica, this process
    is the leader, and the constructor also starts the followers (`Gang`).

    Args:
        secret: secret of the fleet, for the keys of pages and digests.
        reports_prefixes: report the served prefixes to routers.
    """

    def __init__(
        self,
        specs: list[ModelSpec],
        config: ServerConfig,
        secret: bytes,
        reports_prefixes: bool,
    ) -> None:
        prepare_process()
        keep_to_loopback()
        context = serve.get_replica_context().rank
        rank = 0 if context is None else context.rank
        self._gang: Gang | None = None
        make = importlib.import_module("jaxserve.fleet.replica").ReplicaServer  # imports JAX
        if not specs[0].config.has_followers:
            self._server = make(specs, config, secret, rank, reports_prefixes)
            return
        gang = self._gang = Gang(specs[0].config)
        specs = [replace(specs[0], config=gang.config)]
        self._server = gang.lead(
            lambda: make(specs, config, secret, rank, reports_prefixes, gang.secret)
        )

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application of the replica, which Ray Serve calls."""
        return self._server.app

    def check_health(self) -> None:
        """Raise EngineDead if an engine has ended or stalled.

        Ray Serve then replaces the replica.
        """
        self._server.check()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the replica's load and cached prefixes, which Ray Serve sends to routers."""
        return self._server.routing_stats()

    def __del__(self) -> None:
        """Close the server and its followers, and free the device.

        Ray Serve calls this method after the last request has ended.
        """
        server = getattr(self, "_server", None)
        if server is not None:
            server.close()
        gang = getattr(self, "_gang", None)
        if gang is not None:
            gang.close()


def make_application(
    specs: list[ModelSpec], config: ServerConfig, fleet: FleetConfig
) -> serve.Application:
    """Return the Ray Serve application of all replicas, for `serve.run`. Ray must be running.

    Raises:
        InvalidRequest: a setting is not supported with replicas, or the cluster lacks resources.
    """
    check_server(config)
    for spec in specs:
        check_sharing(spec.config)
        check_gang(spec.config)
    devices = max(spec.config.tensor_parallel_size for spec in specs)
    nnodes = specs[0].config.nnodes
    secret = read_secret(specs[0].config.prefix_caching_secret) or secrets.token_bytes(32)
    is_routed = fleet.request_routing == "prefix"
    _check_proxy(config, is_routed)
    resources = resources_of(fleet, ray.cluster_resources(), devices, nnodes)
    slots = slots_of(specs[0].config, _SLOTS[bool(resources.get("num_gpus"))])
    queue = config.max_num_queued_reqs
    if queue is None:
        queue = max(QUEUED_FOR_EACH_SLOT * slots, _LEAST_QUEUE)
    options: dict[str, Any] = {
        "name": NAME,
        "ray_actor_options": resources,
        # A replica refuses requests beyond its own queue. Serve's queue needs a limit, too.
        "max_ongoing_requests": 2 * slots + queue,
        "max_queued_requests": 2 * slots + queue,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1),
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": 5 * HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": config.drain_timeout + _CLOSING_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": 2,
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        **_scale(fleet, slots),
        **_place(resources, nnodes),
    }
    if is_routed:
        options["request_router_config"] = PrefixChoice.router_config(slots)
    replicas = serve.deployment(Replica, **options).bind(specs, config, secret, is_routed)
    if is_routed:
        # Only this way Serve 2.60 passes the body of a request to the choice of its replica.
        replicas._with_ingress_request_router(PrefixChoice.bind_to(replicas, secret))
    return replicas


def _check_proxy(config: ServerConfig, is_routed: bool) -> None:
    if RAY_SERVE_ENABLE_HA_PROXY and config.is_local:
        raise InvalidRequest(
            "host must not be loopback with RAY_SERVE_ENABLE_HA_PROXY=1, by which every replica "
            "listens on all interfaces: set --host 0.0.0.0, with --api-key or --insecure",
            "host",
        )
    if is_routed and not RAY_SERVE_ENABLE_HA_PROXY:
        raise InvalidRequest(
            "request_routing=prefix needs RAY_SERVE_ENABLE_HA_PROXY=1 in the environment of the "
            "cluster: Serve's other proxy chooses a replica before it has a request's body",
            "request_routing",
        )


def _place(resources: dict[str, Any], nnodes: int) -> dict[str, Any]:
    """Return the options of a deployment whose replicas have several hosts, or {} for one host.

    The options request a placement group, with one bundle of resources for each host of a replica.

    Args:
        resources: resources of each host, as actor options of Ray.

    Raises:
        InvalidRequest: the resources are empty.
    """
    if nnodes == 1:
        return {}
    named = resources_from_ray_options({"num_cpus": 1, **resources})
    bundle = {name: amount for name, amount in named.items() if amount}
    if not bundle:
        raise InvalidRequest(
            'ray_actor_options must name a resource of each host with nnodes, like {"num_cpus": 1}',
            "ray_actor_options",
        )
    bundles = [bundle] * nnodes
    return {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}


def _scale(fleet: FleetConfig, slots: int) -> dict[str, Any]:
    if fleet.autoscaling_config is None:
        return {"num_replicas": fleet.data_parallel_size}
    config: Any = fleet.autoscaling_config
    scaling: Any = {"target_ongoing_requests": slots, **config}
    scaling.setdefault("max_replicas", fleet.data_parallel_size)
    try:
        return {"autoscaling_config": AutoscalingConfig(**scaling)}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"autoscaling_config: {' '.join(str(error).split())[:300]}", "autoscaling_config"
        ) from None
