"""ChatCalls: messages and tool calls of answers in the form of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.server.api.generation import ChoicePart
from jaxserve.server.schema.openai import AnsweredCall, AnswerMessage, ChatDelta, FunctionCall
from jaxserve.server.schema.tools import CallDelta, CustomCall, CustomDelta, FunctionDelta, Tool
from jaxserve.server.tool_calls.answer_parts import Call, CallPart, Message, Thought
from jaxserve.server.tool_calls.custom_tools import CustomInput


class ChatCalls:
    """Converter of messages and tool calls to the chat API's form, for one request's answer.

    Args:
        tools: the request's tools. Calls of custom tools hold a text instead of JSON arguments.
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._custom = {tool.function.name for tool in tools if tool.type == "custom"}
        self._inputs: dict[tuple[int, int], CustomInput] = {}  # by choice and call

    def answer(self, message: Message) -> AnswerMessage:
        """Return a complete message, with its reasoning and tool calls, in the chat API's form."""
        answer = AnswerMessage(message.content)
        if message.calls:
            answer.content = message.content or None
            answer.tool_calls = [self._call(call) for call in message.calls]
        if message.reasoning:
            answer.reasoning = answer.reasoning_content = message.reasoning
        return answer

    def _call(self, call: Call) -> AnsweredCall:
        if call.name not in self._custom:
            function = FunctionCall(name=call.name, arguments=call.arguments)
            return AnsweredCall(id=call.id, function=function)
        reader = CustomInput()
        text = reader.feed(call.arguments) + reader.finish()
        custom = CustomCall(name=call.name, input=text)
        return AnsweredCall(id=call.id, type="custom", custom=custom)

    def delta(self, part: ChoicePart) -> ChatDelta:
        """Return a part of a choice as a chat delta, with one entry for each changed tool call.

        The last part of a choice also completes the texts of its calls of custom tools.
        """
        delta = ChatDelta()
        calls: dict[int, CallDelta] = {}
        for piece in part.pieces:
            if isinstance(piece, CallPart):
                self._add(part.index, calls, piece)
            elif isinstance(piece, Thought):
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + piece.text
            else:
                delta.content = (delta.content or "") + piece.text
        if part.finish_reason:
            for key in [key for key in self._inputs if key[0] == part.index]:
                if rest := self._inputs.pop(key).finish():
                    _add_input(calls.setdefault(key[1], CallDelta(key[1])), rest)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta

    def _add(self, choice: int, calls: dict[int, CallDelta], piece: CallPart) -> None:
        """Add a part of a tool call to the entries of a delta.

        A call of a custom tool gets an entry only for its first part or new text.

        Args:
            choice: number of the choice.
            calls: entries of the delta by the number of the call, which are changed.
            piece: the part of the call.
        """
        key = (choice, piece.index)
        if piece.id is not None and piece.name in self._custom:
            self._inputs[key] = CustomInput()
        text = self._inputs[key].feed(piece.arguments) if key in self._inputs else None
        if text == "" and piece.id is None:
            return
        call = calls.setdefault(piece.index, CallDelta(piece.index))
        if piece.id is not None:
            call.id, call.type = piece.id, "function" if text is None else "custom"
        if text is not None:
            _add_input(call, text, piece.name)
            return
        call.function = call.function or FunctionDelta(piece.name, "")
        call.function.arguments = (call.function.arguments or "") + piece.arguments


def _add_input(call: CallDelta, text: str, name: str | None = None) -> None:
    call.custom = call.custom or CustomDelta(name)
    call.custom.input = (call.custom.input or "") + text
