"""Bugs that the places of states and their snapshots could have (see mutants)."""

from __future__ import annotations

from tests.scheduling.seeded_pool_bugs import POOL, SCHEDULER, Bug

SNAPSHOTS = "jaxserve/scheduling/snapshots.py"
STATE_FAULTS = {
    "a": "a state is not zeroed at position 0",
    "b": "a state is zeroed in a restored row",
    "c": "padding tokens advance the last row",
    "d": "a chunk of one token drops the past of the convolution",
    "e": "a chunk of three tokens keeps one column too few",
    "f": "a snapshot is saved one token late",
    "g": "a snapshot is saved early",
    "h": "a snapshot is taken from the neighbouring row",
    "i": "a snapshot is used without all of its pages",
    "j": "pages are used without a snapshot",
    "k": "a snapshot is overwritten in the launch that reads it",
    "l": "the snapshot of an evicted page is still found",
    "m": "an ended row advances a state",
    "n": "an index over the chunks of the batch is used in place of the row's",
    "o": "a preempted row resumes from its old state",
}
"""Kinds of faults of states, of which each has bugs here or in `seeded_device_bugs`."""

STATE_BUGS = (
    Bug(
        "cached pages are used without a snapshot",
        POOL,
        "is_end = has_snapshot(first) if is_end is None else is_end & has_snapshot(first)",
        "pass",
        letter="j",
    ),
    Bug(
        "a prefix starts from the snapshot of another border",
        SNAPSHOTS,
        "self.snapshots.pin(int(hits[-1]))",
        "self.snapshots.pin(int(hits[0]))",
        letter="i",
    ),
    Bug(
        "a snapshot is evicted in the launch that reads it",
        SNAPSHOTS,
        "        self._evictable.pop(snapshot, None)\n        self.num_restored",
        "        self.num_restored",
        letter="k",
    ),
    Bug(
        "an answer's snapshot is written again in the launch that reads it",
        SNAPSHOTS,
        "if self._of_page[page] != snapshot or self._pins[snapshot]:",
        "if self._of_page[page] != snapshot:",
        letter="k",
    ),
    Bug(
        "an answer's snapshot is written again while a page has it",
        SNAPSHOTS,
        "return snapshot if self.snapshots.take_back(snapshot, page) else NONE",
        "return snapshot",
        letter="k",
    ),
    Bug(
        "an evicted page's snapshot is still found",
        POOL,
        "            self.snapshots.drop(blocks)\n",
        "            self.snapshots.drop(blocks[:0])\n",
        letter="l",
    ),
    Bug(
        "a preempted row resumes from its old state",
        SCHEDULER,
        "self.states.begin(slot, hits[0], len(matched.blocks[0]))",
        "self.states.begin(slot, hits[0][:0] if sequence.num_preemptions else hits[0], 0)",
        letter="o",
    ),
    Bug(
        "the state of a border is saved a page early",
        SNAPSHOTS,
        "        last = end // size * size\n",
        "        last = max(0, end // size - 1) * size\n",
        letter="g",
    ),
    Bug(
        "a snapshot is attached before its page is published",
        SNAPSHOTS,
        "while pending and pending[0][0] <= table.num_published[slot] * size:",
        "while pending:",
    ),
    Bug(
        "a state is saved in the neighbouring snapshot",
        SNAPSHOTS,
        "chosen, first + snapshot",
        "chosen, first + (snapshot + 1) % self.snapshots.num_snapshots",
        letter="h",
    ),
    Bug(
        "snapshots of a released slot are lost",
        SNAPSHOTS,
        "                self.snapshots.release(snapshot)\n            self._answers",
        "                pass\n            self._answers",
    ),
)
