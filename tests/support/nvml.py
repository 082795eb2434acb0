"""A played NVML: the driver's functions, with cards that a test chooses."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
# Python imports it at its start. A handle is the number of a card, counted from 1.
SITE = """
import ctypes

CARDS = {cards!r}
NOT_SUPPORTED, NOT_FOUND, WRONG_VERSION = 3, 6, 25


class Driver:
    \"\"\"The functions that are called; an argument by reference has the object in `_obj`.\"\"\"

    def nvmlInit_v2(self):
        return {init}

    def nvmlShutdown(self):
        return 0

    def nvmlSystemGetDriverVersion(self, buffer, size):
        buffer.value = b"580.65.06"
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.numbers(-1))
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return self.find(-1, index, handle)

    def nvmlDeviceGetMaxMigDeviceCount(self, card, count):
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, index, handle):
        return self.find(card.value - 1, index, handle)

    def nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = CARDS[handle.value - 1]["uuid"].encode()
        return 0

    def nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = CARDS[handle.value - 1]["name"].encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = CARDS[handle.value - 1]["capability"]
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle, memory):
        card, memory = CARDS[handle.value - 1], memory._obj
        if memory.version != (ctypes.sizeof(memory) | 2 << 24) or ctypes.sizeof(memory) != 40:
            return WRONG_VERSION
        if not card["total"]:
            return NOT_SUPPORTED
        for name in ("total", "reserved", "free"):
            setattr(memory, name, card[name] << 20)
        memory.used = memory.total - memory.reserved - memory.free
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, values):
        return NOT_SUPPORTED

    def numbers(self, slice_of):
        return [n for n, card in enumerate(CARDS, 1) if card["slice_of"] == slice_of]

    def find(self, slice_of, index, handle):
        numbers = self.numbers(slice_of)
        if index >= len(numbers):
            return NOT_FOUND
        handle._obj.value = numbers[index]
        return 0


load = ctypes.CDLL
ctypes.CDLL = lambda name, *rest, **options: (
    Driver() if name == "libnvidia-ml.so.1" else load(name, *rest, **options)
)
"""


@dataclass(frozen=True)
class PlayedCard:
    """A card of a simulated driver, with sizes in MiB.

    `slice_of` numbers the card it is cut from.
    """

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    reserved: int = 0
    slice_of: int = -1
    uuid: str = ""


T4 = PlayedCard("Tesla T4", (7, 5), 15360, 14900, 400, uuid="GPU-t4")
RTX_4090 = PlayedCard("NVIDIA GeForce RTX 4090", (8, 9), 24564, 23000, 456, uuid="GPU-4090")
GB10 = PlayedCard("NVIDIA GB10", (12, 1), 0, 0, uuid="GPU-spark")


def play_driver(folder: Path, *cards: PlayedCard, init: int = 0) -> dict[str, str]:
    """Make the environment of a process that finds the driver, and a CUDA plugin."""
    rows = [dataclasses.asdict(card) for card in cards]
    for number, row in enumerate(rows):
        row["uuid"] = row["uuid"] or f"GPU-{number}"
    played = folder / "played"
    (played / "jax_cuda13_plugin").mkdir(parents=True, exist_ok=True)
    (played / "sitecustomize.py").write_text(SITE.format(cards=rows, init=init))
    left_out = ("JAX_", "CUDA_", "XLA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment["PYTHONPATH"] = f"{played}{os.pathsep}{os.getcwd()}"
    return environment
