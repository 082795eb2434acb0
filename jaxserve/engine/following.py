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
    """Hold this host's part of an engine, and run what its leader runs, until that ends in order.

    Args:
        config: the leader's, but for node_rank.
        on_ready: called once the leader can serve.
        root: see `load`.

    Returns:
        How many calls of programs were run.

    Raises:
        As `load`; ChannelError: the leader is lost.
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
