"""FleetConfig: the settings of replicas. The command line imports it, so it imports no Ray."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.checks import exact_int, finite_float
from jaxserve.settings.hosts import HostsConfig
from jaxserve.settings.overrides import json_object

BACKENDS = ("mp", "ray")
ROUTINGS = ("least-loaded", "prefix")
MAX_REPLICAS = 4096
_LISTENS_SECONDS = 10.0
_ADDRESS = re.compile(r"auto|[^\s/]+:[0-9]{1,5}")
# Settings that need a server with its own socket. With replicas the proxy has the socket.
_OF_ONE_PROCESS = ("files_dir", "uds", "ssl_certfile", "enable_weight_updates")


# Settings of a group of hosts. With replicas there is a group for each.
_OF_A_GANG = ("node_rank", "master_addr", "master_port", "nodes_secret")


@dataclass(frozen=True)
class FleetConfig:
    """Settings of replicas of the server on Ray Serve. Names follow vLLM and Ray.

    Args:
        data_parallel_size: number of replicas of the server behind one address.
        data_parallel_backend: backend for several replicas: "ray", which needs the extra `ray`.
        ray_address: a running cluster to join, as HOST:PORT or "auto". By default the command
            starts a cluster on this machine and ends it.
        ray_actor_options: resources of a replica, or of each of its `nnodes` hosts, as a JSON
            object of Ray's fields. The default is a CPU, and a GPU for each device if the cluster
            has GPUs.
        autoscaling_config: a JSON object of Ray Serve's fields, like {"min_replicas": 1,
            "max_replicas": 4}. The number of replicas then follows the requests in progress. The
            default of target_ongoing_requests is the number of slots of a replica.
        request_routing: "least-loaded", or "prefix", which sends a request to the replica that has
            computed most of its prompt, unless its load is much higher than that of others.
            "prefix" needs RAY_SERVE_ENABLE_HA_PROXY=1.

    Raises:
        InvalidRequest: (a ValueError) on construction. The error names the invalid field.
    """

    data_parallel_size: int = 1
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    ray_address: str | None = None
    ray_actor_options: dict[str, Any] | str | None = None
    autoscaling_config: dict[str, Any] | str | None = None
    request_routing: Literal["least-loaded", "prefix"] = "least-loaded"

    def __post_init__(self) -> None:
        exact_int(self.data_parallel_size, "data_parallel_size", 1, MAX_REPLICAS)
        choices = (("data_parallel_backend", BACKENDS), ("request_routing", ROUTINGS))
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise InvalidRequest(f"{name} must be {' or '.join(allowed)}", name)
        if self.ray_address is not None and not _ADDRESS.fullmatch(self.ray_address):
            raise InvalidRequest(
                f"ray_address must be HOST:PORT or auto, got {self.ray_address!r}", "ray_address"
            )
        for name in ("ray_actor_options", "autoscaling_config"):
            object.__setattr__(self, name, json_object(getattr(self, name), name))
        self._check_numbers()
        if self.data_parallel_backend == "ray":
            return
        if self.data_parallel_size > 1:
            raise InvalidRequest(
                f"data_parallel_size={self.data_parallel_size} needs --data-parallel-backend ray",
                "data_parallel_size",
            )
        for name in ("ray_address", "ray_actor_options", "autoscaling_config", "request_routing"):
            if getattr(self, name) not in (None, ROUTINGS[0]):
                raise InvalidRequest(f"{name} needs --data-parallel-backend ray", name)

    def _check_numbers(self) -> None:
        resources: Any = self.ray_actor_options or {}
        for name in ("num_cpus", "num_gpus"):
            if finite_float(resources.get(name, 0), f"ray_actor_options.{name}") < 0:
                raise InvalidRequest(f"ray_actor_options.{name} must not be negative")
        scaling: Any = self.autoscaling_config or {}
        for name in ("min_replicas", "max_replicas"):
            exact_int(scaling.get(name, 1), f"autoscaling_config.{name}", 0, MAX_REPLICAS)

    def is_fleet(self, nnodes: int = 1) -> bool:
        """Return whether the settings, with `nnodes` hosts per engine, need Ray Serve."""
        return (
            self.data_parallel_size > 1
            or (nnodes > 1 and self.data_parallel_backend == "ray")
            or self.ray_address is not None
            or self.autoscaling_config is not None
        )

    def most_replicas(self) -> int:
        """Return the largest number of replicas that can run at once, with autoscaling included."""
        scaling: Any = self.autoscaling_config or {}
        return max(self.data_parallel_size, scaling.get("max_replicas", 1))


def resources_of(
    fleet: FleetConfig, total: Mapping[str, float], devices: int, nnodes: int = 1
) -> dict[str, Any]:
    """Return the Ray resources of each host of a replica, after a check of the cluster.

    The resources are `ray_actor_options`, or by default a CPU, and a GPU for each device if the
    cluster has GPUs.

    Args:
        total: resources of the cluster, by Ray's names.
        devices: number of devices of a replica.

    Raises:
        InvalidRequest: the cluster has too few resources, or a host has fewer GPUs than devices.
    """
    devices //= nnodes
    resources: Any = fleet.ray_actor_options
    if resources is None:
        resources = {"num_cpus": 1, "num_gpus": devices if total.get("GPU") else 0}
    gpus = resources.get("num_gpus", 0)
    if devices > 1 and 0 < gpus < devices:
        raise InvalidRequest(
            f"ray_actor_options.num_gpus is {gpus:g}, and tensor_parallel_size "
            f"{devices}{' on each host' * (nnodes > 1)}; allowed: as many GPUs, or none",
            "ray_actor_options",
        )
    most = fleet.most_replicas()
    whose = f"{most} replicas" + f" of {nnodes} hosts" * (nnodes > 1)
    for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        needed = most * nnodes * resources.get(name, 0)
        # A joined cluster can grow.
        if fleet.ray_address is None and needed > total.get(resource, 0):
            raise InvalidRequest(
                f"{whose} need {needed:g} {resource}s, and there are "
                f"{total.get(resource, 0):g}: set --ray-actor-options, like "
                f'{{"{name}": {total.get(resource, 0) / most / nnodes:.2g}}}',
                "ray_actor_options",
            )
    return resources


def check_server(config: ServerConfig) -> None:
    """Check that the settings of a server are supported with replicas behind Ray Serve's proxy.

    Raises:
        InvalidRequest: names a setting that is not supported.
    """
    for name in _OF_ONE_PROCESS:
        if getattr(config, name):
            raise InvalidRequest(
                f"{name} is not supported with replicas: a replica may end at any time, and the "
                "address is Ray Serve's",
                name,
            )


def check_gang(engine: Any) -> None:
    """Check that an engine's settings name no address, rank or secret of its hosts.

    With replicas, each replica chooses these settings for its own hosts.

    Raises:
        InvalidRequest: such a setting has a value. The error names the setting.
    """
    for field in fields(HostsConfig):
        if field.name in _OF_A_GANG and getattr(engine, field.name) != field.default:
            raise InvalidRequest(
                f"{field.name} is not supported with replicas: each replica finds it for its own "
                "hosts (nnodes)",
                field.name,
            )


def check_cluster(fleet: FleetConfig) -> None:
    """Check that a process listens at the address of the Ray cluster, if HOST:PORT is given.

    Ray itself would wait minutes.

    Raises:
        InvalidRequest: the connection is refused or times out.
    """
    if fleet.ray_address in (None, "auto"):
        return
    host, _, port = fleet.ray_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InvalidRequest(
            f"ray_address: no cluster answers at {fleet.ray_address}: {error}", "ray_address"
        ) from error
