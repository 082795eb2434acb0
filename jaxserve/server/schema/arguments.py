"""Arguments of calls in conversations, in the various forms in which clients send them back."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.server.schema.decode import without_half_pairs

# Templates process arguments recursively, some with ten Python frames per level.
MAX_DEPTH = 64


def given_arguments(arguments: Any) -> dict[str, Any] | str:
    """Return the arguments of a call as an object, or as text if they are not a JSON object.

    `max_tokens` may cut arguments, and models may write lists and bare values. Clients send these
    back with every later request. An object nested too deeply for templates also becomes text.

    Args:
        arguments: object, JSON text, incomplete JSON text, another JSON value, or None for no
            arguments.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    value = read_object(arguments) if isinstance(arguments, str) else arguments
    if isinstance(value, dict) and is_within(value, MAX_DEPTH):
        return value
    return arguments_text(arguments)


def arguments_text(arguments: Any) -> str:
    """Return arguments as text, the form that the API defines."""
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)


def custom_arguments(arguments: Any) -> str:
    """Return the input of a custom tool's call as the JSON arguments of a function."""
    text = "" if arguments is None else arguments_text(arguments)
    return json.dumps({"input": text}, ensure_ascii=False)


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object. Return None if the text is not one.

    Half of a surrogate pair, which JSON can escape and UTF-8 cannot encode, becomes U+FFFD.
    """
    try:
        value = json.loads(without_half_pairs(text.encode()).decode(), strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_within(value: Any, depth: int) -> bool:
    """Return whether a JSON value is nested at most `depth` levels deep."""
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
