"""Gangs: replicas of several hosts. The replica leads, and the others are actors that follow it.

The actors lie in the replica's placement group, one in each bundle behind its own. They end with
it: by the leader's word, by the end of its connection, or by Ray, which ends the actors that a
process has made when that ends. A lost follower ends the leader (`execution.hosts.group`), and
Serve then replaces the replica, and with it all of its hosts.

This module imports no JAX.
"""

# Ray has no wheels for every Python.
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
from jaxserve.settings.config import EngineConfig, prepare_process
from jaxserve.settings.secret_files import secret_file

_POLL_SECONDS = 0.2


class GangFollower:
    """A host that follows, in an actor of its own."""

    def follow(self, config: EngineConfig, secret: bytes) -> int:
        """Run what the leader runs until that ends in order; return how many calls that were.

        Args:
            config: of this host, but for the secret.
            secret: of the gang. It lies in a file until the leader serves.
        """
        prepare_process()
        log_json()
        following = importlib.import_module("jaxserve.engine.following")  # imports JAX
        with ExitStack() as stack:
            config = replace(config, nodes_secret=stack.enter_context(secret_file(secret)))
            return following.follow(config, on_ready=stack.close)


class Gang:
    """The followers of a replica, as its own process starts and ends them.

    Args:
        config: of the replica's engine.

    Attributes:
        config: of the leader: its address and a port that is free there.
        secret: by which the hosts authenticate each other.
    """

    def __init__(self, config: EngineConfig) -> None:
        address = ray.util.get_node_ip_address()
        self.config = replace(config, master_addr=address, master_port=_free_ports(address))
        self.secret = secrets.token_bytes(32)
        group = ray.util.get_current_placement_group()
        assert group is not None  # of the deployment
        self._actors: list[Any] = []
        self._ends: dict[Any, int] = {}
        for rank in range(1, config.nnodes):
            actor = _in_bundle(group, rank).remote()
            self._actors.append(actor)
            follow = actor.follow.remote(replace(self.config, node_rank=rank), self.secret)
            self._ends[follow] = rank

    def lead(self, load: Callable[[], Any]) -> Any:
        """Call what loads the leader's part, and return its result; on an error end the others.

        Raises:
            DeviceError: a follower ended before that, with its own error.
            Exception: what `load` raises.
        """
        loaded: Future[Any] = Future()

        def work() -> None:
            try:
                loaded.set_result(load())
            except BaseException as error:
                loaded.set_exception(error)

        # In a thread: it may wait ten minutes for a follower that has failed. After an error Serve
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
        """End the followers' processes, which the leader has told to end. Idempotent."""
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
    """Return the class of an actor that takes a whole bundle of a placement group."""
    own = dict(group.bundle_specs[rank])
    options: dict[str, Any] = {"num_cpus": own.pop("CPU", 0), "num_gpus": own.pop("GPU", 0)}
    if "memory" in own:
        options["memory"] = own.pop("memory")
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return ray.remote(GangFollower).options(
        **options, resources=own, scheduling_strategy=place, max_restarts=0
    )


def _free_ports(address: str) -> int:
    """Return a port of this host that is free with the one after it."""
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
