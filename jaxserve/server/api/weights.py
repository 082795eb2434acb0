"""Endpoints that update the weights of a model, pause it and let it sleep, with vLLM's names.

They are served with `enable_weight_updates`, which requires an API key. A server of several models
needs `?model=`. Each endpoint raises ApiError 404 without the setting, and InvalidRequest if an
argument of the query is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import CheckpointError, InvalidRequest, UnsupportedModel
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.query import Query
from jaxserve.server.api.streaming import json_response
from jaxserve.server.api.upload import body_pieces
from jaxserve.server.schema import weights as schema
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.served.weight_update import WeightUpdate
from jaxserve.server.settings import ServerConfig
from jaxserve.weights.checkpoint import Checkpoint, open_checkpoint
from jaxserve.weights.safetensors import read_header

_log = logging.getLogger(__name__)
MODES = ("keep", "wait", "abort")
# Bytes of a body that are written to the disk at a time.
_PIECE_BYTES = 1 << 20
_SUFFIX = ".upload"
_HOW = (
    "POST /start_weight_update, then to /update_weights the bytes of safetensors files "
    '(application/octet-stream) or {"model_path": ...}, then POST /finish_weight_update'
)


def _model(request: Request) -> ServedModel:
    served = request.app.state.served
    config: ServerConfig = served.config
    if not config.enable_weight_updates:
        path = request.scope["path"]
        message = f"{path} is not served: it is with --enable-weight-updates and an --api-key"
        raise ApiError(404, message, code="not_supported")
    models: Models = served.models
    name = request.query_params.get("model")
    if name is None and len(models.all) > 1:
        names = ", ".join(model.name for model in models.all)
        raise InvalidRequest(f"model is missing: the server has {names}", "model")
    return models.find(name)


async def pause(request: Request) -> Response:
    """Endpoint `POST /pause`: start no further request until `POST /resume`.

    `?mode=` is "abort" (the default, as in vLLM), "wait" or "keep", see `AsyncLLM.pause`. The
    answer to "wait" comes after the running requests.
    """
    model, query = _model(request), Query(request)
    older = "wait" if query.flag("wait_for_inflight_requests") else "abort"
    await model.llm.pause(query.choice("mode", MODES) or older)  # type: ignore[arg-type]
    return json_response(schema.EngineStatus("paused"))


async def resume(request: Request) -> Response:
    """Endpoint `POST /resume`: continue after `POST /pause`."""
    await _model(request).llm.resume()
    return json_response(schema.EngineStatus("resumed"))


async def is_paused(request: Request) -> Response:
    """Endpoint `GET /is_paused`: answer whether the model is paused or sleeps."""
    return json_response(schema.IsPaused(_model(request).llm.is_paused))


async def sleep(request: Request) -> Response:
    """Endpoint `POST /sleep`: free the cache and the weights until `POST /wake_up`.

    `?level=` is 1 or 2, and `?mode=` one of the modes of `POST /pause`, see `AsyncLLM.sleep`. A
    started weight update is discarded.
    """
    model, query = _model(request), Query(request)
    level = query.integer("level", 1, 1, 2)
    await model.weight_update.sleep(level, query.choice("mode", MODES) or "abort")  # type: ignore[arg-type]
    return json_response(schema.EngineStatus("sleeping"))


async def wake_up(request: Request) -> Response:
    """Endpoint `POST /wake_up`: restore weights and cache after `POST /sleep`, and serve.

    Raises:
        InvalidRequest: `?tags=` names only the weights or only the cache.
        ApiError: 500, the model's files cannot be read again. The model sleeps on.
    """
    model, tags = _model(request), set(request.query_params.getlist("tags"))
    if tags and not tags >= {"weights", "kv_cache"}:
        raise InvalidRequest(
            "tags must name both weights and kv_cache, which wake up together; leave it out", "tags"
        )
    try:
        await model.llm.wake_up()
    except (CheckpointError, UnsupportedModel) as error:
        _log.error("the weights cannot be placed again: %s", error)
        message = "the weights of the model cannot be read again; the server's log has the reason"
        raise ApiError(500, message, code="unreadable_weights") from error
    return json_response(schema.EngineStatus("awake"))


async def is_sleeping(request: Request) -> Response:
    """Endpoint `GET /is_sleeping`: answer whether the model sleeps."""
    return json_response(schema.IsSleeping(_model(request).llm.is_asleep))


async def world_size(request: Request) -> Response:
    """Endpoint `GET /get_world_size`: answer with the number of devices of tensor parallelism."""
    return json_response(schema.WorldSize(_model(request).llm.config.tensor_parallel_size))


async def init_transfer(request: Request) -> Response:
    """Endpoint `POST /init_weight_transfer_engine`: accept an empty `init_info`.

    Raises:
        InvalidRequest: `init_info` is not empty. The message says how weights are updated.
    """
    _model(request)
    if _has_body(request) and EndpointRequest(request).parse(schema.InitTransferRequest).init_info:
        raise InvalidRequest(
            f"init_info: weights are not received over NCCL or by CUDA handles: {_HOW}", "init_info"
        )
    return json_response(schema.WeightsMessage("No weight transfer engine is needed"))


async def start_update(request: Request) -> Response:
    """Endpoint `POST /start_weight_update`: start an update of the model's weights.

    Raises:
        ApiError: 409, an update is in progress, which only `?restart=true` discards.
    """
    await _model(request).weight_update.start(Query(request).flag("restart"))
    return json_response(schema.WeightsMessage("Weight update started"))


async def update_weights(request: Request) -> Response:
    """Endpoint `POST /update_weights`: stage tensors for the started update.

    The body is a safetensors file (`application/octet-stream`), or JSON with a `model_path` below
    the folder of the setting `weights_root`. A refused call ends the update.

    Raises:
        ApiError: 409, no update was started. 413, the tensors take more bytes than the model has.
            400, a tensor is invalid, or the path is.
    """
    update = _model(request).weight_update
    if "jaxserve.body" in request.scope:
        body = EndpointRequest(request).parse(schema.UpdateWeightsRequest)
        if body.update_info is not None:
            raise InvalidRequest(f"update_info is not supported: {_HOW}", "update_info")
        root: str | None = request.app.state.served.config.weights_root
        async with update.adding():
            folder, name = await asyncio.to_thread(folder_below, root, body.model_path)
            await _add(update, folder, name, open_checkpoint, root)
    else:
        async with update.adding(), _received(request, update) as path:
            await _add(update, path, "body", _opened)
    return json_response(schema.WeightsMessage("Weights updated"))


async def finish_update(request: Request) -> Response:
    """Endpoint `POST /finish_weight_update`: use the staged tensors between two steps.

    `?version=`, or `weight_version` of the body, names the weights. `?running=` is "recompute" (the
    default), "keep" or "abort", see `AsyncLLM.update_weights`. The answer has the version.

    Raises:
        ApiError: 409, no update was started.
    """
    model, version = _model(request), request.query_params.get("version")
    running = Query(request).choice("running", ("recompute", "keep", "abort")) or "recompute"
    if version is None and _has_body(request):
        version = EndpointRequest(request).parse(schema.FinishUpdateRequest).weight_version
    version = await model.weight_update.finish(version, running)  # type: ignore[arg-type]
    return json_response(schema.WeightsMessage("Weight update finished", version))


def _has_body(request: Request) -> bool:
    return bool(request.scope.get("jaxserve.body"))


async def _add(
    update: WeightUpdate,
    path: Path,
    name: str,
    opened: Callable[[Path], Checkpoint],
    root: str | None = None,
) -> None:
    with _refusing(path, name, root):
        await update.add(await asyncio.to_thread(opened, path))


@contextmanager
def _refusing(path: Path, name: str, root: str | None) -> Iterator[None]:
    """Context manager in which errors of tensors become errors with status 400.

    Args:
        path: the path that the messages of errors have.
        name: the name that clients know, which replaces the path.
        root: value of the setting `weights_root`, which clients do not know, or None.
    """
    try:
        yield
    except (CheckpointError, InvalidRequest, UnsupportedModel) as error:
        text = " ".join(str(error).replace(str(path), name).split())
        if root is not None:  # links are named by their targets
            text = text.replace(os.path.join(os.path.realpath(root), ""), "")
        if path.suffix == _SUFFIX:
            text = text.replace(path.name, name)
        raise ApiError(400, text, code="invalid_weights") from error


def _opened(path: Path) -> Checkpoint:
    return Checkpoint(path, {entry.name: entry for entry in read_header(path)})


@asynccontextmanager
async def _received(request: Request, update: WeightUpdate) -> AsyncIterator[Path]:
    """Context manager that writes a request's body to a temporary file, and yields its path."""
    update.check_room(int(request.headers.get("content-length", "0")))
    seconds: float = request.app.state.served.config.body_timeout
    with tempfile.NamedTemporaryFile(prefix="jaxserve-", suffix=_SUFFIX) as file:
        waiting = bytearray()
        async for data in body_pieces(request, seconds):
            update.count(len(data))
            waiting += data
            if len(waiting) >= _PIECE_BYTES:
                await asyncio.to_thread(file.write, waiting)
                waiting = bytearray()
        file.write(waiting)
        file.flush()
        yield Path(file.name)


