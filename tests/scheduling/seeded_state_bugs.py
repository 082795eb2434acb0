"""Bugs that the places of states and their snapshots could have (see mutants)."""

from __future__ import annotations

from tests.scheduling.seeded_pool_bugs import POOL, SCHEDULER, Bug

SNAPSHOTS = "jaxserve/scheduling/snapshots.py"

STATE_BUGS = (
    Bug(
        "cached pages are used without a snapshot",
        SNAPSHOTS,
        "return pages[: self.snapshots.usable(pages)]",
        "return pages",
    ),
    Bug(
        "a prefix starts from the snapshot of another border",
        SNAPSHOTS,
        "self.snapshots.pin(int(hits[-1]))",
        "self.snapshots.pin(int(hits[0]))",
    ),
    Bug(
        "a snapshot is evicted in the launch that reads it",
        SNAPSHOTS,
        "        self._evictable.pop(snapshot, None)\n        self.num_restored",
        "        self.num_restored",
    ),
    Bug(
        "an answer's snapshot is written again in the launch that reads it",
        SNAPSHOTS,
        "if self._of_page[page] != snapshot or self._pins[snapshot]:",
        "if self._of_page[page] != snapshot:",
    ),
    Bug(
        "an answer's snapshot is written again while a page has it",
        SNAPSHOTS,
        "return snapshot if self.snapshots.take_back(snapshot, page) else NONE",
        "return snapshot",
    ),
    Bug(
        "an evicted page's snapshot is still found",
        POOL,
        "            self.snapshots.drop(pages)\n",
        "            self.snapshots.drop(pages[:0])\n",
    ),
    Bug(
        "a preempted row resumes from its old state",
        SCHEDULER,
        "self.states.begin(slot, hits, len(matched))",
        "self.states.begin(slot, hits[:0], len(matched))",
    ),
    Bug(
        "the state of a border is saved a page early",
        SNAPSHOTS,
        "        last = end // size * size\n",
        "        last = max(0, end // size - 1) * size\n",
    ),
    Bug(
        "a state is saved in the neighbouring snapshot",
        SNAPSHOTS,
        "chosen, first + snapshot",
        "chosen, first + (snapshot + 1) % self.snapshots.num_snapshots",
    ),
    Bug(
        "snapshots of a released slot are lost",
        SNAPSHOTS,
        "                self.snapshots.release(snapshot)\n            self._answers",
        "                pass\n            self._answers",
    ),
)
