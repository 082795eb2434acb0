"""The device of an engine and its memory, read before or after JAX starts or from a table."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import jax
from jax._src import xla_bridge

from jaxserve.execution.typed_jax import devices
from jaxserve.settings.cards import VisibleCard, driver_cards
from jaxserve.settings.environment import card_to_open, claimed, has_cuda_plugin, memory_fraction
from jaxserve.settings.machine import host_memory
from jaxserve.start.jax_start import start_jax
from pallas_kernels.devices import GIB, DeviceLimits, find_card, limits_of

_log = logging.getLogger(__name__)
ROOT = Path("/")


@dataclass(frozen=True)
class DeviceMemory:
    """Description of a device: its kind, and the memory that an engine may allocate on it.

    Attributes:
        limits: kind and compute capability of the device.
        total: bytes of memory.
        free: bytes that are free, of which an engine takes a share.
        bandwidth: bytes per second by the data sheet, or 0 if unknown.
        is_limit: whether `free` is a limit that JAX or the user has set. An engine takes all of it,
            unless gpu_memory_utilization of `total` is less.
        in_use: bytes that are allocated out of the limit.
        card: the card that JAX will open. None if JAX has opened a card or runs on the CPU.
    """

    limits: DeviceLimits
    total: int
    free: int
    bandwidth: float = 0.0
    is_limit: bool = False
    in_use: int = 0
    card: VisibleCard | None = None

    def budget(self, utilization: float | None, default: float) -> int:
        """Return the bytes that an engine may allocate on the device.

        Args:
            utilization: the setting gpu_memory_utilization, or None if it is not set.
            default: the share of `free` without that setting. If `free` is a limit, all of it is
                returned then.
        """
        if not self.is_limit:
            return int(self.free * (utilization or default))
        return self.free if utilization is None else min(self.free, int(self.total * utilization))

    def __str__(self) -> str:
        if not self.total:
            return f"{self.limits}, of unknown memory"
        memory = f"{self.total / GIB:.1f} GiB"
        if self.limits.shares_host_memory:
            memory += " shared with the host"
        return f"{self.limits}, {memory}, {self.free / GIB:.1f} GiB free"


def named_device(name: str, root: Path = ROOT) -> DeviceMemory:
    """Return the description of a card, all of whose memory is free, or of this host's CPU.

    Args:
        name: name of the card in the table of cards, or "cpu" for the host with its free memory.
        root: see `host_memory`.

    Raises:
        ValueError: the table has no card of this name. The message lists its cards.
    """
    if name.lower() == "cpu":
        return _host(root)
    card = find_card(name)
    return DeviceMemory(card.limits, card.memory, card.memory, card.bandwidth)


def _host(root: Path) -> DeviceMemory:
    total, free = host_memory(root)
    return DeviceMemory(DeviceLimits("cpu", "CPU"), total, free)


def this_device(root: Path = ROOT, count: int = 1) -> DeviceMemory:
    """Return the description of the device that an engine of this process uses.

    JAX is not started.

    Args:
        root: see `host_memory`.
        count: number of cards of the engine. The card with the least free share of memory is
            described.
    """
    if getattr(xla_bridge, "backends_are_initialized", lambda: True)():
        return started_device(root)
    platforms = _platforms()
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return _host(root)
    visible = card_to_open() if count == 1 else card_to_open(count)
    if visible is None or not has_cuda_plugin():  # `start_jax` warns of a missing plugin
        return _host(root)
    return _card_memory(visible, root)


def _platforms() -> str:
    return str(getattr(jax.config, "jax_platforms", None) or "")


def _card_memory(visible: VisibleCard, root: Path) -> DeviceMemory:
    card = visible.card
    limits = DeviceLimits("gpu", card.name, card.capability)
    total, free = card.total, card.free
    if limits.shares_host_memory or not total:
        total, free = host_memory(root)
    fraction = memory_fraction()
    return DeviceMemory(
        limits,
        total,
        free if fraction is None else int(total * fraction),
        _bandwidth(card.name),
        is_limit=fraction is not None,
        card=visible,
    )


def _bandwidth(name: str) -> float:
    with suppress(ValueError):
        return find_card(name).bandwidth
    return 0.0


def started_device(root: Path = ROOT, count: int = 1) -> DeviceMemory:
    """Return the description of JAX's first device, with the memory that JAX may allocate.

    JAX is started if it has not started yet.

    Args:
        root: see `host_memory`.
        count: number of devices of the engine. `free` is the least of their limits, and `in_use`
            the largest of their allocations.
    """
    device, *others = devices()[:count]
    if device.platform == "cpu":
        return _host(root)
    limits = limits_of(device)
    listed = [card for card in driver_cards() if card.name == limits.kind]
    total = max((card.total for card in listed), default=0)
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:  # an allocator of the user's choice
        free = min((card.free for card in listed), default=0)
        return DeviceMemory(limits, total, free, _bandwidth(limits.kind))
    every = [stats, *(statistics for other in others if (statistics := other.memory_stats()))]
    limit = min(statistics["bytes_limit"] for statistics in every)
    in_use = max(statistics["bytes_in_use"] for statistics in every)
    return DeviceMemory(limits, total or limit, limit, _bandwidth(limits.kind), True, in_use)


def open_device(memory: DeviceMemory, budget: int) -> None:
    """Start JAX on a device. If JAX has to open a card, it may take `budget` bytes of its memory.

    Args:
        memory: the device. If its `card` is None, `budget` is not used.
        budget: bytes of memory for JAX, which reserves them at once unless the card shares the
            host's memory.

    Raises:
        DeviceError: see `start_jax`.
    """
    if memory.card is None:
        start_jax()
        return
    importing_kernels(memory.limits)
    preallocate = not memory.limits.shares_host_memory
    with claimed(memory.card, budget / max(memory.total, 1), preallocate):
        platform = start_jax()
    if platform != "cpu":
        _log.info("%s: JAX may take %.1f GiB (GPU %s)", memory, budget / GIB, memory.card.setting)


def importing_kernels(limits: DeviceLimits) -> threading.Thread | None:
    """Start a daemon thread that imports Pallas and the kernels for a card.

    The import takes about a second, by which it would delay the first program otherwise.

    Returns:
        The thread, which need not be joined, or None for a device that does not run Triton.
    """
    if not limits.runs_triton:
        return None
    dialect = "jaxlib.mlir.dialects.tt"
    if dialect not in sys.modules and find_spec(dialect) is None:
        # jaxlib tries to import this module for each operation of Triton. Without the entry each
        # attempt searches sys.path again, which is a tenth of the time of lowering.
        sys.modules[dialect] = ModuleType(dialect)
    name = "hopper_ragged" if limits.has_wgmma else "triton_ragged"
    module = f"pallas_kernels.gpu.{name}"
    thread = threading.Thread(target=import_module, args=(module,), name="imports", daemon=True)
    thread.start()
    return thread
