"""The servers of one model: each started once, and halted while another is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from scripts.compare.engine import Engine
from scripts.compare.process import Started


class Servers:
    """Servers that repeats share: starting anew takes some engines longer than a part.

    As a context manager: whatever was started ends with it.

    Args:
        make: the server of an engine and a model, not started yet.
    """

    def __init__(self, make: Callable[[Engine, str], Started]) -> None:
        self._make = make
        self._model = ""
        self._kept: dict[str, Started] = {}

    @contextmanager
    def awake(self, engine: Engine, model: str) -> Iterator[tuple[Started, bool]]:
        """Wake the engine's server. Yield it and whether it is new, and halt it afterwards.

        Servers of another model end first. One that has ended by itself is started anew.

        Raises:
            NotInstalled: it cannot be had here.
            RuntimeError: it did not come up.
        """
        if model != self._model:
            self._end()
            self._model = model
        server = self._kept.get(engine.name)
        is_new = server is None or not server.is_alive
        if server is None or not server.is_alive:
            server = self._make(engine, model)
            server.__enter__()
            self._kept[engine.name] = server
        server.go_on()
        try:
            yield server, is_new
        finally:
            server.pause()

    def _end(self) -> None:
        for server in self._kept.values():
            server.__exit__(None, None, None)
        self._kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
