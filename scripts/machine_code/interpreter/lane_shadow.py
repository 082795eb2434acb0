"""Shadow of shared memory that finds races between the lanes of one warp.

Lanes need not run together. Therefore a lane may read the store of another lane only after
`bar.warp.sync` or a barrier of the CTA. Both begin an epoch of the warp: accesses of earlier epochs
are ordered.
"""

from __future__ import annotations

import numpy as np

from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.threads import WARP, Array, Threads

# Several lanes, or an instruction that moves data between all lanes.
SEVERAL = -1


class LaneShadow:
    """The lane that last wrote each cell, and for each warp the lane that last read it.

    `written` and `read` are the epochs of the accesses, `writer` is the warp of the write.
    """

    def __init__(
        self, threads: Threads, clocks: Clocks, writer: Array, written: Array, read: Array
    ) -> None:
        self.threads, self.clocks = threads, clocks
        self.writer, self.written, self.read = writer, written, read
        self.writing_lane = np.zeros(written.shape, np.int8)
        self.reading_lane = np.zeros(read.shape, np.int8)

    def lane(self, lanes: Array, by_warp: bool) -> Array:
        """Return each access's lane in its warp, as a column."""
        if by_warp:
            return np.full((len(lanes), 1), SEVERAL, np.int8)
        return (lanes % WARP).astype(np.int8)[:, None]

    def now(self, lanes: Array) -> Array:
        return self.clocks.now(self.threads.cta[lanes], self.threads.warp[lanes])[:, None]

    def written_by_others(self, lanes: Array, cells: Array, by_warp: bool) -> Array:
        """Return which accesses are to cells that another lane of the warp wrote in this epoch."""
        own = self.writer[cells] == self.threads.warp[lanes, None]
        own &= self.written[cells] == self.now(lanes)
        if not own.any():
            return np.zeros(len(lanes), bool)
        lane = self.lane(lanes, by_warp)
        return (own & ((self.writing_lane[cells] != lane) | (lane == SEVERAL))).any(1)

    def read_by_others(self, lanes: Array, cells: Array, by_warp: bool) -> Array:
        """Return which accesses are to cells that another lane of the warp read in this epoch."""
        warp = self.threads.warp[lanes, None]
        own = self.read[cells, warp] == self.now(lanes)
        if not own.any():
            return np.zeros(len(lanes), bool)
        lane = self.lane(lanes, by_warp)
        return (own & ((self.reading_lane[cells, warp] != lane) | (lane == SEVERAL))).any(1)

    def note_write(self, lanes: Array, cells: Array, by_warp: bool) -> None:
        self.writing_lane[cells] = self.lane(lanes, by_warp)

    def note_read(self, lanes: Array, cells: Array, by_warp: bool) -> None:
        """Record the reading lanes. Call it before the epoch of the read is recorded."""
        warp, lane = self.threads.warp[lanes, None], self.lane(lanes, by_warp)
        again = self.read[cells, warp] == self.now(lanes)
        shared = again & (self.reading_lane[cells, warp] != lane)
        self.reading_lane[cells, warp] = lane
        # Of the lanes that read a cell in one instruction, only one is there now.
        shared |= self.reading_lane[cells, warp] != lane
        if shared.any():
            self.reading_lane[cells[shared], np.broadcast_to(warp, cells.shape)[shared]] = SEVERAL
