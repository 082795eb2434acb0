"""Cards as XLA's compiler and Pallas take them, made from the table of cards.

XLA compiles for a card that is not there from a description of it, Pallas for a name that it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from pallas_kernels.devices import KIB, Capability, Card, find_card

ONE_OF_EACH = (
    "Tesla T4",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA H200",
    "NVIDIA B200",
    "NVIDIA B300",
    "NVIDIA Thor",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA GB10",
)
"""A card of each compute capability that XLA's plugin for CUDA 13 compiles for."""
CLAIMED = (
    *("T4", "RTX 3060", "RTX 3090", "RTX 4090", "RTX 5090", "L4"),
    *("A100", "H100", "H200", "B200", "DGX Spark"),
)
"""Cards that README names."""


@dataclasses.dataclass(frozen=True)
class Class:
    """Class of cards: numbers for XLA's cost model, and a name that Pallas has.

    Attributes:
        pallas_name: a card of this capability in the table of Pallas's Triton backend.
        threads: most threads of a multiprocessor.
        cache: MiB of the second-level cache, of the largest card.
        clock: GHz.
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
"""Capabilities with instructions of their own (sm_90a): without them LLVM ends the process."""

DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core} threads_per_core_limit: {threads} core_count: {sms}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared}
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


@dataclasses.dataclass(frozen=True)
class Target:
    """A card to compile for."""

    card: Card

    @classmethod
    def of(cls, name: str) -> Target:
        """Build the target of a card by any name of `find_card`.

        Raises:
            ValueError: the table has no such card, or the compiler does not know its class.
        """
        card = find_card(name)
        if card.capability not in CLASSES:
            allowed = ", ".join(".".join(map(str, capability)) for capability in CLASSES)
            raise ValueError(f"{card.limits} is not compiled for; allowed: capability {allowed}")
        return cls(card)

    @property
    def pallas_name(self) -> str:
        """A name of the same capability that Pallas has."""
        return CLASSES[self.card.capability].pallas_name

    @property
    def arch(self) -> str:
        """The name that ptxas has for it."""
        major, minor = self.card.capability
        return f"sm_{major}{minor}{'a' if self.card.capability in ACCELERATED else ''}"

    @property
    def is_claimed(self) -> bool:
        """Whether README names a card of its capability."""
        return self.card.capability in {find_card(name).capability for name in CLAIMED}

    @property
    def description(self) -> str:
        """The card as a GpuTargetConfigProto in text."""
        card, (major, minor) = self.card, self.card.capability
        shared, group = card.limits.shared_memory, CLASSES[card.capability]
        return DESCRIPTION.format(
            # From 8.0 on the system keeps a KiB of each block's.
            shared_core=shared + (KIB if major >= 8 else 0),
            threads=group.threads,
            sms=card.num_sms,
            lanes=64 if card.capability in ((7, 5), (8, 0)) else 128,
            bandwidth=int(card.bandwidth),
            cache=group.cache * KIB * KIB,
            clock=group.clock,
            memory=card.memory,
            shared=shared,
            major=major,
            minor=minor,
            features="ACCELERATED_FEATURES" if card.capability in ACCELERATED else "NONE",
            name=card.name,
        )
