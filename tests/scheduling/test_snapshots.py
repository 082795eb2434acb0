"""The pool of snapshots, call by call."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.snapshots import SnapshotPool


def test_a_snapshot_that_a_launch_reads_is_not_written() -> None:
    pool = SnapshotPool(1, num_pages=8)
    snapshot = pool.acquire()
    pool.attach(snapshot, 3)
    assert pool.pin(3) == snapshot
    assert not pool.take_back(snapshot, 3) and pool.acquire() == -1
    pool.unpin(snapshot)
    assert pool.take_back(snapshot, 3) and pool.num_held == 0


def test_a_snapshot_of_another_page_is_not_taken_back() -> None:
    pool = SnapshotPool(1, num_pages=8)
    snapshot = pool.acquire()
    pool.attach(snapshot, 3)
    assert not pool.take_back(snapshot, 4) and pool.num_held == 1


def test_the_demoted_snapshot_is_evicted_before_the_least_recently_used() -> None:
    pool = SnapshotPool(2, num_pages=8)
    for page in (3, 4):
        pool.attach(pool.acquire(), page)
    pool.demote(4)
    pool.acquire()
    assert pool.has_snapshot(np.array([3, 4])).tolist() == [True, False]
