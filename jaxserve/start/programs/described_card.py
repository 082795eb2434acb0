# pyright: reportUnknownMemberType=false
"""DescribedCard: an absent card, in the forms that XLA's compiler and Pallas take.

XLA compiles for an absent card from a description, and Pallas from a card's name. The result is
the code that the card's own machine would compile, without measurements: XLA takes its
choices from files (see `autotuning`) and leaves the rest to its cost model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Lowered

from jaxserve.errors import DeviceError
from jaxserve.execution.mesh import mesh_of
from jaxserve.start.device import DeviceMemory, named_device
from jaxserve.start.jax_start import find_parts, plugin_remedy
from pallas_kernels.devices import GIB, KIB, Capability, Card, find_card


@dataclasses.dataclass(frozen=True)
class Class:
    """Properties of the cards of one compute capability, for XLA's cost model and for Pallas.

    Attributes:
        pallas_name: a card of this capability in the table of Pallas's Triton backend.
        threads: most threads of a multiprocessor.
        cache: MiB of the second-level cache, of the largest card.
        clock: clock rate in GHz.
    """

    pallas_name: str
    threads: int
    cache: int
    clock: float


CLASSES: Mapping[Capability, Class] = MappingProxyType(
    {
        (7, 5): Class("Tesla T4", 1024, 4, 1.59),
        (8, 0): Class("NVIDIA A100", 2048, 40, 1.41),
        (8, 6): Class("NVIDIA A10", 1536, 6, 1.7),
        (8, 9): Class("NVIDIA L4", 1536, 72, 2.52),
        (9, 0): Class("NVIDIA H200", 2048, 60, 1.98),
        (10, 0): Class("NVIDIA B200", 2048, 126, 1.96),
        (10, 3): Class("NVIDIA B300", 2048, 126, 1.92),
        (11, 0): Class("NVIDIA Thor", 1536, 32, 1.57),
        (12, 0): Class("NVIDIA RTX PRO 6000", 1536, 96, 2.41),
        (12, 1): Class("NVIDIA GB10", 1536, 24, 2.4),
    }
)
ACCELERATED = frozenset({(9, 0), (10, 0), (10, 3), (11, 0)})
"""Capabilities with special instructions (sm_90a). Without the suffix LLVM ends the process."""

DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core} threads_per_core_limit: {threads} core_count: {sms}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  {links} device_memory_size: {memory} shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


MEASURED_BANDWIDTH: Mapping[str, float] = MappingProxyType({"NVIDIA H200": 4814e9})
"""Bytes per second by memory clock and bus width, as a driver reports them. The folder of XLA's
choices is named by a hash of this number and of others, which `CLASSES` has."""
NVLINKS: Mapping[str, int] = MappingProxyType(
    {
        "Tesla V100-SXM2-16GB": 6,
        "Tesla V100-SXM2-32GB": 6,
        "NVIDIA A100-SXM4-40GB": 12,
        "NVIDIA A100-SXM4-80GB": 12,
        "NVIDIA H100 80GB HBM3": 18,
        "NVIDIA H200": 18,
        "NVIDIA B200": 18,
    }
)
"""NVLinks per card by the data sheets. XLA has kernels for sums over linked cards."""
RESERVED = GIB
"""Assumed bytes of a card's memory that the driver and a process's context take."""


@dataclasses.dataclass(frozen=True)
class DescribedCard:
    """A card that need not be in this machine, or several of them in one host, to compile for.

    Attributes:
        card: the card, from the table of cards.
        count: number of cards.
    """

    card: Card
    count: int = 1

    @classmethod
    def of(cls, name: str, count: int = 1) -> DescribedCard:
        """Return the description of `count` cards with a name that `find_card` accepts.

        Raises:
            ValueError: the table has no such card, or its compute capability is not in `CLASSES`.
        """
        card = find_card(name)
        if card.capability not in CLASSES:
            allowed = ", ".join(".".join(map(str, capability)) for capability in CLASSES)
            raise ValueError(f"{card.limits} is not compiled for; allowed: capability {allowed}")
        return cls(card, count)

    @property
    def pallas_name(self) -> str:
        """Name, known to Pallas, of a card of the same compute capability."""
        return CLASSES[self.card.capability].pallas_name

    @property
    def arch(self) -> str:
        """Name of the card's architecture for ptxas, such as sm_90a."""
        major, minor = self.card.capability
        return f"sm_{major}{minor}{'a' if self.card.capability in ACCELERATED else ''}"

    @property
    def links(self) -> int:
        """Number of NVLinks between each card and the others, 0 if there are none."""
        return NVLINKS.get(self.card.name, 0) if self.count > 1 else 0

    @property
    def description(self) -> str:
        """Description of the card for XLA's compiler: a GpuTargetConfigProto in text format."""
        card, (major, minor) = self.card, self.card.capability
        shared, group = card.limits.shared_memory, CLASSES[card.capability]
        return DESCRIPTION.format(
            # From 8.0 on the system reserves a KiB per thread block.
            shared_core=shared + (KIB if major >= 8 else 0),
            threads=group.threads,
            sms=card.num_sms,
            lanes=64 if card.capability in ((7, 5), (8, 0)) else 128,
            bandwidth=int(MEASURED_BANDWIDTH.get(card.name, card.bandwidth)),
            cache=group.cache * KIB * KIB,
            clock=group.clock,
            memory=card.memory,
            links=f"device_interconnect_info {{ active_links: {self.links} }}" * bool(self.links),
            shared=shared,
            major=major,
            minor=minor,
            features="ACCELERATED_FEATURES" if card.capability in ACCELERATED else "NONE",
            name=card.name,
        )

    @property
    def memory(self) -> DeviceMemory:
        """Memory of one card that an engine may take, without a reserve for the driver."""
        memory = named_device(self.card.name)
        return dataclasses.replace(memory, free=memory.free - RESERVED)

    def start_compiler(self, root: Path) -> None:
        """Start XLA's compiler for the card. JAX itself is set to the CPU, and opens no card.

        Args:
            root: root of the file system with the files that show whether a driver is installed.

        Raises:
            DeviceError: JAX's plugin for CUDA is not installed, or does not start.
        """
        remedy = plugin_remedy(find_parts(root))
        if remedy is not None:
            name = self.card.limits
            raise DeviceError(f"compiling for {name} needs JAX's plugin for CUDA: {remedy}")
        jax.config.update("jax_platforms", "cpu")
        try:
            _ = self.device
        except Exception as error:  # a plugin may raise anything
            raise DeviceError(f"nothing can be compiled for {self.card.limits}: {error}") from error

    @functools.cached_property
    def device(self) -> Any:
        """The first described card as a JAX device, for which programs are compiled.

        No array can be placed on this device.

        Raises:
            RuntimeError: JAX's plugin for CUDA is not installed, or does not start.
        """
        return self._devices[0]

    @functools.cached_property
    def _devices(self) -> list[Any]:
        topology: Any = topologies.get_topology_desc(
            platform="cuda", target_config=self.description, topology=f"1x1x{self.count}"
        )
        return topology.devices

    @functools.cached_property
    def cards(self) -> Mesh | None:
        """Mesh of all described cards, or None for a single card.

        Raises:
            RuntimeError: JAX's plugin for CUDA is not installed, or does not start.
        """
        return None if self.count == 1 else mesh_of(self._devices)

    @property
    def mesh(self) -> Any:
        """JAX abstract mesh that describes the card, within which programs are traced for it."""
        described = jax.sharding.AbstractDevice(
            device_kind=self.pallas_name, num_cores=self.card.num_sms, platform="gpu"
        )
        return jax.sharding.AbstractMesh((), (), abstract_device=described)

    def tracing(self) -> AbstractContextManager[Any]:
        """Return a context in which the current thread traces programs for the described card."""
        return jax.sharding.use_abstract_mesh(self.mesh)

    def lower(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        donate: int | tuple[int, ...] = (),
        keep_unused: bool = False,
    ) -> Lowered:
        """Lower a function of arrays to XLA's input for the card.

        Args:
            function: the function, which is jitted.
            arguments: arrays, or their shapes.
            donate: numbers of the donated arguments.
            keep_unused: whether the program also takes arguments that it does not read.
        """
        placed = jax.sharding.SingleDeviceSharding(self.device)
        options: dict[str, Any] = {"donate_argnums": donate, "keep_unused": keep_unused}
        if not arguments:  # otherwise the arguments say where it runs
            options["out_shardings"] = placed

        def place(array: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)

        return self.lower_placed(jax.jit(function, **options), jax.tree.map(place, arguments))

    def lower_placed(self, function: Any, arguments: tuple[Any, ...]) -> Lowered:
        """Trace a jitted function within `tracing()`, and lower it to XLA's input for CUDA.

        Its arguments or results must have shardings.
        """
        with self.tracing():
            return function.trace(*arguments).lower(lowering_platforms=("cuda",))
