"""LaunchLength: the number of decode steps a launch may take without a delay that users notice."""

from __future__ import annotations

import time

# A new request waits for the launch that runs and for the one behind it.
LAUNCH_SECONDS = 0.02
# Weight of the newest measurement in the moving average.
_WEIGHT = 0.25


class LaunchLength:
    """The length of launches, from the measured time of steps.

    Args:
        most: steps of a launch, at most.
        fixed: take as many however long they last; None for as many as fit into `LAUNCH_SECONDS`.
    """

    def __init__(self, most: int, fixed: int | None) -> None:
        self._most = most
        self._fixed = fixed
        self._step_seconds: float | None = None
        self._last_read = 0.0

    def steps(self) -> int:
        """Return the steps of the next launch."""
        if self._fixed is not None:
            return min(self._fixed, self._most)
        if self._step_seconds is None:
            return 1
        if self._step_seconds * self._most <= LAUNCH_SECONDS:
            return self._most
        return max(1, int(LAUNCH_SECONDS / self._step_seconds))

    def has_read(self, submitted: float, num_steps: int, now: float | None = None) -> None:
        """Note that a launch's results came just now.

        Args:
            submitted: time of its submission, by `time.perf_counter`.
            num_steps: steps that it took.
            now: the time now, if `submitted` is by another clock.
        """
        now = time.perf_counter() if now is None else now
        seconds = (now - max(submitted, self._last_read)) / num_steps
        self._last_read = now
        before = seconds if self._step_seconds is None else self._step_seconds
        self._step_seconds = before + _WEIGHT * (seconds - before)
