"""Conversations in plainer forms, for chat templates that refuse what clients send back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.server.schema.arguments import arguments_text

Messages = list[dict[str, Any]]
# Text that only a template which prints arguments as they are leaves whole; JSON escapes the quote.
PROBE = '{"aaaa'
# Mistral's templates require ids of nine letters and digits.
_ID = "call{:05}"


def probe_messages() -> Messages:
    """Return a conversation that shows whether a template prints arguments that are text."""
    call = _call(_ID.format(0), "f", PROBE)
    result = {"role": "tool", "name": "f", "content": "a", "tool_call_id": call["id"]}
    return [{"role": "user", "content": "a"}, _calling(call), result]


def has_text_arguments(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether a call has arguments that are no object."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return any(isinstance(call["function"]["arguments"], str) for call in calls)


def with_texts(messages: Messages) -> Messages:
    """Return a conversation in which all arguments are text."""
    return _with_arguments(messages, arguments_text)


def with_objects(messages: Messages) -> Messages:
    """Return a conversation in which arguments that are no object are an empty one."""
    return _with_arguments(messages, lambda given: {} if isinstance(given, str) else given)


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
    """Return a conversation with one call in a message, each followed by its result.

    A result that belongs to no call gets one, in the message before it if that is an answer.
    """
    made: Messages = []
    waiting: Messages = []
    names: dict[Any, str] = {}
    for message in messages:
        if message["role"] == "tool":
            if waiting:
                made.append(_waiting_call(message, waiting))
            else:
                made.append(_new_call(message, names, made))
            made.append(message)
            continue
        made += waiting
        waiting = []
        calls = message.get("tool_calls") or []
        names.update((call.get("id"), call["function"]["name"]) for call in calls)
        if message["role"] == "assistant" and calls:
            first = {**message, "tool_calls": calls[:1]}
            waiting = [first, *(_calling(call) for call in calls[1:])]
        else:
            made.append(message)
    return made + waiting


def _waiting_call(result: dict[str, Any], waiting: Messages) -> dict[str, Any]:
    """Take the call of a result from those that wait: that with its id, or the first."""
    wanted = result.get("tool_call_id")
    ids = [message["tool_calls"][0].get("id") for message in waiting]
    return waiting.pop(ids.index(wanted) if wanted in ids else 0)


def _new_call(result: dict[str, Any], names: dict[Any, str], made: Messages) -> dict[str, Any]:
    """Return a message that calls for a result, the answer before it if there is one."""
    wanted = result.get("tool_call_id")
    name = result.get("name") or names.get(wanted) or "tool"
    message = _calling(_call(wanted or _ID.format(0), name, {}))
    is_answer = made and made[-1]["role"] == "assistant" and not made[-1].get("tool_calls")
    return {**made.pop(), "tool_calls": message["tool_calls"]} if is_answer else message


def _call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def plainer_histories(messages: Messages, reads_calls: bool) -> list[Messages]:
    """Return forms of a conversation that stricter templates render, the nearest first.

    Llama's template takes one call in a message, Mistral's ids of nine characters, Gemma's only
    turns of user and assistant that alternate. The newest message stays as it is: a template that
    refuses it refuses the request.

    Args:
        messages: that the template refuses.
        reads_calls: whether the template renders calls.
    """
    single = _numbered(single_calls(messages))
    if not reads_calls:
        return [_alternating(_in_words(single), messages[-1])]
    turns = _alternating(_answered(single), messages[-1])
    return [form for each in (single, turns) for form in (each, with_texts(each))]


def _numbered(messages: Messages) -> Messages:
    """Return single calls and their results with new ids, and each result with its name."""
    made: Messages = []
    number, name = 0, ""
    for message in messages:
        if message.get("tool_calls"):
            number += 1
            call = {**message["tool_calls"][0], "id": _ID.format(number)}
            message = {**message, "tool_calls": [call]}
            name = call["function"]["name"]
        elif message["role"] == "tool":
            message = {"name": name, **message, "tool_call_id": _ID.format(number)}
        made.append(message)
    return made


def _answered(messages: Messages) -> Messages:
    """Return a conversation with an empty answer between calls and what a user says next."""
    made: Messages = []
    for message in messages:
        is_after_call = made and (made[-1]["role"] == "tool" or made[-1].get("tool_calls"))
        if is_after_call and message["role"] == "user":
            made.append({"role": "assistant", "content": ""})
        made.append(message)
    return made


def _in_words(messages: Messages) -> Messages:
    """Return a conversation whose calls and results are text of the assistant and the user."""
    made: Messages = []
    is_result = False
    for message in messages:
        worded = _worded(message)
        if is_result and worded["role"] == "user":
            worded = _joined(made.pop(), worded)
        made.append(worded)
        is_result = message["role"] == "tool"
    return made


def _worded(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the call:\n{message['content']}"}
    if not message.get("tool_calls"):
        return message
    call = json.dumps(message["tool_calls"][0]["function"], ensure_ascii=False)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message["content"], call)))}


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    texts = filter(None, (first["content"], second["content"]))
    return {**first, **second, "content": "\n\n".join(texts)}


def _alternating(messages: Messages, newest: dict[str, Any]) -> Messages:
    """Return a conversation whose turns alternate, with one system message at its beginning.

    The newest message joins no other, since its place may be wrong.
    """
    systems = [message for message in messages if message["role"] == "system"]
    if systems and newest["role"] != "system":
        text = "\n\n".join(message["content"] for message in systems)
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{**systems[0], "content": text}, *rest]
    made: Messages = []
    for message in messages:
        last = made[-1] if made else {"role": "system"}
        is_same = last["role"] == message["role"] in ("user", "assistant")
        if is_same and not last.get("tool_calls") and message is not newest:
            message = _joined(made.pop(), message)
        elif last["role"] == "system" and message["role"] == "assistant" and len(messages) > 1:
            made.append({"role": "user", "content": ""})
        made.append(message)
    return made
