"""The machine's cards, listed before JAX opens one, and the choice of the cards to open.

NVML, the library of `nvidia-smi`, lists NVIDIA's cards. It comes with every driver, opens no card,
and answers in milliseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96  # bytes of the longest name or UUID
_OLDEST_FOR_KERNELS = (8, 0)


@dataclass(frozen=True)
class DriverCard:
    """A graphics card that NVIDIA's driver lists, or a MIG slice of one.

    Attributes:
        uuid: identifies the card in any order of cards, also in CUDA_VISIBLE_DEVICES.
        name: product name from the driver.
        capability: compute capability.
        total: bytes of memory that CUDA reports, 0 for a card without memory of its own.
        free: bytes that no process has allocated.
    """

    uuid: str
    name: str
    capability: tuple[int, int]
    total: int
    free: int


class _Memory(ctypes.Structure):
    """C structure of NVML for a card's bytes of memory: total, reserved by the driver, free."""

    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class _Nvml:
    """Functions of the NVML library. `call` and the constructor raise OSError on any failure."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the NVML library by name.

        Raises:
            OSError: the function returns a status other than 0, or the driver is too old to have
                it.
        """
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError as error:  # a driver older than the function
            raise OSError(f"the driver has no {name}") from error
        if status:
            raise OSError(f"{name} failed with status {status}")

    def handles(self) -> Iterator[ctypes.c_void_p]:
        """Yield NVML handles of all cards in bus order. MIG slices replace their card."""
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            slices = list(self._slices(handle))
            yield from slices or [handle]

    def _slices(self, card: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
        most = ctypes.c_uint()
        try:
            self.call("nvmlDeviceGetMaxMigDeviceCount", card, ctypes.byref(most))
        except OSError:
            return
        for index in range(most.value):
            handle = ctypes.c_void_p()
            try:
                self.call("nvmlDeviceGetMigDeviceHandleByIndex", card, index, ctypes.byref(handle))
            except OSError:  # no slice has this number
                continue
            yield handle

    def text(self, name: str, handle: ctypes.c_void_p) -> str:
        """Return the text, a name or UUID, that an NVML function reports for a card's handle."""
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(name, handle, buffer, _TEXT)
        return buffer.value.decode(errors="replace")

    def capability(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        """Return a card's compute capability, or (0, 0) if the driver does not report it."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            self.call(
                "nvmlDeviceGetCudaComputeCapability",
                handle,
                ctypes.byref(major),
                ctypes.byref(minor),
            )
        except OSError:
            return 0, 0
        return major.value, minor.value

    def memory(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        """Return total and free bytes of a card, or zeros if it has no memory of its own.

        Memory that the driver reserves does not count, unless the driver is too old to report it.
        """
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        try:
            self.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
        except OSError:
            return self._old_memory(handle)
        return memory.total - memory.reserved, memory.free

    def _old_memory(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        values = (ctypes.c_ulonglong * 3)()  # total, free, used
        try:
            self.call("nvmlDeviceGetMemoryInfo", handle, values)
        except OSError:
            return 0, 0
        return values[0], values[1]


def driver_cards() -> list[DriverCard]:
    """Return the machine's cards and MIG slices in bus order, [] without a working driver."""
    try:
        nvml = _Nvml()
        nvml.call("nvmlInit_v2")
    except OSError:
        return []
    try:
        return [
            DriverCard(
                nvml.text("nvmlDeviceGetUUID", handle),
                nvml.text("nvmlDeviceGetName", handle),
                nvml.capability(handle),
                *nvml.memory(handle),
            )
            for handle in nvml.handles()
        ]
    except OSError:
        return []
    finally:
        with suppress(OSError):
            nvml.call("nvmlShutdown")


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None without a working driver."""
    buffer = ctypes.create_string_buffer(_TEXT)
    try:
        nvml = _Nvml()
        nvml.call("nvmlInit_v2")
        nvml.call("nvmlSystemGetDriverVersion", buffer, _TEXT)
        nvml.call("nvmlShutdown")
    except OSError:
        return None
    return buffer.value.decode(errors="replace")


@dataclass(frozen=True)
class VisibleCard:
    """The cards that an engine opens, with their CUDA_VISIBLE_DEVICES.

    Attributes:
        setting: value of CUDA_VISIBLE_DEVICES for these cards.
        cards: the cards. If the user's setting is a number, all cards that could have that number:
            CUDA numbers the fastest card first and the driver numbers by the bus.
    """

    setting: str
    cards: tuple[DriverCard, ...]

    @property
    def card(self) -> DriverCard:
        """The card with the smallest free share of its memory among the visible cards."""
        return min(self.cards, key=lambda card: card.free / max(card.total, 1))


def visible_card(
    cards: list[DriverCard], setting: str | None, by_bus: bool = False, count: int = 1
) -> VisibleCard | None:
    """Choose the cards that an engine opens, from the driver's list and the user's setting.

    Args:
        cards: from `driver_cards`.
        setting: the user's CUDA_VISIBLE_DEVICES, of which the first `count` entries are taken. If
            it is None, cards of one name are chosen: cards that support the kernels come first,
            then cards with more free memory.
        by_bus: whether CUDA_DEVICE_ORDER makes CUDA number the cards as the driver does.
        count: number of cards to open.

    Returns:
        The cards, fewer than `count` if fewer are visible, or None if no card is.
    """
    if not cards:
        return None
    if setting is None:
        best = sorted(
            cards,
            key=lambda card: (card.capability >= _OLDEST_FOR_KERNELS, card.free),
            reverse=True,
        )
        chosen = [card for card in best if card.name == best[0].name][:count]
        return VisibleCard(",".join(card.uuid for card in chosen), tuple(chosen))
    visible: list[VisibleCard] = []
    for name in setting.split(",")[:count]:
        card = _named_card(cards, name.strip(), by_bus)
        if card is None:  # CUDA ignores all entries after an invalid one
            break
        visible.append(card)
    if not visible:
        return None
    every = (card for entry in visible for card in entry.cards)
    return VisibleCard(",".join(entry.setting for entry in visible), tuple(dict.fromkeys(every)))


def _named_card(cards: list[DriverCard], name: str, by_bus: bool) -> VisibleCard | None:
    if name.isdecimal():
        if int(name) >= len(cards):
            return None
        same = by_bus or len({card.name for card in cards}) == 1
        return VisibleCard(name, (cards[int(name)],) if same else tuple(cards))
    # CUDA takes a UUID's beginning too.
    named = [card for card in cards if name and card.uuid.startswith(name)]
    return VisibleCard(name, (named[0],)) if named else None
