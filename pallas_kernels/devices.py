"""Limits of the device that code is compiled for, and a table of NVIDIA's cards.

`DeviceLimits` decides everything that depends on a card. It comes from the driver if the card is
present, and from this table if code is compiled or planned for an absent card. The numbers are
NVIDIA's (CUDA C++ programming guide, "Technical specifications per compute capability"; data
sheets).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax

KIB, GIB = 1024, 2**30

Capability = tuple[int, int]

SHARED_MEMORY: dict[Capability, int] = {
    (7, 0): 96 * KIB,
    (7, 2): 96 * KIB,
    (7, 5): 64 * KIB,
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}
"""Bytes of shared memory that one thread block can use, by compute capability."""
SMALLEST_SHARED_MEMORY = 99 * KIB
"""For a capability outside the table: every card from 8.0 on has as much."""


@dataclasses.dataclass(frozen=True)
class DeviceLimits:
    """Properties of a device that compiled code depends on.

    Attributes:
        platform: "gpu" (NVIDIA only), "cpu" or another platform name of XLA.
        kind: the device's name, as the driver reports it.
        capability: compute capability. (0, 0) if the device is not an NVIDIA card.
        num_sms: number of streaming multiprocessors. 0 if the device is not an NVIDIA card.
    """

    platform: str
    kind: str
    capability: Capability = (0, 0)
    num_sms: int = 0

    @property
    def is_gpu(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.platform == "gpu"

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one thread block of the card can use."""
        return SHARED_MEMORY.get(self.capability, SMALLEST_SHARED_MEMORY)

    @property
    def runs_triton(self) -> bool:
        """Whether Triton compiles for this device.

        XLA's Triton needs Ampere or newer. Pallas also refuses newer cards whose name does not
        begin with "NVIDIA": Orin, and slices of a card that a hypervisor calls GRID.
        """
        return self.capability >= (8, 0) and self.kind.startswith("NVIDIA")

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16. If not, XLA converts every weight first."""
        return not self.is_gpu or self.capability >= (8, 0)

    @property
    def widens_one_row(self) -> bool:
        """Whether XLA converts a whole 16-bit weight to float32 to multiply a single row by it.

        This is so on NVIDIA cards before Ampere. For two rows XLA does not convert the weight.
        """
        return self.is_gpu and self.capability < (8, 0)

    @property
    def widens_fp8(self) -> bool:
        """Whether Triton converts float8_e4m3fn to wider dtypes with an instruction of the card."""
        return self.capability >= (8, 9)

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether Triton rounds float32 to float8_e4m3fn once, with an instruction of the card.

        On 8.9 Triton first rounds to float16, towards zero. A number slightly above the midpoint of
        two float8 codes then gets the lower code.
        """
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether the device has the warpgroup products of Hopper. Only capability 9.0 has them."""
        return self.capability == (9, 0)

    @property
    def shares_host_memory(self) -> bool:
        """Whether the GPU has no memory of its own: Xavier, Orin, Thor and GB10 (DGX Spark)."""
        return self.capability in ((7, 2), (8, 7), (11, 0), (12, 1))

    def __str__(self) -> str:
        if not self.is_gpu:
            return self.kind
        return f"{self.kind} (compute capability {'.'.join(map(str, self.capability))})"


@dataclasses.dataclass(frozen=True)
class Card:
    """An NVIDIA card of the table of known cards, for plans and for compiling without the card.

    Attributes:
        name: as the driver reports it.
        capability: compute capability.
        num_sms: number of streaming multiprocessors.
        memory: total bytes that CUDA reports.
        bandwidth: memory bandwidth in bytes per second, from the data sheet.
    """

    name: str
    capability: Capability
    num_sms: int
    memory: int
    bandwidth: float

    @property
    def limits(self) -> DeviceLimits:
        """The `DeviceLimits` of this card of the table."""
        return DeviceLimits("gpu", self.name, self.capability, self.num_sms)


def _card(name: str, capability: Capability, num_sms: int, gib: float, gigabytes: float) -> Card:
    return Card(name, capability, num_sms, int(gib * GIB), gigabytes * 1e9)


CARDS = (
    _card("Tesla V100-SXM2-16GB", (7, 0), 80, 15.8, 898),
    _card("Tesla V100-SXM2-32GB", (7, 0), 80, 31.7, 898),
    _card("Tesla T4", (7, 5), 40, 14.6, 320),
    _card("NVIDIA GeForce RTX 2060", (7, 5), 30, 5.8, 336),
    _card("NVIDIA GeForce RTX 2080", (7, 5), 46, 7.8, 448),
    _card("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 10.7, 616),
    _card("Quadro RTX 6000", (7, 5), 72, 23.6, 672),
    _card("Quadro RTX 8000", (7, 5), 72, 47.4, 672),
    _card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.2, 2039),
    _card("NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.4, 1555),
    _card("NVIDIA A100 80GB PCIe", (8, 0), 108, 79.2, 1935),
    _card("NVIDIA A100-PCIE-40GB", (8, 0), 108, 39.4, 1555),
    _card("NVIDIA A30", (8, 0), 56, 23.5, 933),
    _card("NVIDIA GeForce RTX 3060", (8, 6), 28, 11.7, 360),
    _card("NVIDIA GeForce RTX 3060 Ti", (8, 6), 38, 7.7, 448),
    _card("NVIDIA GeForce RTX 3070", (8, 6), 46, 7.7, 448),
    _card("NVIDIA GeForce RTX 3080", (8, 6), 68, 9.7, 760),
    _card("NVIDIA GeForce RTX 3090", (8, 6), 82, 23.7, 936),
    _card("NVIDIA GeForce RTX 3090 Ti", (8, 6), 84, 23.7, 1008),
    _card("NVIDIA RTX A4000", (8, 6), 48, 15.6, 448),
    _card("NVIDIA RTX A6000", (8, 6), 84, 47.5, 768),
    _card("NVIDIA A10", (8, 6), 72, 22.0, 600),
    _card("NVIDIA A10G", (8, 6), 80, 22.0, 600),
    _card("NVIDIA A40", (8, 6), 84, 44.4, 696),
    _card("Orin", (8, 7), 16, 61.4, 205),
    _card("NVIDIA GeForce RTX 4060", (8, 9), 24, 7.6, 272),
    _card("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 15.6, 288),
    _card("NVIDIA GeForce RTX 4070", (8, 9), 46, 11.6, 504),
    _card("NVIDIA GeForce RTX 4080", (8, 9), 76, 15.6, 717),
    _card("NVIDIA GeForce RTX 4090", (8, 9), 128, 23.5, 1008),
    _card("NVIDIA L4", (8, 9), 58, 22.0, 300),
    _card("NVIDIA L40", (8, 9), 142, 44.4, 864),
    _card("NVIDIA L40S", (8, 9), 142, 44.4, 864),
    _card("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 47.4, 960),
    _card("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.1, 3350),
    _card("NVIDIA H100 PCIe", (9, 0), 114, 79.1, 2000),
    _card("NVIDIA H100 NVL", (9, 0), 132, 93.1, 3938),
    _card("NVIDIA H200", (9, 0), 132, 139.8, 4800),
    _card("NVIDIA H200 NVL", (9, 0), 132, 139.8, 4800),
    _card("NVIDIA GH200 480GB", (9, 0), 132, 94.5, 4000),
    _card("NVIDIA B200", (10, 0), 148, 178.4, 7672),
    _card("NVIDIA GB200", (10, 0), 148, 184.0, 8000),
    _card("NVIDIA B300", (10, 3), 148, 268.0, 8000),
    _card("NVIDIA Thor", (11, 0), 20, 122.8, 273),
    _card("NVIDIA GeForce RTX 5060 Ti", (12, 0), 36, 15.5, 448),
    _card("NVIDIA GeForce RTX 5070", (12, 0), 48, 11.5, 672),
    _card("NVIDIA GeForce RTX 5080", (12, 0), 84, 15.5, 960),
    _card("NVIDIA GeForce RTX 5090", (12, 0), 170, 31.4, 1792),
    _card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 94.9, 1792),
    _card("NVIDIA GB10", (12, 1), 48, 119.0, 273),
)
"""The commonest variant of a name comes first, because `find_card` returns the first match."""

_ALIASES = {"spark": "gb10", "dgx": "", "rtx pro 6000": "rtx pro 6000 blackwell"}
_BRANDS = {"nvidia", "geforce", "tesla", "quadro", "generation", "edition", "jetson", "agx", ""}
_MIG = re.compile(r" mig (?P<share>\d)g\.(?P<gigabytes>\d+)gb")
"""A slice of a card: "NVIDIA A100-SXM4-80GB MIG 3g.40gb" has 3 of its 7 parts and 40 GB."""


def _words(name: str) -> set[str]:
    for alias, meaning in _ALIASES.items():
        name = re.sub(rf"\b{alias}\b", meaning, name)
    return set(re.split(r"[\s/_-]+", name)) - _BRANDS


def find_card(name: str) -> Card:
    """Return the `Card` of a name or a part of it: "RTX 4090", "NVIDIA H100", "t4".

    An exact name comes first, then the first card of the table that has all words of `name`. For a
    MIG slice ("... MIG 3g.40gb") the card has the slice's multiprocessors, memory and bandwidth.

    Raises:
        ValueError: the table has no such card. The message lists its cards.
    """
    lower = " ".join(name.lower().split())
    mig = _MIG.search(lower)
    words = _words(_MIG.sub("", lower))
    # If several names match, the first one is the commonest variant.
    matches = [card for card in CARDS if words and words <= _words(card.name.lower())]
    exact = [card for card in matches if words == _words(card.name.lower())]
    if not matches:
        names = ", ".join(card.name.removeprefix("NVIDIA ") for card in CARDS)
        raise ValueError(f"there is no card {name!r} in the table; it has: {names}")
    card = (exact or matches)[0]
    if mig is None:
        return card
    share = int(mig["share"])
    return dataclasses.replace(
        card,
        name=name,
        num_sms=card.num_sms * share // 7,
        memory=min(int(mig["gigabytes"]) * GIB, card.memory),
        bandwidth=card.bandwidth * min(share / 7, 1.0),
    )


def limits_of(device: Any) -> DeviceLimits:
    """Return the `DeviceLimits` of a JAX device, real or abstract.

    An abstract GPU gets the limits of the card of its name in the table. An AMD device has the
    platform "rocm".

    Raises:
        ValueError: the device is an abstract GPU whose name is not in the table.
    """
    platform, kind = device.platform, device.device_kind
    if platform not in ("gpu", "cuda"):
        return DeviceLimits(platform, kind)
    reported = getattr(device, "compute_capability", None)
    if reported is None:
        limits = find_card(kind).limits
        sms = getattr(device, "num_cores", None) or limits.num_sms
        return dataclasses.replace(limits, num_sms=int(sms))
    major, _, minor = str(reported).partition(".")
    if not major.isdecimal():  # an AMD device, such as "gfx942"
        return DeviceLimits("rocm", kind)
    sms = getattr(device, "core_count", 0)
    return DeviceLimits("gpu", kind, (int(major), int(minor or 0)), int(sms))


def target_device() -> DeviceLimits:
    """Return the `DeviceLimits` of the device that code is being compiled for.

    An abstract device of the current mesh comes first: this is how code is compiled for an absent
    GPU. ``jax.default_device`` is next, then the default backend. If a real device has the name of
    the abstract one, its driver supplies the limits, so cards outside the table work too.
    """
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        device = next((d for d in jax.devices() if d.device_kind == device.device_kind), device)
    if device is None:
        device = getattr(jax.config, "jax_default_device", None)
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return limits_of(device)
