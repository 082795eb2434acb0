# pyright: reportUnknownMemberType=false
"""Joining: connects the hosts and makes JAX see the devices of all of them."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxserve.errors import DeviceError
from jaxserve.execution.hosts.group import Follower, Group, Leader
from jaxserve.execution.hosts.relay import Relay
from jaxserve.settings.hosts import HostsConfig

_SECONDS = 120


def open_group(config: HostsConfig, secret: bytes | None) -> Group | None:
    """Join the other hosts, and make JAX see their devices.

    Args:
        config: the configuration of the hosts.
        secret: the shared secret.

    Returns:
        The group, or None for one host.

    Raises:
        InvalidRequest, DeviceError: see `Leader`, `Follower` and `join_jax`.
    """
    if not config.has_followers:
        return None
    assert secret is not None
    group = (Follower if config.node_rank else Leader)(config, secret)
    with group.ending_with_the_others():
        group.leave_jax = join_jax(config)
    return group


def join_jax(config: HostsConfig) -> Callable[[], None]:
    """Make JAX, which must not have started, see the devices of all hosts.

    `Group` detects a lost host within seconds. JAX's own detection has a much longer timeout,
    because it ends the process without a message. JAX's handler of SIGTERM is disabled, since it
    would replace the server's.

    Returns:
        A function that closes JAX's connections between the hosts. All hosts must call it.

    Raises:
        DeviceError: JAX has started already, or cannot reach the other hosts.
    """

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    address = config.master_addr, config.master_port + 1
    relay = Relay(address) if config.node_rank else None
    host, port = address if relay is None else relay.address
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        jax.distributed.initialize(
            name,
            config.nnodes,
            config.node_rank,
            cluster_detection_method="deactivate",
            initialization_timeout=_SECONDS,
            shutdown_timeout_seconds=10,
            coordinator_bind_address=name if relay is None else None,
        )
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"JAX does not reach the engine's other hosts: {error}") from error

    def leave() -> None:
        jax.distributed.shutdown()
        if relay is not None:
            relay.close()

    return leave
