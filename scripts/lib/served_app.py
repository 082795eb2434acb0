"""A server within this process, for scripts that look at its parts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jaxserve.settings.config import EngineConfig


@asynccontextmanager
async def served_app(engine: EngineConfig) -> AsyncIterator[tuple[Any, int, asyncio.Future[None]]]:
    """Serve a model until the block ends, or a signal comes.

    Yields:
        The model, the port, and a future that is done when the server has ended.
    """
    # Imported here: clients in processes of their own do without JAX.
    from jaxserve.commands.server import StartOutput, load_models
    from jaxserve.server.http.app import App
    from jaxserve.server.http.listener import bind
    from jaxserve.server.http.process import Process
    from jaxserve.server.served.specs import ModelSpec
    from jaxserve.server.settings import ServerConfig

    settings = ServerConfig(port=0)
    models = load_models([ModelSpec(["bench"], "bench", engine)], settings, StartOutput(sys.stderr))
    process = Process(App(models, settings))
    try:
        with bind("127.0.0.1", 0) as listener:
            serving = asyncio.ensure_future(process.serve(sockets=[listener]))
            while not process.started:
                await asyncio.sleep(0.01)
            yield models.all[0], listener.getsockname()[1], serving
            process.handle_exit(15, None)
            await serving
    finally:
        models.close()
