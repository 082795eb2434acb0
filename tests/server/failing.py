"""`jaxserve` where a step that holds a row whose prompt begins with `MARK` fails, late or early.

python -m tests.server.failing serve --max-num-seqs 1
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from jaxserve.commands.cli import main
from jaxserve.execution.runner import Runner

MARK = [7, 7, 7]


def let_steps_fail(runner: Any) -> None:
    """Let steps of a runner, or of all where it is their class, fail: every other one as it is
    submitted, with the cache lost, and the others as they are read."""
    submit, read = runner.submit, runner.read
    turn, doomed = itertools.cycle((True, False)), set()

    def failing_submit(self: Any, plan: Any, slots: Any) -> Any:
        marked = (slots.tokens[plan.slots, : len(MARK)] == MARK).all(axis=1).any()
        if marked and next(turn):
            self._state = None
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        step = submit(self, plan, slots)
        if marked:
            doomed.add(id(step.output))
        return step

    def failing_read(self: Any, step: Any) -> Any:
        if id(step.output) in doomed:
            doomed.discard(id(step.output))
            raise RuntimeError("INTERNAL: injected")
        return read(self, step)

    runner.submit, runner.read = failing_submit, failing_read


if __name__ == "__main__":
    let_steps_fail(Runner)
    sys.exit(main())
