"""Answers as documents or server-sent events, which stop their work if the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.api.generation import Choice, ChoicePart, Generation
from jaxserve.server.schema.errors import ApiError, as_api_error
from jaxserve.server.schema.generate import GenerateRequest
from jaxserve.server.schema.logprobs import TokenTexts
from jaxserve.server.schema.openai import PromptLogprobs, Sampling, Usage

T = TypeVar("T")
# Writes a part of a body past ASGI, which is faster. Returns False if ASGI has to be used.
Write = Callable[[bytes], Awaitable[bool]]
JSON = "application/json"
# Answers with the log-probabilities of more tokens are formatted on another thread.
INLINE_LOGPROBS = 256
_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """Exception for a client that has disconnected, so that no answer can reach it."""


def encode(value: Any) -> bytes:
    """Return a msgspec Struct or a plain Python value, encoded as JSON bytes."""
    return _encoder.encode(value)


def event(value: Any, name: str | None = None) -> bytes:
    """Return the bytes of a server-sent event, with a value as JSON data.

    Args:
        value: a msgspec Struct or a plain Python value.
        name: name of the event, or None for an event without a name.
    """
    head = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
    return b"%b%b\n\n" % (head, _encoder.encode(value))


DONE = b"data: [DONE]\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, JSON)


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


class ResponseFormatter:
    """Base of formatters of an endpoint's answers, as one JSON document or as stream events."""

    def whole(self, generation: Generation) -> Any:
        """Return the answer of a finished generation as a value that is encoded as JSON."""
        raise NotImplementedError

    def opening(self, generation: Generation) -> bytes:
        """Return the bytes of the stream's events before the first parts, by default none."""
        return b""

    def parts(self, generation: Generation, parts: list[ChoicePart]) -> bytes:
        """Return the bytes of the events for new parts of choices, b"" for no event."""
        return b"".join([self._part(generation, part) for part in parts])

    def _part(self, generation: Generation, part: ChoicePart) -> bytes:
        raise NotImplementedError

    def closing(self, generation: Generation) -> bytes:
        """Return the bytes of the stream's events after the last part of a generation."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """Return the bytes of the events that end a stream with an error."""
        return event(error.body()) + DONE


class ChoiceFormatter(ResponseFormatter):
    """Base of formatters in OpenAI's form: choices, and the usage if `stream_options` request it.

    Args:
        body: the request, which selects the optional fields.
        tokenizer: spells tokens in log-probabilities. None for a model without a tokenizer.
        answer_id: id of the answer.
        shows_prompt: whether the answer has log-probabilities of its prompt. The events of a choice
            are held back until these have arrived.
    """

    def __init__(
        self,
        body: Sampling | GenerateRequest,
        tokenizer: Any,
        answer_id: str,
        shows_prompt: bool = False,
    ) -> None:
        self._id = answer_id
        self._ids = bool(body.return_token_ids)
        as_ids = isinstance(body, Sampling) and bool(body.return_tokens_as_token_ids)
        self._texts = TokenTexts(tokenizer, as_ids)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = self._usage and bool(options and options.continuous_usage_stats)
        self._sent: list[int] = []  # number of tokens sent of each choice
        self._shows_prompt = shows_prompt
        self._held: list[ChoicePart] = []  # parts that wait for the log-probabilities of a prompt

    def _response(self, generation: Generation, choices: list) -> Any:
        raise NotImplementedError

    def _used(self, generation: Generation, sent: list[int] | None = None) -> Usage:
        return generation.usage(sent)

    def _event(self, generation: Generation, choices: list) -> Any:
        response = self._response(generation, choices)
        if self._continuous:
            response.usage = self._used(generation, self._sent)
        elif self._usage:
            response.usage = None
        return response

    def opening(self, generation: Generation) -> bytes:
        self._sent = [0] * len(generation.choices)
        return b""

    def parts(self, generation: Generation, parts: list[ChoicePart]) -> bytes:
        if self._shows_prompt:
            waiting, self._held, parts = self._held + parts, [], []
            for part in waiting:
                prompt = generation.choices[part.index].prompt
                is_ready = generation.prompt_logprobs[prompt] is not None
                (parts if is_ready else self._held).append(part)
        events = []
        for part in parts:
            self._sent[part.index] += len(part.token_ids)
            events.append(self._part(generation, part))
        return b"".join(events)

    def _of_prompt(
        self, generation: Generation, choice: Choice, width: int | None
    ) -> PromptLogprobs | None:
        scores = generation.prompt_logprobs[choice.prompt]
        return self._texts.prompt(choice.prompt_token_ids, scores, width)

    def closing(self, generation: Generation) -> bytes:
        if not self._usage:
            return DONE
        response = self._response(generation, [])
        response.usage = self._used(generation)
        response.metrics = generation.timing()
        return event(response) + DONE


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The body of the request must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, or cancel it if the client disconnects.

    Args:
        receive: ASGI receive function of the request, whose body must have been read.
        work: the coroutine.

    Raises:
        ClientGone: the client disconnected.
        Exception: any exception of `work`.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def respond(
    request: Request, generation: Generation, formatter: ResponseFormatter, stream: bool
) -> Response:
    """Return the HTTP response for a generation that has not been started.

    Args:
        request: the HTTP request.
        generation: the completions of the request.
        formatter: makes the document or the events of the answer.
        stream: True for a stream of events, which starts the generation when it is sent. Otherwise
            the generation is run to its end, for one JSON document.

    Raises:
        ClientGone: the client disconnected before the document was complete.
        ApiError, InvalidRequest, Overloaded: as `Generation`. A stream reports them itself.
    """
    generation.follow(request.headers, request.scope["jaxserve.request_id"])
    if stream:
        return EventStream(generation, formatter)

    async def work() -> Response:
        with generation:
            await generation.run()
            if generation.num_logprobs <= INLINE_LOGPROBS:
                return json_response(formatter.whole(generation))
            return json_response(await asyncio.to_thread(formatter.whole, generation))

    return await while_connected(request.receive, work())


class EventResponse(Response):
    """Base of responses of server-sent events, without a Content-Length header."""

    def __init__(self) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"

    async def start(self, send: Send) -> None:
        """Send the response's status and headers to the client."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})


