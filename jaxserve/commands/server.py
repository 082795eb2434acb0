"""Implementation of `jaxserve serve`: load the models, and answer requests until a signal."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Iterable

from jaxserve.commands.start_output import StartOutput, Stop, at_length, summary
from jaxserve.server import page
from jaxserve.server.http.app import App
from jaxserve.server.http.listener import make_room
from jaxserve.server.http.logs import log_json
from jaxserve.server.http.process import Process
from jaxserve.server.kept.files import FileStore
from jaxserve.server.served.models import Models
from jaxserve.server.served.request_trace import open_tracer
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.served.start import start_models
from jaxserve.server.settings import ServerConfig


def load_models(specs: Iterable[ModelSpec], config: ServerConfig, output: StartOutput) -> Models:
    """Load the models of a server in turn, report each on the terminal, and return them as Models.

    Raises:
        CheckpointError, UnsupportedModel, ValueError: see `start.start.load`.
    """
    describe = at_length if output.is_verbose else summary
    return start_models(specs, config, output.say, output.progress, describe)


def serve(
    specs: Iterable[ModelSpec],
    config: ServerConfig,
    listener: socket.socket,
    is_verbose: bool = False,
) -> int:
    """Load models and answer HTTP requests in this process until SIGTERM or an interrupt.

    Args:
        listener: the bound socket of the server.

    Returns:
        The exit status: 0 after an orderly end, 1 if an engine failed.

    Raises:
        CheckpointError, UnsupportedModel, ValueError: a model cannot be loaded
            (`start.start.load`), or the limit of open files is too low (`make_room`).
    """
    log_json()
    stop = Stop()
    output = StartOutput(sys.stderr, stop, is_verbose)
    tracer = open_tracer(config.otlp_traces_endpoint)
    files = None if config.files_dir is None else FileStore(config)
    models = load_models(specs, config, output)
    for model in models.all:
        model.tracer = tracer
    try:
        room = make_room(config.max_connections)
    except ValueError:
        models.close()
        raise
    if room.connections < config.max_connections:
        output.say(
            f"warning: {room.connections} connections are served at once, not the "
            f"{config.max_connections} of --max-connections: the limit of open files is "
            f"{room.limit} (ulimit -n)"
        )
    process = Process(App(models, config, page.routes(), page.OPEN_PATHS, files), room)
    # The objects of the start stay alive. Without freezing, collections that visit them would
    # delay every stream.
    gc.collect()
    gc.freeze()
    try:
        stop.check()
        asyncio.run(_serve(process, listener, config, output))
    finally:
        models.close()
        if tracer is not None:
            tracer.close()
    return process.status


def _address(listener: socket.socket, config: ServerConfig) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "http" if config.ssl_certfile is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _serve(
    process: Process, listener: socket.socket, config: ServerConfig, output: StartOutput
) -> None:
    running = asyncio.ensure_future(process.serve(sockets=[listener]))
    while not (process.started or running.done()):
        await asyncio.sleep(0.01)
    if process.started:
        output.say(f"ready at {_address(listener, config)}")
    await running
