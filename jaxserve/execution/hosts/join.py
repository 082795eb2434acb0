# pyright: reportUnknownMemberType=false
"""Joining: JAX's devices of all hosts in one process's view."""

from __future__ import annotations

import jax

from jaxserve.errors import DeviceError
from jaxserve.execution.hosts.group import Follower, Group, Leader
from jaxserve.hosts import HostsConfig

_SECONDS = 120


def open_group(config: HostsConfig, secret: bytes | None) -> Group | None:
    """Join the other hosts and make JAX see their devices; return None for one host.

    Args:
        config: of the hosts.
        secret: that they share.

    Raises:
        InvalidRequest, DeviceError: see `Leader`, `Follower` and `join_jax`.
    """
    if not config.has_followers:
        return None
    assert secret is not None
    group = (Follower if config.node_rank else Leader)(config, secret)
    join_jax(config)
    group.leave_jax = jax.distributed.shutdown
    return group


def join_jax(config: HostsConfig) -> None:
    """Make JAX, which must not have started, see the devices of all hosts.

    Hosts are watched by `Group`, in seconds; JAX's own watch is left far behind it, since it ends a
    process without a word. Its handler of SIGTERM would take the place of the server's.

    Raises:
        DeviceError: JAX has started, or cannot reach the others.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    address = f"[{config.master_addr}]" if ":" in config.master_addr else config.master_addr
    address = f"{address}:{config.master_port + 1}"
    try:
        jax.distributed.initialize(
            address,
            config.nnodes,
            config.node_rank,
            cluster_detection_method="deactivate",
            initialization_timeout=_SECONDS,
            shutdown_timeout_seconds=10,
            coordinator_bind_address=address if config.node_rank == 0 else None,
        )
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"JAX does not reach the engine's other hosts: {error}") from error
