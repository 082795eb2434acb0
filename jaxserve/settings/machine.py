"""The machine's cards and memory, read before JAX opens a card, and XLA's flags for a GPU.

NVML, the library of `nvidia-smi`, lists NVIDIA's cards. It comes with every driver, opens no card,
and answers in milliseconds.
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
    """A card, or a MIG slice of a card, of which a process then sees only the slice.

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
    """Version 2 of NVML's memory information, which has a field for memory of the driver."""

    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class _Nvml:
    """Functions of the NVML library. Each raises OSError if the driver reports an error."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library, whose status 0 means success."""
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError as error:  # a driver older than the function
            raise OSError(f"the driver has no {name}") from error
        if status:
            raise OSError(f"{name} failed with status {status}")

    def handles(self) -> Iterator[ctypes.c_void_p]:
        """Yield handles of the cards in the order of the bus, or of the MIG slices of a card."""
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
        """Return a name or a UUID."""
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(name, handle, buffer, _TEXT)
        return buffer.value.decode(errors="replace")

    def capability(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        """Return the compute capability, or (0, 0) if the driver does not report it."""
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
        """Return total and free bytes, or zeros for a card without memory of its own."""
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
    """Return the cards in the order of the bus, or an empty list without a working driver."""
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
    """Return the version of NVIDIA's driver, or None without a driver."""
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
    """Return the total and the available bytes of memory for this process; zeros if unknown.

    The numbers are of the host, reduced by the limits of the control groups of the process.

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
    """Names of files and counters with the memory of a control group, for one of two versions.

    Pages of files count as free, since the kernel drops them before a group runs out of memory.
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
    """Yield the limit and the free bytes of each control group of this process with a limit."""
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
    """Yield the mounts of control groups for memory, the group's folder there, and its files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    groups: dict[str, str] = {}  # by controller, "" in version 2
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
    # In a container the mount often is the group itself, under any name outside.
    top = top.rstrip("/")
    if ".." in group.split("/") or (group != top and not group.startswith(top + "/")):
        return ""
    return group[len(top) :].strip("/")


@dataclass(frozen=True)
class VisibleCard:
    """The cards that an engine opens.

    Attributes:
        setting: CUDA_VISIBLE_DEVICES for these cards.
        cards: the cards. If the user's setting is a number, all cards that could have it: CUDA
            numbers the fastest first and the driver by the bus.
    """

    setting: str
    cards: tuple[DriverCard, ...]

    @property
    def card(self) -> DriverCard:
        """The card with the smallest free share of its memory."""
        return min(self.cards, key=lambda card: card.free / max(card.total, 1))


def visible_card(
    cards: list[DriverCard], setting: str | None, by_bus: bool = False, count: int = 1
) -> VisibleCard | None:
    """Choose the card to open, or several of the same name.

    Args:
        cards: from `driver_cards`.
        setting: the user's CUDA_VISIBLE_DEVICES, of which the first `count` entries are taken.
            Without it, cards that support the kernels come first, then cards with more free memory.
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


def gpu_flags(jaxlib: str = "") -> tuple[str, ...]:
    """Return the XLA flags for a GPU that a version of jaxlib supports.

    Loops become nodes of CUDA graphs, so that a launch of several steps is one graph. A kernel does
    not start before the results of the previous one are written, because ptxas may move a
    read-only load ahead of its wait (`python -m scripts.gpu.compile_offline --order`).

    Args:
        jaxlib: the version, "" for the installed one.
    """
    loops = "--xla_gpu_enable_command_buffer=+WHILE"
    numbers = re.findall(r"\d+", jaxlib or metadata.version("jaxlib"))
    knows = tuple(map(int, numbers[:3])) >= (0, 11, 2)
    return (loops, "--xla_gpu_enable_pdl_launch=false") if knows else (loops,)


def with_gpu_flags(flags: str, jaxlib: str = "") -> str:
    """Return the user's XLA flags with the flags for a GPU, except flags that the user has set.

    `--xla_gpu_enable_pdl=false` keeps launches from overlapping.
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
    # With one arena, compiling threads wait for each other: a cold start takes a third longer.
    mallopt(arena_max, 4)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 << 20)
