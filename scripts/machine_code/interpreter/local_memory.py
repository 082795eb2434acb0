"""Local memory: a few bytes that each thread has for itself."""

from __future__ import annotations

import numpy as np

from scripts.machine_code.interpreter.ptx_types import UNSIGNED
from scripts.machine_code.interpreter.threads import Array, Mask, Threads


class LocalMemory:
    """Local memory of all threads, [thread, byte]."""

    def __init__(self, threads: Threads, size: int) -> None:
        self.threads, self.size = threads, size
        self.data = np.full((threads.count, -(-size // 16) * 16), 0xFF, np.uint8)
        self.written = np.zeros(self.data.shape, bool)

    def offsets(self, lanes: Array, address: Array, size: int) -> Array:
        offsets = self.threads.pick(address, lanes).astype(np.int64)
        outside = (offsets < 0) | (offsets + size > self.size)
        self.threads.refuse(outside, lanes, f"an access outside the {self.size} bytes of its own")
        misaligned = offsets % size != 0
        self.threads.refuse(misaligned, lanes, f"a misaligned access of {size} local bytes")
        return offsets

    def load(self, mask: Mask, address: Array, width: int, count: int) -> list[Array]:
        lanes = self.threads.lanes(mask)
        offsets = self.offsets(lanes, address, width * count)
        has_value = self.written[lanes[:, None], offsets[:, None] + np.arange(width * count)]
        self.threads.refuse(~has_value.all(1), lanes, "a read of local memory never written")
        words = self.data.view(UNSIGNED[width])
        loaded = [words[lanes, offsets // width + index] for index in range(count)]
        return [self.threads.spread(values, lanes) for values in loaded]

    def store(self, mask: Mask, address: Array, width: int, values: list[Array]) -> None:
        lanes = self.threads.lanes(mask)
        offsets = self.offsets(lanes, address, width * len(values))
        words = self.data.view(UNSIGNED[width])
        for index, value in enumerate(values):
            words[lanes, offsets // width + index] = self.threads.pick(value, lanes)
        self.written[lanes[:, None], offsets[:, None] + np.arange(width * len(values))] = True
