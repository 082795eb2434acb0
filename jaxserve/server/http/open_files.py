"""The number of connections that the process's limit of open files allows."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

# Files that a process has open besides its connections, including short-lived ones.
SPARE_FILES = 256
# Spare files per connection that the event loop may accept in one iteration.
_SHARE_OF_A_TURN = 8
_FEWEST = 16


@dataclass(frozen=True)
class Room:
    """Numbers of connections that fit within the limit of open files."""

    limit: float  # number of files that the process may have open
    connections: int  # number of connections served at a time
    # Number of further connections that may be accepted in one iteration of the event loop, or wait
    # for a refusal. The file of a refused connection is closed some iterations later.
    beyond: int


def make_room(connections: int) -> Room:
    """Raise the process's limit of open files, up to its hard limit, for a number of connections.

    Returns:
        The numbers of connections that fit, at most `connections`.

    Raises:
        ValueError: the hard limit leaves too little room beside the files that are open now.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + 2 * SPARE_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    num_open = len(os.listdir("/dev/fd"))
    num_free = (needed if limit == resource.RLIM_INFINITY else limit) - num_open
    if num_free < _FEWEST:
        raise ValueError(
            f"the limit of open files, {limit}, leaves no room for connections beside the "
            f"{num_open} that are open: raise it (ulimit -n)"
        )
    spare = min(SPARE_FILES, num_free // 2)
    return Room(limit, min(connections, num_free - spare), spare // _SHARE_OF_A_TURN)
