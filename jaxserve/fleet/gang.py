"""Gangs: replicas of several hosts. The replica is the leader, and actors of Ray follow it.

Each actor has a bundle of the replica's placement group. The actors end with the leader: by a
message, by the end of the connection, or by Ray, which ends the actors of a process with it. If a
follower is lost, the leader ends (`execution.hosts.group`), and Serve replaces the whole replica.

This module imports no JAX.
"""

# Ray has no wheels for some versions of Python.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxserve.errors import DeviceError
from jaxserve.server.http.logs import log_json
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import prepare_process
from jaxserve.settings.secret_files import secret_file

_POLL_SECONDS = 0.2


class GangFollower:
    """The class of a Ray actor that runs one follower: one host's part of a replica's engine."""

    def follow(self, config: EngineConfig, secret: bytes) -> int:
        """Run this host's part of the engine until the leader ends.

        Args:
            config: settings of this host, without the secret.
            secret: secret of the gang. It is in a file until the leader serves.

        Returns:
            The number of calls of programs that this host ran.

        Raises:
            ChannelError: the connection to the leader is lost.
        """
        prepare_process()
        log_json()
        following = importlib.import_module("jaxserve.engine.following")  # imports JAX
        with ExitStack() as stack:
            config = replace(config, nodes_secret=stack.enter_context(secret_file(secret)))
            return following.follow(config, on_ready=stack.close)


class Gang:
    """The followers of a replica with several hosts: Ray actors, one for each further host.

    The constructor starts the actors in the bundles of the replica's placement group.

    Attributes:
        config: settings of the leader, with its address and a free port.
        secret: random bytes with which the hosts authenticate each other.
    """

    def __init__(self, config: EngineConfig) -> None:
        address = ray.util.get_node_ip_address()
        # Settings of the leader, with its address and a free port.
        self.config = replace(config, master_addr=address, master_port=_free_ports(address))
        self.secret = secrets.token_bytes(32)  # secret with which the hosts authenticate each other
        group = ray.util.get_current_placement_group()
        assert group is not None  # set by the deployment
        self._actors: list[Any] = []
        self._ends: dict[Any, int] = {}
        for rank in range(1, config.nnodes):
            actor = _in_bundle(group, rank).remote()
            self._actors.append(actor)
            follow = actor.follow.remote(replace(self.config, node_rank=rank), self.secret)
            self._ends[follow] = rank

    def lead(self, load: Callable[[], Any]) -> Any:
        """Call `load` in a thread while the followers are watched, and return its result.

        `load` loads the leader's part of the engine. On an error all followers are ended.

        Raises:
            DeviceError: a follower has ended. The message has its error.
            Exception: any error of `load`.
        """
        loaded: Future[Any] = Future()

        def work() -> None:
            try:
                loaded.set_result(load())
            except BaseException as error:
                loaded.set_exception(error)

        # In a thread, since `load` may wait ten minutes for a failed follower. After an error Serve
        # ends this process.
        threading.Thread(target=work, name="jaxserve-lead", daemon=True).start()
        try:
            while not wait([loaded], _POLL_SECONDS).done:
                self._check()
            return loaded.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the actors of the followers. Later calls have no effect."""
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)

    def _check(self) -> None:
        ended, _ = ray.wait(list(self._ends), timeout=0)
        for follow in ended:
            reason = "it ended"
            try:
                ray.get(follow)
            except RayError as error:
                reason = str(error).strip().splitlines()[-1]
            raise DeviceError(f"host {self._ends[follow]} of a replica has ended: {reason}")


def _in_bundle(group: Any, rank: int) -> Any:
    # An actor that uses all resources of a bundle.
    resources = dict(group.bundle_specs[rank])
    options: dict[str, Any] = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
    }
    if "memory" in resources:
        options["memory"] = resources.pop("memory")
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return ray.remote(GangFollower).options(
        **options, resources=resources, scheduling_strategy=place, max_restarts=0
    )


def _free_ports(address: str) -> int:
    """Return a port of this host at `address` that is free, and whose successor is free, too."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        with socket.create_server((address, 0), family=family) as first:
            port = first.getsockname()[1]
            if port == 65535:
                continue
            try:
                socket.create_server((address, port + 1), family=family).close()
            except OSError:
                continue
            return port
