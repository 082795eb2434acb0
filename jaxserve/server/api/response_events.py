"""ResponsesFormatter: response objects of OpenAI's API, and the events of their streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec

from jaxserve.server.api.generation import Choice, ChoicePart, Generation
from jaxserve.server.api.streaming import ResponseFormatter, event
from jaxserve.server.schema import response_items as items
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.logprobs import TokenLogprob, TokenTexts
from jaxserve.server.schema.openai import PromptTokensDetails
from jaxserve.server.schema.response_tools import flat_name, seen_tools
from jaxserve.server.schema.responses import ResponsesRequest, conversation_id, wants_logprobs
from jaxserve.server.tool_calls.answer_parts import AnswerPart, CallPart, Content, Message, Thought
from jaxserve.server.tool_calls.custom_tools import CustomInput

# OpenAI's error codes of failed responses by HTTP status. Any other failure is a server_error.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponsesFormatter(ResponseFormatter):
    """Formatter of response objects of OpenAI's API, and of the events of their streams.

    The items of the output are the pieces of the answer in their order, with and without a stream.

    Args:
        body: the request, whose settings the response object repeats.
        tokenizer: spells tokens in log-probabilities.
        on_end: called with the complete response object.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        tokenizer: Any,
        on_end: Callable[[items.ResponsesResponse], None] = lambda response: None,
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer, False) if wants_logprobs(body) else None
        self._on_end = on_end
        tools = seen_tools(body.tools)
        self._custom = {flat_name(n, t.name or "") for n, t in tools if t.type == "custom"}
        # Maps names that the model sees to the client's namespace and name.
        self._grouped = {flat_name(n, t.name or ""): (n, t.name or "") for n, t in tools if n}
        self._pending: list[TokenLogprob] = []  # log-probabilities of tokens since the last text
        self.id = f"resp_{uuid4().hex}"
        self._number = 0
        self._events: list[bytes] = []
        self._generation: Generation | None = None
        self._items: list[items.OutputItem] = []
        self._is_open = False
        self._input = CustomInput()  # input of the open call of a custom tool

    def response(self, generation: Generation, status: str) -> items.ResponsesResponse:
        """Return the response object of a generation with this status and an empty output."""
        body, sampling = self._body, generation.requests[0].sampling
        reasoning, text = body.reasoning, body.text
        name = conversation_id(body)
        shown = msgspec.to_builtins(text) if text is not None else {}
        shown["format"] = shown.get("format") or {"type": "text"}
        return items.ResponsesResponse(
            id=self.id,
            created_at=generation.created,
            model=generation.model.name,
            status=status,
            output=[],
            background=bool(body.background),
            conversation=None if name is None else {"id": name},
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            safety_identifier=body.safety_identifier,
            service_tier=body.service_tier or "auto",
            store=body.store is not False,
            temperature=sampling.temperature,
            text=shown,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            weight_version=generation.weight_version,
        )

    def whole(self, generation: Generation) -> items.ResponsesResponse:
        choice = generation.choices[0]
        if not self._items:
            self._pending = self._logprobs(choice)
            for piece in _pieces(choice.message):
                self._piece(piece)
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        self._close(status)
        response = self.response(generation, status)
        if status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            response.completed_at = int(time.time())
        response.output = self._items
        response.usage = _usage(generation)
        if self._body.enable_response_messages:
            ids = choice.prompt_token_ids
            response.input_messages = [items.RawMessage(_spell(self._tokenizer, ids), ids)]
            ids = choice.token_ids
            response.output_messages = [items.RawMessage(_spell(self._tokenizer, ids), ids)]
        self._on_end(response)
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        encoded = event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)
        if self._body.background:
            self._events.append(encoded)
        return encoded

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        index = len(self._items) - 1
        item = self._items[index]
        if not isinstance(item, items.FunctionCallItem | items.CustomCallItem):
            fields["content_index"] = 0
        return self._event(kind, output_index=index, item_id=item.id, **fields)

    def opening(self, generation: Generation) -> bytes:
        self._generation = generation
        response = self.response(generation, "in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def queued(self, generation: Generation) -> items.ResponsesResponse:
        """Return the response object of a queued background response, and record its first events.

        The events are `response.created` and `response.queued`.
        """
        self._generation = generation
        response = self.response(generation, "queued")
        self._event("response.created", response=response)
        self._event("response.queued", response=response)
        return response

    def started(self, generation: Generation) -> items.ResponsesResponse:
        """Return the response object of a background response that now has tokens.

        The event `response.in_progress` is recorded.
        """
        response = self.response(generation, "in_progress")
        self._event("response.in_progress", response=response)
        return response

    def take_events(self) -> list[bytes]:
        """Return the events of a background response since the last call, each as bytes."""
        events, self._events = self._events, []
        return events

    def _logprobs(self, part: ChoicePart | Choice) -> list[TokenLogprob]:
        return self._texts.chat(part.token_ids, part.logprobs) if self._texts else []

    def _part(self, generation: Generation, part: ChoicePart) -> bytes:
        pieces = part.pieces
        self._pending += self._logprobs(part)
        if not pieces and self._pending and generation.choices[0].reader is None:
            pieces = [Content("")]
        return b"".join([self._piece(piece) for piece in pieces])

    def _piece(self, piece: AnswerPart) -> bytes:
        """Add a piece of the answer to the output items, and return the encoded events for it.

        The piece extends the open item or begins a new one.
        """
        opened = self._open(piece)
        item = self._items[-1]
        if isinstance(item, items.CustomCallItem) and isinstance(piece, CallPart):
            return opened + self._add_input(item, self._input.feed(piece.arguments))
        if isinstance(item, items.FunctionCallItem) and isinstance(piece, CallPart):
            item.arguments += piece.arguments
            delta = self._in_item("response.function_call_arguments.delta", delta=piece.arguments)
        elif isinstance(item, items.ReasoningItem) and isinstance(piece, Thought):
            item.content[0].text += piece.text
            delta = self._in_item("response.reasoning_text.delta", delta=piece.text)
        elif isinstance(item, items.OutputMessage) and isinstance(piece, Content):
            item.content[0].text += piece.text
            logprobs, self._pending = self._pending, []
            item.content[0].logprobs += logprobs
            delta = self._in_item("response.output_text.delta", delta=piece.text, logprobs=logprobs)
        else:
            raise AssertionError("a piece beside its item")
        return opened + delta

    def _add_input(self, item: items.CustomCallItem, text: str) -> bytes:
        item.input += text
        kind = "response.custom_tool_call_input.delta"
        return self._in_item(kind, delta=text) if text else b""

    def _open(self, piece: AnswerPart) -> bytes:
        """Begin a new output item for a piece of the answer unless it continues the open item.

        The item that was open is closed as completed.

        Returns:
            The encoded events, b"" if the piece continues the open item.
        """
        last = self._items[-1] if self._items and self._is_open else None
        if isinstance(piece, CallPart):
            if piece.id is None:
                return b""
        elif isinstance(
            last, items.ReasoningItem if isinstance(piece, Thought) else items.OutputMessage
        ):
            return b""
        closed = self._close("completed")
        item = self._new_item(piece)
        self._items.append(item)
        self._is_open = True
        shown, part = _blank(item)
        index = len(self._items) - 1
        added = self._event("response.output_item.added", output_index=index, item=shown)
        if part is None:
            return closed + added
        return closed + added + self._in_item("response.content_part.added", part=part)

    def _new_item(self, piece: AnswerPart) -> items.OutputItem:
        name = uuid4().hex
        namespace, tool = None, ""
        if isinstance(piece, CallPart):
            namespace, tool = self._grouped.get(piece.name or "", (None, piece.name or ""))
        if isinstance(piece, CallPart) and piece.name in self._custom:
            self._input = CustomInput()
            return items.CustomCallItem(
                id=f"ctc_{name}",
                call_id=piece.id or "",
                name=tool,
                input="",
                status="in_progress",
                namespace=namespace or msgspec.UNSET,
            )
        if isinstance(piece, CallPart):
            return items.FunctionCallItem(
                id=f"fc_{name}",
                call_id=piece.id or "",
                name=tool,
                arguments="",
                status="in_progress",
                namespace=namespace or msgspec.UNSET,
            )
        if isinstance(piece, Thought):
            content = [items.ReasoningText(text="")]
            return items.ReasoningItem(id=f"rs_{name}", content=content, status="in_progress")
        return items.OutputMessage(
            id=f"msg_{name}", content=[items.OutputText(text="")], status="in_progress"
        )

    def _close(self, status: str) -> bytes:
        """Close the open output item with this status, and return the encoded events.

        Without an open item, return b"".
        """
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item.status = status
        index = len(self._items) - 1
        if isinstance(item, items.CustomCallItem):
            done = self._add_input(item, self._input.finish())
            done += self._in_item("response.custom_tool_call_input.done", input=item.input)
        elif isinstance(item, items.FunctionCallItem):
            done = self._in_item(
                "response.function_call_arguments.done", arguments=item.arguments, name=item.name
            )
        elif isinstance(item, items.ReasoningItem):
            done = self._in_item("response.reasoning_text.done", text=item.content[0].text)
            done += self._in_item("response.content_part.done", part=item.content[0])
        else:
            text = item.content[0]
            logprobs = text.logprobs
            done = self._in_item("response.output_text.done", text=text.text, logprobs=logprobs)
            done += self._in_item("response.content_part.done", part=text)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def closing(self, generation: Generation) -> bytes:
        choice = generation.choices[0]
        # An empty answer is a message without text.
        empty = b"" if self._answers else self._open(Content(""))
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        closed = self._close(status)
        response = self.whole(generation)
        return empty + closed + self._event(f"response.{response.status}", response=response)

    @property
    def _answers(self) -> bool:
        return any(not isinstance(item, items.ReasoningItem) for item in self._items)

    def failure(self, error: ApiError) -> bytes:
        return self._event("response.failed", response=self.failed(error))

    def failed(self, error: ApiError) -> items.ResponsesResponse:
        """Return the response object with the status "failed", the error and the output so far.

        The open output item is closed as incomplete.
        """
        response = self.cancelled("failed")
        code = _CODES.get(error.status, "server_error")
        response.error = {"code": code, "message": error.message}
        return response

    def cancelled(self, status: str = "cancelled") -> items.ResponsesResponse:
        """Return the response object with this status and the output so far.

        The open output item is closed as incomplete. The response must have begun.
        """
        assert self._generation is not None
        response = self.response(self._generation, status)
        self._close("incomplete")
        response.output = self._items
        return response


def _pieces(message: Message) -> list[AnswerPart]:
    pieces: list[AnswerPart] = [Thought(message.reasoning)] if message.reasoning else []
    if message.content or not message.calls:
        pieces.append(Content(message.content))
    for index, call in enumerate(message.calls):
        pieces.append(CallPart(index, call.arguments, call.id, call.name))
    return pieces


def _blank(
    item: items.OutputItem,
) -> tuple[items.OutputItem, items.OutputText | items.ReasoningText | None]:
    if isinstance(item, items.FunctionCallItem | items.CustomCallItem):
        return item, None
    if isinstance(item, items.ReasoningItem):
        return items.ReasoningItem(id=item.id, content=[], status=item.status), items.ReasoningText(
            text=""
        )
    return items.OutputMessage(id=item.id, content=[], status=item.status), items.OutputText(
        text=""
    )


def _spell(tokenizer: Any, token_ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace")


def _usage(generation: Generation) -> items.ResponsesUsage:
    usage = generation.usage()
    prompt = usage.prompt_tokens_details or PromptTokensDetails(0)
    details = usage.completion_tokens_details
    return items.ResponsesUsage(
        usage.prompt_tokens,
        items.InputTokensDetails(prompt.cached_tokens, prompt.created_cache_tokens),
        usage.completion_tokens,
        items.OutputTokensDetails(details.reasoning_tokens if details else 0),
        usage.total_tokens,
    )
