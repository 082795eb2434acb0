"""LaunchLength: limits the decode steps of a launch, so that new requests wait briefly."""

from __future__ import annotations

import time

# Duration of a launch. A new request waits for the running launch and for the next one.
LAUNCH_SECONDS = 0.02
# Weight of the newest measurement in the moving average.
_WEIGHT = 0.25


class LaunchLength:
    """The number of steps per launch, computed from measured durations.

    Args:
        most: the most steps of a launch.
        fixed: a fixed number of steps, or None for the number that fits into `LAUNCH_SECONDS`.
    """

    def __init__(self, most: int, fixed: int | None) -> None:
        self._most = most
        self._fixed = fixed
        self._step_seconds: float | None = None
        self._last_read = 0.0

    def steps(self) -> int:
        """Return the number of steps of the next launch."""
        if self._fixed is not None:
            return min(self._fixed, self._most)
        if self._step_seconds is None:
            return 1
        if self._step_seconds * self._most <= LAUNCH_SECONDS:
            return self._most
        return max(1, int(LAUNCH_SECONDS / self._step_seconds))

    def has_read(self, submitted: float, num_steps: int, now: float | None = None) -> None:
        """Record that the results of a launch have just been read.

        Args:
            submitted: the time of its submission (`time.perf_counter`).
            num_steps: the number of its steps.
            now: the current time, if `submitted` is from another clock.
        """

        now = time.perf_counter() if now is None else now
        seconds = (now - max(submitted, self._last_read)) / num_steps
        self._last_read = now
        before = seconds if self._step_seconds is None else self._step_seconds
        self._step_seconds = before + _WEIGHT * (seconds - before)
