"""A follower: a host that holds a part of an engine which another one leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxserve.execution.hosts.group import Follower
from jaxserve.execution.runner import OnProgress
from jaxserve.settings.config import EngineConfig
from jaxserve.start.start import begin


def follow(
    config: EngineConfig,
    on_progress: OnProgress | None = None,
    on_ready: Callable[[], None] = lambda: None,
    root: Path = Path("/"),
) -> int:
    """Run this host as a follower of an engine until the leader ends.

    A follower loads its shard of the model and runs the same programs as the leader, in the same
    order.

    Args:
        config: the leader's settings, with the `node_rank` of this host.
        on_progress: called with (stage, done, total) during the start.
        on_ready: called when all hosts are ready to serve.
        root: see `start.start.load`.

    Returns:
        The number of calls of programs that this host ran.

    Raises:
        CheckpointError, UnsupportedModel, InvalidRequest: see `start.start.load`.
        ChannelError: the connection to the leader is lost.
    """
    begun = begin(replace(config, skip_tokenizer_init=True), on_progress, root)
    group = begun.group
    assert isinstance(group, Follower)
    with group.ending_with_the_others():
        replay = begun.warm_up.replay(begun.placed.leaves, on_progress)
        begun.warm_up.report.timeline.write()
        group.serve()
        on_ready()
        group.follow(replay.run)
        replay.wait()
    group.close()
    return replay.num_calls
