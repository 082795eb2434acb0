"""Arguments of the calls in a conversation, which clients send back in every form."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.server.schema.decode import without_half_pairs

# Templates recurse over arguments, some with ten Python frames a level.
MAX_DEPTH = 64


def given_arguments(given: Any) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as text where they are no JSON object.

    `max_tokens` cuts arguments, and models write lists and bare values: clients send these back
    with every later request. An object that is nested too deep for templates is text too.

    Args:
        given: an object, JSON text, cut JSON text, another JSON value, or None for no arguments.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    value = read_object(given) if isinstance(given, str) else given
    if isinstance(value, dict) and is_within(value, MAX_DEPTH):
        return value
    return arguments_text(given)


def arguments_text(given: Any) -> str:
    """Return arguments in the form that the API defines, which is text."""
    if isinstance(given, str):
        return given
    return "{}" if given is None else json.dumps(given, ensure_ascii=False)


def custom_arguments(given: Any) -> str:
    """Return the input of a custom tool's call as the arguments of a function."""
    text = "" if given is None else arguments_text(given)
    return json.dumps({"input": text}, ensure_ascii=False)


def read_object(text: str) -> dict[str, Any] | None:
    """Return a JSON object, or None where the text is none.

    The replacement character takes the place of half a surrogate pair, which JSON can escape and
    UTF-8 cannot encode.
    """
    try:
        value = json.loads(without_half_pairs(text.encode()).decode(), strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_within(value: Any, depth: int) -> bool:
    """Return whether a JSON value is nested at most so deep."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False
