"""An answer goes out whole or as server-sent events, and work ends when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.api.generation import Generation, Part
from jaxserve.server.schema.errors import ApiError, as_api_error

T = TypeVar("T")
# Sends a piece of a body by a shorter way than ASGI's; False where there is none now.
Write = Callable[[bytes], Awaitable[bool]]
JSON = "application/json"
# An answer with the scores of more tokens is worded on a thread beside the loop.
INLINE_SCORES = 256
_encoder = msgspec.json.Encoder()


class ResponseFormatter(Protocol):
    """How an endpoint words a generation: as one document, or as events as it goes."""

    def whole(self, generation: Generation) -> Any:
        """The document, once the generation is finished."""
        ...

    def opening(self, generation: Generation) -> bytes:
        """Events before the first part."""
        ...

    def parts(self, generation: Generation, parts: list[Part]) -> bytes:
        """Events for what is new; possibly none."""
        ...

    def closing(self, generation: Generation) -> bytes:
        """Events after the last part."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream which failed."""
        ...


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def encode(value: Any) -> bytes:
    """JSON of Structs and plain values."""
    return _encoder.encode(value)


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
    return b"%b%b\n\n" % (head, _encoder.encode(value))


DONE = b"data: [DONE]\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, JSON)


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def disconnected(receive: Receive) -> None:
    """Wait until the client is gone; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work, or cancel it when the client goes away.

    Raises:
        ClientGone: it went away.
    """
    task = asyncio.ensure_future(work)
    gone: Awaitable[None] = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def respond(
    request: Request, generation: Generation, form: ResponseFormatter, stream: bool
) -> Response:
    """The answer to a request: a document, or a response that streams once it is called."""
    if stream:
        return EventStream(generation, form)

    async def work() -> Response:
        with generation:
            await generation.run()
            if generation.num_scored <= INLINE_SCORES:
                return json_response(form.whole(generation))
            return json_response(await asyncio.to_thread(form.whole, generation))

    return await while_connected(request.receive, work())


class EventStream(Response):
    """Streams a generation. Nothing is sent before the first tokens are there.

    So a request that fails before is answered with the status that it deserves.
    """

    def __init__(self, generation: Generation, form: ResponseFormatter) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._generation = generation
        self._form = form
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = self._form
        write: Write | None = scope.get("jaxserve.write")
        try:
            with self._generation as generation:
                parts = await generation.take()
                await self._start(send)
                body = form.opening(generation)
                if generation.num_scored <= INLINE_SCORES:
                    body += form.parts(generation, parts)
                else:
                    body += await asyncio.to_thread(form.parts, generation, parts)
                await _send(send, body)
                while not generation.is_finished:
                    body = form.parts(generation, await generation.take())
                    if generation.is_finished:
                        break
                    if body and not (write and await write(body)):
                        await _send(send, body)
                else:
                    body = b""
                await _send(send, body + form.closing(generation), more=False)
        except Exception as error:
            problem = as_api_error(error, scope.get("jaxserve.renamed"))
            if self._is_started:
                await _send(send, form.failure(problem), more=False)
            else:
                await error_response(problem)(scope, receive, send)
            if problem.status == 500 and not isinstance(error, ApiError):
                raise

    async def _start(self, send: Send) -> None:
        self._is_started = True
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})
