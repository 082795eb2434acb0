# pyright: reportUnknownMemberType=false
"""Joining: connects the hosts and makes JAX see the devices of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import jax

from jaxserve.errors import DeviceError
from jaxserve.execution.hosts.group import Follower, Group, Leader
from jaxserve.execution.hosts.relay import Relay
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.hosts import HostsConfig

_SECONDS = 120
# Settings in which the hosts of an engine may differ, and settings of which the least is used.
_OF_A_HOST = (
    "model",
    "tokenizer",
    "revision",
    "download_dir",
    "generation_config",
    "node_rank",
    "skip_tokenizer_init",
    "compilation_cache_dir",
    "wait_for_all_programs",
    "profile_start",
    "chat_template_content_format",
    "master_addr",
    "nodes_secret",
    "prefix_caching_secret",
    "kv_events_config",
)
_LEAST = ("max_model_len", "num_gpu_blocks_override")


def open_group(config: HostsConfig, secret: bytes | None) -> Group | None:
    """Connect to the other hosts, and make JAX see their devices.

    Args:
        config: the rank of this host, and the number and address of all hosts.
        secret: the secret that all hosts share. It may be None for one host.

    Returns:
        A Leader on the host of rank 0, a Follower on other hosts, or None if there is one host.

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


def agreed_settings(group: Group, config: EngineConfig, facts: Mapping[str, str]) -> EngineConfig:
    """Compare the settings of all hosts, and return this host's with the least of the hosts' sizes.

    The sizes are max_model_len and num_gpu_blocks_override. Settings of a single host, such as
    paths and secrets, are not compared.

    Args:
        group: connections to the other hosts.
        config: resolved settings of this host.
        facts: further values by name that must be equal on all hosts.

    Raises:
        InvalidRequest: hosts differ in a setting that must be equal.
    """
    settings = {
        field.name: repr(getattr(config, field.name))
        for field in fields(config)
        if field.name not in (*_OF_A_HOST, *_LEAST)
    }
    sizes = {name: getattr(config, name) for name in _LEAST}
    return replace(config, **group.settle({**settings, **facts}, sizes))


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