def folder_below(root: str | None, name: str | None) -> tuple[Path, str]:
    """Return a checkpoint's folder below the folder `root`, without symbolic links, and its name.

    Args:
        root: value of the setting `weights_root`.
        name: path of the folder, relative to `root` or absolute.

    Raises:
        InvalidRequest: there is no root or no name, there is no such folder, or the folder or one
            of its files is outside of the root.
    """
    field = "model_path"
    if root is None:
        raise InvalidRequest(
            f"{field} is not supported: start the server with --weights-root FOLDER", field
        )
    if name is None:
        raise InvalidRequest(f"{field} is missing: {_HOW}", field)
    base = Path(os.path.realpath(root))
    try:
        path = Path(os.path.realpath(base / name))
        files = [*path.iterdir()] if path.is_relative_to(base) else []
        files = [file for file in files if not file.is_dir()]
        outside = [file for file in (path, *files) if not _is_below(file, base)]
    except (OSError, ValueError):
        raise InvalidRequest(f"{field}: there is no folder {name[:200]!r}", field) from None
    if outside:
        what = "" if outside[0] is path else f"{outside[0].name[:80]!r} in "
        raise InvalidRequest(f"{field}: {what}{name[:200]!r} is outside of --weights-root", field)
    return path, name


def _is_below(path: Path, base: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(base)
