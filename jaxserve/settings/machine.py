"""The machine's cards and memory, before JAX has opened any, and XLA's flags for a card.

NVIDIA's cards are listed by NVML, the library under `nvidia-smi`: it comes with every driver, opens
no card, and answers in milliseconds.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96  # bytes of the longest name or UUID
_OLDEST_FOR_KERNELS = (8, 0)


@dataclass(frozen=True)
class DriverCard:
    """A card, or the slice of one that MIG made, which is all that a process then sees.

    Attributes:
        uuid: names it whatever the order of the cards, also in CUDA_VISIBLE_DEVICES.
        name: as the driver gives it.
        capability: compute capability.
        total: bytes that CUDA reports in all; 0 where the card has no memory of its own.
        free: bytes that no process has taken.
    """

    uuid: str
    name: str
    capability: tuple[int, int]
    total: int
    free: int


class _Memory(ctypes.Structure):
    """Version 2 of NVML's answer, which counts what the driver keeps for itself apart."""

    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class _Nvml:
    """Calls of the library; each raises OSError where the driver refuses."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function, which returns 0 where all is well."""
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError as error:  # a driver older than the function
            raise OSError(f"the driver has no {name}") from error
        if status:
            raise OSError(f"{name} failed with status {status}")

    def handles(self) -> Iterator[ctypes.c_void_p]:
        """Yield every card in the order of the bus, or in its place the slices it is cut into."""
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
            except OSError:  # there is none of this number
                continue
            yield handle

    def text(self, name: str, handle: ctypes.c_void_p) -> str:
        """Return a name or a UUID."""
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(name, handle, buffer, _TEXT)
        return buffer.value.decode(errors="replace")

    def capability(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        """Return the compute capability; (0, 0) where the driver does not tell it."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            self.call(
                "nvmlDeviceGetCudaComputeCapability",
                *(handle, ctypes.byref(major), ctypes.byref(minor)),
            )
        except OSError:
            return 0, 0
        return major.value, minor.value

    def memory(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        """Return total and free bytes; zeros where the card has no memory of its own."""
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
    """List the cards, in the order of the bus; none where there is no driver, or it fails."""
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
    """Return the version of NVIDIA's driver; None where there is none."""
    buffer = ctypes.create_string_buffer(_TEXT)
    try:
        nvml = _Nvml()
        nvml.call("nvmlInit_v2")
        nvml.call("nvmlSystemGetDriverVersion", buffer, _TEXT)
        nvml.call("nvmlShutdown")
    except OSError:
        return None
    return buffer.value.decode(errors="replace")


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes of memory that this process may have, and those available; zeros if unknown.

    They are the host's, or less where a control group that the process is in has a limit.

    Args:
        root: of the file system with /proc and the mounts of control groups.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
        total, available = (int(sizes[name][0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, LookupError, ValueError):
        return 0, 0
    for limit, free in _group_limits(root):
        total, available = min(total, limit), min(available, free)
    return total, max(0, available)


@dataclass(frozen=True)
class _GroupFiles:
    """Names of what a version of control groups says about memory.

    The kernel drops the pages of files before it lets a group run out of memory, so that they are
    counted as free.
    """

    limits: tuple[str, ...]
    used: str
    droppable: tuple[str, ...]


_VERSION_1 = _GroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
# Above memory.high a group is not killed, but slowed down until it makes no progress.
_VERSION_2 = _GroupFiles(
    ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")
)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and free bytes of every control group above this process that has a limit."""
    for mount, group, files in _memory_groups(root):
        levels = [group, *group.parents]
        for folder in levels[: levels.index(mount) + 1]:
            with suppress(OSError, LookupError, ValueError):
                texts = [(folder / name).read_text().strip() for name in files.limits]
                limits = [int(text) for text in texts if text != "max"]
                if not limits:
                    continue
                lines = (folder / "memory.stat").read_text().splitlines()
                pages = dict(line.split() for line in lines)
                used = int((folder / files.used).read_text())
                used -= sum(int(pages[name]) for name in files.droppable)
                yield min(limits), min(limits) - used


def _memory_groups(root: Path) -> Iterator[tuple[Path, Path, _GroupFiles]]:
    """Yield where control groups of memory are mounted, the folder of our own, and its files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    groups: dict[str, str] = {}  # by controller; version 2 names none
    for line in lines:
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        place, _, kind = line.partition(" - ")
        top, folder = place.split()[3:5]
        system, _, options = kind.split()[:3]
        if system == "cgroup2":
            group, files = groups.get(""), _VERSION_2
        elif system == "cgroup" and "memory" in options.split(","):
            group, files = groups.get("memory"), _VERSION_1
        else:
            continue
        mount = root / folder.lstrip("/")
        if group is not None:
            yield mount, mount / _below(group, top), files


def _below(group: str, top: str) -> str:
    """Return a group's path below a mount that shows the groups from `top` on.

    A container often sees its own group as the mount itself, whatever the group's name outside.
    """
    top = top.rstrip("/")
    if ".." in group.split("/") or (group != top and not group.startswith(top + "/")):
        return ""
    return group[len(top) :].strip("/")


@dataclass(frozen=True)
class VisibleCard:
    """The card that an engine opens, or the cards.

    Attributes:
        setting: CUDA_VISIBLE_DEVICES for it alone.
        cards: the card; several where an engine opens several, and where the setting is a number
            and cards of different names could have it, since CUDA numbers the fastest first and
            the driver by the bus.
    """

    setting: str
    cards: tuple[DriverCard, ...]

    @property
    def card(self) -> DriverCard:
        """The card; of those that it may be, the one with the smallest part of its memory free."""
        return min(self.cards, key=lambda card: card.free / max(card.total, 1))


def visible_card(
    cards: list[DriverCard], setting: str | None, by_bus: bool = False, count: int = 1
) -> VisibleCard | None:
    """Choose the card to open, or several of the same name.

    Args:
        cards: from `driver_cards`.
        setting: the user's CUDA_VISIBLE_DEVICES, of which the first count. Without it cards that
            kernels run on come first, then those with the most memory free.
        by_bus: whether CUDA_DEVICE_ORDER has CUDA number the cards as the driver does.
        count: how many to open.

    Returns:
        None where there is no card, or none is visible; fewer than `count` where there are fewer.
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
    found: list[VisibleCard] = []
    for name in setting.split(",")[:count]:
        card = _named_card(cards, name.strip(), by_bus)
        if card is None:  # CUDA sees none of those behind it
            break
        found.append(card)
    if not found:
        return None
    every = (card for visible in found for card in visible.cards)
    return VisibleCard(",".join(visible.setting for visible in found), tuple(dict.fromkeys(every)))


def _named_card(cards: list[DriverCard], name: str, by_bus: bool) -> VisibleCard | None:
    """Return the card of one entry of CUDA_VISIBLE_DEVICES."""
    if name.isdecimal():
        if int(name) >= len(cards):
            return None
        same = by_bus or len({card.name for card in cards}) == 1
        return VisibleCard(name, (cards[int(name)],) if same else tuple(cards))
    # CUDA takes a UUID's beginning too.
    named = [card for card in cards if name and card.uuid.startswith(name)]
    return VisibleCard(name, (named[0],)) if named else None


def gpu_flags(jaxlib: str = "") -> tuple[str, ...]:
    """Return the flags of XLA that a GPU needs, of those that a version of jaxlib knows.

    Loops become nodes of CUDA graphs, so that a launch of several steps is one graph. And no kernel
    lets the next one begin before its own results are written, since ptxas may move a read-only
    load ahead of the next one's wait (`python -m scripts.gpu.compile_offline --order`).

    Args:
        jaxlib: its version; "" for the one that is installed.
    """
    loops = "--xla_gpu_enable_command_buffer=+WHILE"
    numbers = re.findall(r"\d+", jaxlib or metadata.version("jaxlib"))
    knows = tuple(map(int, numbers[:3])) >= (0, 11, 2)
    return (loops, "--xla_gpu_enable_pdl_launch=false") if knows else (loops,)


def with_gpu_flags(flags: str, jaxlib: str = "") -> str:
    """Return XLA's flags with those that a GPU needs, but for any that is among them already.

    So the user's word is the last; `--xla_gpu_enable_pdl=false` keeps launches from overlapping.
    """
    named = {flag.partition("=")[0] for flag in flags.split()}
    added = [flag for flag in gpu_flags(jaxlib) if flag.partition("=")[0] not in named]
    return " ".join([*flags.split(), *added])


def allocate_from_heap() -> None:
    """Keep glibc from returning large buffers to the system after every step.

    By default each temporary over 32 MB is mapped and unmapped anew, and its page faults
    cost more than the work (measured: attention over gathered pages 100 ms, then 31 ms).
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    # With one, threads that compile wait for each other: a cold start takes a third longer.
    mallopt(arena_max, 4)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 << 20)
