"""The process: signals, the end of it, and the check that its engines live."""

from __future__ import annotations

import logging
import time
from functools import partial
from types import FrameType

import uvicorn

from jaxserve.server.app import App
from jaxserve.server.connection import Connection
from jaxserve.server.errors import ApiError

_log = logging.getLogger(__name__)
# What is left of a request's end when all of them have been ended: its last bytes.
FAREWELL_SECONDS = 1.5


class Process(uvicorn.Server):
    """A server that stops in order.

    The first SIGTERM or interrupt drains: new work is refused with 503, running requests go on
    until `drain_timeout`, then end with an error. A second one ends them at once. An engine that
    dies ends the process.

    Attributes:
        status: exit status for the process, once `serve` has returned.
    """

    def __init__(self, app: App) -> None:
        limits = app.config
        super().__init__(
            uvicorn.Config(
                app.asgi,
                host=limits.host,
                port=limits.port,
                http=partial(Connection, limits=limits),  # type: ignore[arg-type]
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=FAREWELL_SECONDS,  # type: ignore[arg-type]
            )
        )
        self.status = 0
        self._served = app
        self._num_signals = 0
        self._deadline = 0.0
        self._is_first_tick = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._served.lifecycle.is_draining = True
            self._deadline = time.monotonic() + self._served.config.drain_timeout

    async def on_tick(self, counter: int) -> bool:
        await super().on_tick(counter)
        dead = [m.name for m in self._served.models.all if not m.llm.thread.is_alive()]
        if dead:
            _log.critical("the engine of %s has ended", ", ".join(dead))
            self.status = 1
            return True
        if not self._num_signals:
            return False
        self._close_idle()
        active = [one for model in self._served.models.all for one in model.active]
        late = self._num_signals > 1 or time.monotonic() > self._deadline
        if active and not late:
            return False
        for generation in active:
            generation.fail(ApiError(503, "the server is stopping", code="shutting_down"))
        return True

    def _close_idle(self) -> None:
        """Once the server drains: end idle connections now, and the others after their answers.

        Those that come later are told by a header of their answers.
        """
        if self._is_first_tick:
            self._is_first_tick = False
            for connection in list(self.server_state.connections):
                connection.shutdown()
