"""`jaxserve serve`: load the models, then answer until told to stop."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import sys
from collections.abc import Iterable

from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.engine import Engine
from jaxserve.server import page
from jaxserve.server.http.app import App
from jaxserve.server.http.logs import log_json
from jaxserve.server.http.open_files import make_room
from jaxserve.server.http.process import Process
from jaxserve.server.http.start_report import StartReport, Stop
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.settings import ServerConfig


def load_models(plans: Iterable[ModelSpec], config: ServerConfig, report: StartReport) -> Models:
    """Load one model after the other, saying what is done and what memory each takes.

    Raises:
        CheckpointError, UnsupportedModel, ValueError: see `engine.loading.load`.
    """
    secret = secrets.token_bytes(32)
    served: list[ServedModel] = []
    try:
        for plan in plans:
            name = plan.names[0]
            report.say(f"loading {name}" + ("" if plan.root == name else f" from {plan.root}"))
            llm = AsyncLLM(plan.config, report.progress)
            served.append(ServedModel(plan.names, plan.root, llm, config, secret))
            report.say(_memory_plan(llm))
            report.say(f"{llm.thread.engine.loaded.start}")
    except BaseException:
        for model in served:
            model.llm.close()
        raise
    return Models(served)


def _memory_plan(llm: AsyncLLM) -> str:
    engine = llm.thread.engine
    runner, config = engine.runner, engine.config
    pages = runner.num_pages
    kept = "float8_e4m3fn" if config.kv_cache_dtype == "fp8" else runner.kv_dtype.name
    return (
        f"memory: weights {runner.weight_bytes:,} bytes{_how(engine)}; "
        f"KV cache in {kept}, {pages:,} pages x "
        f"{runner.page_bytes:,} = {pages * runner.page_bytes:,} bytes "
        f"({(pages - 1) * config.block_size:,} tokens); temporaries of a step at most "
        f"{_temporary_bytes(engine):,} bytes; at most {config.max_num_seqs} sequences "
        f"of {engine.limits.max_model_len:,} tokens"
    )


def _how(engine: Engine) -> str:
    """How the blocks' weights are stored, where they are quantized."""
    stored = engine.runner.model_config.quantization
    form = stored.method if stored is not None else engine.config.quantization
    return "" if form is None else f" (blocks in {form})"


def serve(plans: Iterable[ModelSpec], config: ServerConfig, listener: socket.socket) -> int:
    """Serve until SIGTERM or an interrupt.

    Args:
        plans: what to serve.
        config: the limits.
        listener: from `listener.bind`.

    Returns:
        The exit status: 0 after an orderly end, 1 where an engine died.

    Raises:
        CheckpointError, UnsupportedModel, ValueError: see `engine.loading.load`, `make_room`.
    """
    log_json()
    stop = Stop()
    report = StartReport(sys.stderr, stop)
    models = load_models(plans, config, report)
    try:
        room = make_room(config.max_connections)
    except ValueError:
        models.close()
        raise
    if room.connections < config.max_connections:
        report.say(
            f"warning: {room.connections} connections are served at once, not the "
            f"{config.max_connections} of --max-connections: the limit of open files is "
            f"{room.limit} (ulimit -n)"
        )
    process = Process(App(models, config, page.routes(), page.OPEN_PATHS), room)
    # What is alive now stays: a collection that walked it would hold up every stream.
    gc.collect()
    gc.freeze()
    try:
        stop.check()
        asyncio.run(_serve(process, listener, report))
    finally:
        models.close()
    return process.status


async def _serve(process: Process, listener: socket.socket, report: StartReport) -> None:
    running = asyncio.ensure_future(process.serve(sockets=[listener]))
    while not (process.started or running.done()):
        await asyncio.sleep(0.01)
    if process.started:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        report.say(f"ready at http://{shown}:{port}")
    await running


def _temporary_bytes(engine: Engine) -> int:
    return 0 if engine.loaded.start is None else engine.loaded.start.temporary_bytes
