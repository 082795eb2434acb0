"""Implementation of `jaxserve serve --headless`: run a part of another host's engine."""

from __future__ import annotations

import signal
import sys

from jaxserve.commands.start_output import StartOutput, Stop
from jaxserve.engine.following import follow as follow_leader
from jaxserve.server.http.logs import log_json
from jaxserve.server.served.specs import ModelSpec


def follow(spec: ModelSpec, is_verbose: bool = False) -> int:
    """Run this host's part of the engine until the leader has ended in order. Return 0.

    Raises:
        ValueError, OSError: see `engine.following.follow`.
    """
    log_json()
    output = StartOutput(sys.stderr, Stop(), is_verbose)
    config = spec.config
    output.say(f"loading {spec.names[0]}: host {config.node_rank} of {config.nnodes}")

    def say_ready() -> None:
        # Ctrl-C signals the whole process group. The leader finishes its requests first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        output.say(f"following {config.master_addr}:{config.master_port}")

    calls = follow_leader(config, output.progress, say_ready)
    output.say(f"the leader has ended, after {calls} calls of programs")
    return 0
