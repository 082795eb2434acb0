"""HostsConfig: the settings of one engine over several devices and hosts, under vLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import exact_int

_ADDRESS = re.compile(r"[\w.-]+|[\da-fA-F:.]+", re.ASCII)
_SUMS = ("auto", "nccl", "xla_kernels", "pallas")
_ON_ONE_HOST = _SUMS[2:]
# With other values the host would need logits whose columns are on other hosts.
_RAW, _MOST_LOGPROBS = "raw_logprobs", 20


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """Settings for an engine over several devices and hosts. Each host has equally many devices.

    Args:
        decode_context_parallel_size: number of devices that divide the positions of a sequence, if
            `tensor_parallel_size` makes several devices store the same KV head. Each stores a part
            of the KV cache, so that longer sequences fit. Attention then uses plain JAX instead of
            GPU kernels.
        all_reduce: how devices add their results, on GPUs with jax 0.11.2 or newer. "auto" leaves
            the choice to XLA, "nccl" is NCCL in the CUDA graph of the step, "xla_kernels" are XLA's
            kernels for compute capability 9.0 and newer, and "pallas" is jaxserve's kernel for 9.0,
            which also normalizes the sum of few rows. No choice has been timed.
        nnodes: number of hosts, with an equal part of the `tensor_parallel_size` devices on each.
            Start every host with the same settings except node_rank.
        node_rank: number of this host. Host 0 leads and serves, the others need --headless.
        master_addr: private address of the leader, to which the other hosts connect.
        master_port: port of the leader. JAX's coordination uses the port after it.
        nodes_secret: file of at least 32 random bytes, the same on all hosts, with which they
            authenticate each other. Replicas on Ray Serve set nnodes, node_rank, master_addr and
            nodes_secret themselves.
    """

    decode_context_parallel_size: int = 1
    all_reduce: Literal["auto", "nccl", "xla_kernels", "pallas"] = "auto"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    nodes_secret: str | Path | None = None

    @property
    def has_followers(self) -> bool:
        """Whether the engine has more than one host."""
        return self.nnodes > 1


def check_hosts(config: Any) -> None:
    """Check the settings of hosts, and the settings of an engine that several hosts do not support.

    Args:
        config: an `EngineConfig`, which this module cannot import.

    Raises:
        InvalidRequest: names the field and the allowed values.
    """
    _check_context(config)
    exact_int(config.nnodes, "nnodes", 1, 1024)
    if exact_int(config.node_rank, "node_rank", 0, 1023) >= config.nnodes:
        raise InvalidRequest(
            f"node_rank must be less than nnodes, got {config.node_rank} of {config.nnodes}",
            "node_rank",
        )
    exact_int(config.master_port, "master_port", 1, 65534)
    if not _ADDRESS.fullmatch(str(config.master_addr)):
        raise InvalidRequest(
            f"master_addr must be an address or a name, got {config.master_addr!r}", "master_addr"
        )
    if config.all_reduce not in _SUMS:
        raise InvalidRequest(
            f"all_reduce must be one of {', '.join(_SUMS)}; got {config.all_reduce!r}", "all_reduce"
        )
    if not config.has_followers:
        return
    if config.all_reduce in _ON_ONE_HOST:
        raise InvalidRequest(
            f"all_reduce is {config.all_reduce}, whose kernels read the memory of cards of one "
            "host; allowed with nnodes: auto, nccl",
            "all_reduce",
        )
    devices = config.tensor_parallel_size
    if devices % config.nnodes:
        raise InvalidRequest(
            f"tensor_parallel_size is {devices}, over {config.nnodes} hosts (nnodes); allowed: a "
            f"multiple of {config.nnodes}",
            "tensor_parallel_size",
        )
    if config.memory_share != 1.0:
        raise InvalidRequest("several hosts serve one model: start a server for each", "nnodes")
    if config.logprobs_mode != _RAW:
        raise InvalidRequest(
            f"logprobs_mode is {config.logprobs_mode}, which needs logits of all hosts on one; "
            f"allowed with nnodes: {_RAW}",
            "logprobs_mode",
        )
    if not 0 <= config.max_logprobs <= _MOST_LOGPROBS:
        raise InvalidRequest(
            f"max_logprobs is {config.max_logprobs}; allowed with nnodes: 0 to {_MOST_LOGPROBS}",
            "max_logprobs",
        )


def check_secret(config: Any) -> None:
    """Check that nodes_secret is set if an engine has several hosts.

    Args:
        config: an `EngineConfig`.

    Raises:
        InvalidRequest: several hosts have no secret.
    """
    if config.has_followers and config.nodes_secret is None:
        raise InvalidRequest(
            "nnodes needs nodes_secret, a file by which the hosts authenticate each other; "
            "`openssl rand -hex 32` makes one",
            "nodes_secret",
        )


def too_few(devices: int, visible: int, platform: str) -> InvalidRequest:
    """Return the error for a host that has fewer devices than the engine needs there.

    Args:
        devices: number of devices that the host needs.
        visible: number of devices that JAX sees.
        platform: platform of the devices, which determines the advice in the message.
    """
    cure = "CUDA_VISIBLE_DEVICES names the devices that a process sees"
    if platform == "cpu":
        cure = (
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices} divides the processor, "
            "to try it"
        )
    sees = f"1 device ({platform})" if visible == 1 else f"{visible} devices ({platform})"
    return InvalidRequest(
        f"tensor_parallel_size is {devices}, and JAX sees {sees}; {cure}", "tensor_parallel_size"
    )


def _check_context(config: Any) -> None:
    """Check decode_context_parallel_size: it must divide tensor_parallel_size and block_size.

    Raises:
        InvalidRequest: it does not divide them, or it is above 1 and attention_backend names a GPU
            kernel.
    """
    name = "decode_context_parallel_size"
    size, devices = config.decode_context_parallel_size, config.tensor_parallel_size
    exact_int(size, name, 1, 1024)
    if devices % size:
        raise InvalidRequest(
            f"{name} is {size}, of {devices} devices (tensor_parallel_size); allowed: a divisor of "
            f"{devices}",
            name,
        )
    if config.block_size is not None and config.block_size % size:
        raise InvalidRequest(
            f"{name} is {size}, and a page has {config.block_size} tokens (block_size); allowed: a "
            f"divisor of {config.block_size}",
            name,
        )
    if size > 1 and config.attention_backend not in ("auto", "xla"):
        raise InvalidRequest(
            f"attention_backend is {config.attention_backend}, whose kernels attend to all "
            f"positions; allowed with {name}: auto, xla",
            "attention_backend",
        )
