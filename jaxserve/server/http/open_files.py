"""Open files: the connections that the process's limit of them allows."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

# Files that a process holds besides its connections, and those that it opens for a moment.
SPARE_FILES = 256
# Spare files for each connection that one turn of the event loop accepts.
_SHARE_OF_A_TURN = 8
_FEWEST = 16


@dataclass(frozen=True)
class Room:
    """Connections that the limit of open files leaves room for.

    Attributes:
        limit: files that the process may have open.
        connections: served at once.
        beyond: more that may be accepted in one turn of the event loop, or wait for a refusal. A
            connection's file is closed some turns after the connection is refused.
    """

    limit: float
    connections: int
    beyond: int


def make_room(wanted: int) -> Room:
    """Raise the limit of open files as far as `wanted` connections need and the process may.

    Raises:
        ValueError: the limit leaves no room beside the files that are open now.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 2 * SPARE_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    num_open = len(os.listdir("/dev/fd"))
    left = (needed if limit == resource.RLIM_INFINITY else limit) - num_open
    if left < _FEWEST:
        raise ValueError(
            f"the limit of open files, {limit}, leaves no room for connections beside the "
            f"{num_open} that are open: raise it (ulimit -n)"
        )
    spare = min(SPARE_FILES, left // 2)
    return Room(limit, min(wanted, left - spare), spare // _SHARE_OF_A_TURN)