class EventStream(EventResponse):
    """Streaming response of a generation's events. Sending it runs the generation.

    The status is sent with the first tokens, so that a request that fails earlier gets the status
    of its error.
    """

    def __init__(self, generation: Generation, formatter: ResponseFormatter) -> None:
        super().__init__()
        self._generation = generation
        self._formatter = formatter
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation, and send its events to the client as tokens arrive.

        An error ends the stream with an event, or is the whole answer before the first token.

        Raises:
            ClientGone: the client disconnected.
            Exception: an internal error, raised after the client got its status.
        """
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        formatter = self._formatter
        write: Write | None = scope.get("jaxserve.write")
        try:
            with self._generation as generation:
                parts = await generation.take()
                self._is_started = True
                await self.start(send)
                await send_body(send, await self._first_events(parts))
                events = b""
                while not generation.is_finished:
                    if events and not (write and await write(events)):
                        await send_body(send, events)
                    events = formatter.parts(generation, await generation.take())
                # One message for the last tokens and the end.
                await send_body(send, events + formatter.closing(generation), more=False)
        except Exception as error:
            problem = as_api_error(error, scope.get("jaxserve.renamed"))
            if self._is_started:
                await send_body(send, formatter.failure(problem), more=False)
            else:
                await error_response(problem)(scope, receive, send)
            if problem.status == 500 and not isinstance(error, ApiError):
                raise

    async def _first_events(self, parts: list[ChoicePart]) -> bytes:
        generation, formatter = self._generation, self._formatter
        opening = formatter.opening(generation)
        if generation.num_logprobs <= INLINE_LOGPROBS:
            return opening + formatter.parts(generation, parts)
        return opening + await asyncio.to_thread(formatter.parts, generation, parts)


async def send_body(send: Send, body: bytes, more: bool = True) -> None:
    """Send a part of an answer's body. An empty part is sent only as the last (`more` is False)."""
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})
