"""Simplified forms of conversations, for chat templates that refuse the form that clients send."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.server.schema.decode import arguments_text

Messages = list[dict[str, Any]]
# A template that serializes arguments would escape the quote. Only one that prints them keeps it.
PROBE = '{"aaaa'
_PARAMETERS = {"type": "object", "properties": {}}
PROBE_TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": _PARAMETERS}}
]
# Mistral's templates require call ids of nine letters and digits.
_ID = "call{:05}"
_THOUGHTS = ("thinking", "reasoning_content")


def probe_messages() -> Messages:
    """Return a test conversation with one tool call, whose arguments are text instead of an object.

    The rendered text shows whether a chat template prints such arguments unchanged.
    """
    call = _call(_ID.format(0), "f", PROBE)
    result = {"role": "tool", "name": "f", "content": "a", "tool_call_id": call["id"]}
    return [{"role": "user", "content": "a"}, _calling(call), result]


def has_text_arguments(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether any tool call in a conversation has arguments as text instead of an object."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return any(isinstance(call["function"]["arguments"], str) for call in calls)


def with_texts(messages: Messages) -> Messages:
    """Return a copy of a conversation in which the arguments of all tool calls are JSON text."""
    return _with_arguments(messages, arguments_text)


def with_objects(messages: Messages) -> Messages:
    """Return a copy of a conversation in which the arguments of all tool calls are objects.

    Arguments that are text become {}.
    """
    return _with_arguments(
        messages, lambda arguments: {} if isinstance(arguments, str) else arguments
    )


def _with_arguments(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": list(map(changed, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def single_calls(messages: Sequence[dict[str, Any]]) -> Messages:
    """Return a conversation with at most one tool call per message, each followed by its result.

    A result without a call gets a new call, which joins the assistant message before it if there is
    one. Calls without a result remain.
    """
    singles: Messages = []
    waiting = _Waiting()
    names: dict[Any, str] = {}
    for message in messages:
        if message["role"] == "tool":
            singles.append(waiting.take(message) or _new_call(message, names, singles))
            singles.append(message)
            continue
        singles += waiting.take_all()
        calls = message.get("tool_calls") or []
        names.update((call.get("id"), call["function"]["name"]) for call in calls)
        if message["role"] == "assistant" and calls:
            waiting.add({**message, "tool_calls": calls[:1]})
            for call in calls[1:]:
                waiting.add(_calling(call))
        else:
            singles.append(message)
    return singles + waiting.take_all()


class _Waiting:
    """Messages with one tool call each, waiting for the result of the call.

    Finding the message for a result takes constant time.
    """

    def __init__(self) -> None:
        self._left: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._by_id: dict[Any, deque[int]] = defaultdict(deque)

    def add(self, message: dict[str, Any]) -> None:
        number = id(message)
        self._left[number] = message
        self._by_id[message["tool_calls"][0].get("id")].append(number)

    def take(self, result: dict[str, Any]) -> dict[str, Any] | None:
        """Remove and return the waiting message whose tool call has the id that a result names.

        Without such a message, return the oldest waiting message, or None if no message waits.
        """
        same = self._by_id[result.get("tool_call_id")]
        while same:
            if (number := same.popleft()) in self._left:
                return self._left.pop(number)
        return self._left.popitem(last=False)[1] if self._left else None

    def take_all(self) -> Messages:
        """Remove and return all waiting messages, the oldest first."""
        calls = list(self._left.values())
        self._left.clear()
        self._by_id.clear()
        return calls


def _new_call(result: dict[str, Any], names: dict[Any, str], singles: Messages) -> dict[str, Any]:
    # The call for a result replaces the answer before it in the list, if any.
    call_id = result.get("tool_call_id")
    name = result.get("name") or names.get(call_id) or "tool"
    message = _calling(_call(call_id or _ID.format(0), name, {}))
    is_answer = singles and singles[-1]["role"] == "assistant" and not singles[-1].get("tool_calls")
    return {**singles.pop(), "tool_calls": message["tool_calls"]} if is_answer else message


def _call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def plainer_histories(messages: Messages, reads_calls: bool) -> list[Messages]:
    """Return simplified forms of a conversation, for a chat template that refuses the conversation
    itself.

    The form closest to the original comes first. Llama's template accepts one tool call per
    message, Mistral's requires ids of nine characters, and Gemma's accepts only alternating user
    and assistant turns. The newest message is unchanged: a template that refuses it refuses the
    request.

    Args:
        reads_calls: True if the template renders tool calls. Otherwise calls and results become
            text.
    """
    newest, before = messages[-1], messages[-2] if len(messages) > 1 else {}
    is_wrong = before.get("role") == newest["role"] and not before.get("tool_calls")
    single = _numbered(single_calls(messages))
    if not reads_calls:
        return [_alternating(_in_words(single), newest if is_wrong else None)]
    turns = _alternating(_answered(single), newest if is_wrong else None)
    return [form for each in (single, turns) for form in (each, with_texts(each))]


def _numbered(messages: Messages) -> Messages:
    """Return a conversation of single tool calls with new ids, and with the tool's name in each
    result.
    """
    numbered: Messages = []
    number, name = 0, ""
    for message in messages:
        if message.get("tool_calls"):
            number += 1
            call = {**message["tool_calls"][0], "id": _ID.format(number)}
            message = {**message, "tool_calls": [call]}
            name = call["function"]["name"]
        elif message["role"] == "tool":
            message = {"name": name, **message, "tool_call_id": _ID.format(number)}
        numbered.append(message)
    return numbered


def _answered(messages: Messages) -> Messages:
    answered: Messages = []
    for message in messages:
        is_after_call = answered and (
            answered[-1]["role"] == "tool" or answered[-1].get("tool_calls")
        )
        if is_after_call and message["role"] == "user":
            answered.append({"role": "assistant", "content": ""})
        answered.append(message)
    return answered


def _in_words(messages: Messages) -> Messages:
    groups: list[Messages] = []
    is_result = False
    for message in messages:
        worded = _worded(message)
        if is_result and worded["role"] == "user":
            groups[-1].append(worded)
        else:
            groups.append([worded])
        is_result = message["role"] == "tool"
    return [_joined(group) for group in groups]


def _worded(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the call:\n{message['content']}"}
    if not message.get("tool_calls"):
        return message
    call = json.dumps(message["tool_calls"][0]["function"], ensure_ascii=False)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message["content"], call)))}


def _joined(group: Messages) -> dict[str, Any]:
    if len(group) == 1:
        return group[0]
    text = "\n\n".join(message["content"] for message in group if message["content"])
    return {**group[0], **group[-1], "content": text}


def _alternating(messages: Messages, apart: dict[str, Any] | None) -> Messages:
    """Return a conversation in which user and assistant turns alternate after one system message.

    Successive messages of the same role are joined.

    Args:
        apart: message that is not joined with the message before it, or None.
    """
    groups: list[Messages] = []
    if messages[-1]["role"] != "system":
        systems = [message for message in messages if message["role"] == "system"]
        messages = [message for message in messages if message["role"] != "system"]
        groups = [systems] if systems else []
    if len(messages) > 1 and messages[0]["role"] == "assistant":
        groups.append([{"role": "user", "content": ""}])
    for message in messages:
        last = groups[-1][-1] if groups else {}
        is_same = last.get("role") == message["role"] in ("user", "assistant")
        if is_same and not last.get("tool_calls") and message is not apart:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(group) for group in groups]


def harmony_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in the form that gpt-oss's chat template can render.

    The template renders one tool call per message, names only the result that follows the call, and
    refuses content beside thoughts and calls. So each call becomes a message of its own before its
    result, and the content of a message with a call is appended to its thoughts.
    """
    return [_with_thoughts(message) for message in single_calls(messages)]


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    fields = {key: value for key, value in message.items() if key not in _THOUGHTS}
    thoughts = "\n\n".join(filter(None, (message.get("thinking"), message.get("content"))))
    return {**fields, "content": "", **({"thinking": thoughts} if thoughts else {})}
