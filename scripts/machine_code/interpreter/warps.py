"""Instructions that exchange registers within a warp."""

from __future__ import annotations

import numpy as np

from scripts.machine_code.interpreter.arithmetic import canonical, greatest, least
from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.threads import WARP, Array, Mask, Threads

LANE = np.arange(WARP)


class Warps:
    """Exchange of values between the threads of each warp."""

    def __init__(self, threads: Threads, clocks: Clocks) -> None:
        self.threads, self.clocks = threads, clocks

    def active(self, mask: Mask) -> Array:
        """Return bool[warp, lane] of active threads."""
        return (self.threads.exists if mask is None else mask).reshape(-1, WARP)

    def members(self, mask: Mask, members: Array, what: str) -> Array:
        """Return bool[warp, lane] of the lanes named, all of which must take part."""
        active = self.active(mask)
        named = (self.threads.by_warp(members) >> LANE.astype(np.uint32)) & np.uint32(1) != 0
        named = named & self.threads.exists.reshape(-1, WARP)
        absent = (named & ~active).any(1) & active.any(1)
        unnamed = (active & ~named).any(1)
        for bad, why in ((absent, "without every lane of its mask"), (unnamed, "not in its mask")):
            if bad.any():
                raise self.threads.fault(f"{what} {why}", int(np.argmax(bad)) * WARP)
        return named

    def shuffle(
        self, mask: Mask, mode: str, value: Array, distance: Array, limits: Array, members: Array
    ) -> list[Array]:
        """Return the value of another lane, and whether that lane is within the limits."""
        self.members(mask, members, "a shuffle")
        active, value = self.active(mask), self.threads.by_warp(value)
        limits = self.threads.by_warp(limits)
        distance = (self.threads.by_warp(distance) & np.uint32(31)).astype(np.int64)
        clamp = (limits & np.uint32(31)).astype(np.int64)
        segment = ((limits >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
        last, first = (LANE & segment) | (clamp & ~segment), LANE & segment
        if mode == "up":
            source = LANE - distance
            inside = source >= last
        else:
            source = {
                "down": LANE + distance,
                "bfly": LANE ^ distance,
                "idx": first | (distance & ~segment),
            }[mode]
            inside = source <= last
        source = np.where(inside, source, LANE)
        row = np.arange(len(source))[:, None]
        # A lane gets an undefined value from a lane that does not take part.
        taken = np.where(active[row, source], value[row, source], np.uint32(0xFFFF_FFFF))
        return [taken.reshape(-1), np.broadcast_to(inside, taken.shape).reshape(-1)]

    def reduce(self, mask: Mask, operation: str, value: Array, members: Array) -> list[Array]:
        """Reduce integers over the named lanes. Each of them gets the result."""
        named = self.members(mask, members, "a redux")
        limits = np.iinfo(value.dtype)
        function, neutral = {
            "add": (np.add, 0),
            "min": (np.minimum, limits.max),
            "max": (np.maximum, limits.min),
            "and": (np.bitwise_and, limits.max if limits.min == 0 else -1),
            "or": (np.bitwise_or, 0),
            "xor": (np.bitwise_xor, 0),
        }[operation]
        rows = np.where(named, self.threads.by_warp(value), value.dtype.type(neutral))
        return [np.repeat(function.reduce(rows, axis=1, dtype=value.dtype), WARP)]

    def reduce_floats(
        self, mask: Mask, operation: str, spreads_nan: bool, value: Array, members: Array
    ) -> list[Array]:
        """Find the least or greatest number of the lanes named, or a NaN if it is to spread."""
        named = self.members(mask, members, "a redux")
        rows = self.threads.by_warp(value)
        result = np.full(len(rows), np.nan, np.float32)
        choose = {"min": least, "max": greatest}[operation]
        for lane in range(WARP):
            found = choose(result, rows[:, lane])
            result = np.where(named[:, lane], found, result)
        if spreads_nan:
            result = np.where((np.isnan(rows) & named).any(axis=1), np.float32(np.nan), result)
        return [np.repeat(canonical(result), WARP)]

    def vote(self, mask: Mask, mode: str, value: Array, members: Array) -> list[Array]:
        named = self.members(mask, members, "a vote")
        holds = self.threads.by_warp(value)
        if mode == "ballot":
            return [np.repeat(bits_of(holds & named), WARP)]
        every, any_lane = (holds | ~named).all(1), (holds & named).any(1)
        result = {"all": every, "any": any_lane, "uni": every | ~any_lane}[mode]
        return [np.repeat(result, WARP)]

    def synchronize(self, mask: Mask, members: Array) -> None:
        """Order later actions of the named lanes after their earlier actions."""
        named = self.members(mask, members, "a bar.warp.sync")
        lanes = np.flatnonzero((named & self.active(mask)).any(1)) * WARP
        self.clocks.begin_epoch(self.threads.cta[lanes], self.threads.warp[lanes])

    def elect(self, mask: Mask, members: Array) -> list[Array]:
        """Return the first of the named lanes, and whether a thread is it."""
        named = self.members(mask, members, "an election")
        first = named.argmax(1)
        leader = named & (first[:, None] == LANE)
        return [np.repeat(first.astype(np.uint32), WARP), leader.reshape(-1)]

    def active_mask(self, mask: Mask) -> list[Array]:
        return [np.repeat(bits_of(self.active(mask)), WARP)]


def bits_of(lanes: Array) -> Array:
    """Return bool[warp, lane] as a number for each warp."""
    return (lanes.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, dtype=np.uint32)
