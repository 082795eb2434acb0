"""Process: the uvicorn server, its signals, its end, and the check that its engines live."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from jaxserve.server.http.app import App
from jaxserve.server.http.connection import Connection, Crowd
from jaxserve.server.http.listener import Listener, Room, allow_reuse, make_room, uvicorn_options
from jaxserve.server.http.refused_clients import RefusedClients
from jaxserve.server.schema.errors import ApiError

_log = logging.getLogger(__name__)
# Time for the last bytes of answers once all requests have been ended.
FAREWELL_SECONDS = 1.5
# Connections that wait in the kernel to be accepted.
_QUEUE = 2048
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class Process(uvicorn.Server):
    """uvicorn server of an application, which completes running requests before it stops.

    After the first SIGTERM or interrupt, new requests are refused with 503. Running requests go on
    until `drain_timeout` and then end with an error. A second signal ends them at once. The server
    also stops, with exit status 1, when the engine of a model has ended.

    Args:
        app: the application.
        room: the numbers of connections, by default as the limit of open files allows.
    """

    def __init__(self, app: App, room: Room | None = None) -> None:
        room = make_room(app.config.max_connections) if room is None else room
        limits = replace(app.config, max_connections=room.connections)
        super().__init__(
            uvicorn.Config(
                app.asgi,
                host=limits.host,
                port=limits.port,
                http=partial(  # type: ignore[arg-type]
                    Connection,
                    limits=limits,
                    crowd=Crowd(room.beyond),
                    refusals=app.early_refusals,
                ),
                backlog=room.beyond,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=FAREWELL_SECONDS,  # type: ignore[arg-type]
                **uvicorn_options(limits),
            )
        )
        self.status = 0  # exit status of the process, valid after `serve` has returned
        self._served = app
        self._limits = limits
        self._num_signals = 0
        self._deadline = 0.0
        self._is_first_tick = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen on sockets, as uvicorn does, and continue the unfinished batches.

        The kernel's queue of connections gets the length `_QUEUE`. Uvicorn's own `backlog` would
        set both this length and the number of connections accepted in one iteration of the event
        loop.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        if self.config.ssl is not None:
            # Asyncio's defaults are 60 and 30 seconds, and uvicorn does not change them.
            seconds = self._served.config.header_timeout
            limits = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": FAREWELL_SECONDS}
            loop.create_server = partial(loop.create_server, **limits)  # type: ignore[method-assign]
        for listener in sockets or []:
            allow_reuse(listener)
        self._refuse_early(sockets or [])
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_QUEUE)
        if self._served.batches is not None:
            self._served.batches.start()

    def _refuse_early(self, listeners: Iterable[socket.socket]) -> None:
        # Clients of a full queue are refused before they have a connection. With TLS a connection
        # is needed for the handshake.
        if self.config.ssl is not None:
            return
        make_connection = partial(
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        refusals = self._served.early_refusals
        clients = RefusedClients(refusals, self._limits, self.server_state, make_connection)
        for listener in listeners:
            if isinstance(listener, Listener):
                if listener.family != socket.AF_UNIX:  # accepted sockets inherit it
                    size = self._limits.send_buffer_bytes
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
                listener.take = clients.take

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # At the limit of open files, close idle connections. Asyncio pauses accepting for a second.
        if getattr(context.get("exception"), "errno", None) not in _NO_FILES:
            loop.default_exception_handler(context)
            return
        _log.warning("no file is left for a connection; idle ones are closed")
        for connection in list(self.server_state.connections):
            connection.close_idle()  # type: ignore[union-attr]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._served.lifecycle.is_draining = True
            self._deadline = time.monotonic() + self._served.config.drain_timeout

    async def on_tick(self, counter: int) -> bool:
        await super().on_tick(counter)
        dead = [m.name for m in self._served.models.all if not m.llm.is_alive()]
        if dead:
            _log.critical("the engine of %s has ended", ", ".join(dead))
            self.status = 1
            self._fail_stuck()
            return True
        if not self._num_signals:
            return False
        if self._served.batches is not None:
            await self._served.batches.stop()
        self._close_idle()
        active = [generation for model in self._served.models.all for generation in model.active]
        is_late = self._num_signals > 1 or time.monotonic() > self._deadline
        if active and not is_late:
            return False
        for generation in active:
            generation.fail(ApiError(503, "the server is stopping", code="shutting_down"))
        return True

    def _fail_stuck(self) -> None:
        # The thread of an engine that waits for a lost host cannot end its requests itself.
        for model in self._served.models.all:
            if (loss := model.llm.loss) is not None and not model.llm.has_ended():
                error = ApiError(503, f"the engine has ended: {loss}", code="engine_dead")
                for generation in list(model.active):
                    generation.fail(error)

    def _close_idle(self) -> None:
        # Once, when draining starts: idle connections are closed now, others after their answers.
        # Later connections are closed by a header of their answers.
        if self._is_first_tick:
            self._is_first_tick = False
            for connection in list(self.server_state.connections):
                connection.shutdown()
