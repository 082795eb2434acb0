"""Pace: how many decode steps a launch may take without anybody noticing."""

from __future__ import annotations

import time

# Whoever arrives waits for the launch that runs and for the one behind it.
LAUNCH_SECONDS = 0.02
# Of a new measurement in the estimate.
_WEIGHT = 0.25


class LaunchLength:
    """Watches how long steps take.

    Args:
        most: steps of a launch, at most.
        asked: take as many however long they last; None for as many as nobody notices.
    """

    def __init__(self, most: int, asked: int | None) -> None:
        self._most = most
        self._asked = asked
        self._step_seconds: float | None = None
        self._last_read = 0.0

    def steps(self) -> int:
        """Steps of the next launch."""
        if self._asked is not None:
            return min(self._asked, self._most)
        if self._step_seconds is None:
            return 1
        if self._step_seconds * self._most <= LAUNCH_SECONDS:
            return self._most
        return max(1, int(LAUNCH_SECONDS / self._step_seconds))

    def has_read(self, submitted: float, num_steps: int, now: float | None = None) -> None:
        """A launch's results came just now.

        Args:
            submitted: when it was, by `time.perf_counter`.
            num_steps: that it took.
            now: by another clock, if that is what tells `submitted`.
        """
        now = time.perf_counter() if now is None else now
        seconds = (now - max(submitted, self._last_read)) / num_steps
        self._last_read = now
        before = seconds if self._step_seconds is None else self._step_seconds
        self._step_seconds = before + _WEIGHT * (seconds - before)
