"""Clock on the parts of an engine's loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from jaxserve.engine.engine import Engine


class HostClock:
    """Seconds that an engine's loop spends in each of its parts, step by step.

    It wraps the methods of this engine's objects. `restore` unwraps them.
    """

    def __init__(self, engine: Engine) -> None:
        self.spent: dict[str, list[float]] = {}
        self._wrapped: list[tuple[Any, str]] = []
        for owner, name in (
            (engine.scheduler, "schedule"),
            (engine.runner, "submit"),
            (engine.runner, "read"),
            (engine.scheduler, "commit"),
            (engine, "step"),
        ):
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)
        spent = self.spent[name] = []

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - started)

        setattr(owner, name, timed)
        self._wrapped.append((owner, name))

    def restore(self) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)
