"""Strict JSON of request bodies, whose size is checked first, and the arguments of calls in it.

Clients send the arguments of calls back in various forms.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from jaxserve.server.schema.errors import ApiError

T = TypeVar("T")

# A string, complete or cut off at the end of the body. Possessive, so that it takes linear time.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENING = frozenset(b"[{")
# `Expected int, got str - at $.messages[0].content` -> messages
_PATH = re.compile(r" - at `\$\.?([A-Za-z_][A-Za-z0-9_]*)?")
# An escape in a string: a surrogate pair, a single half, or any other.
_ESCAPE = re.compile(
    rb"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_MISSING = re.compile(r"missing required field `(\w+)`")


def without_half_pairs(body: bytes) -> bytes:
    """Return JSON text with U+FFFD in place of each escaped single half of a surrogate pair.

    Clients cut texts within a character beyond U+FFFF, and send the half with every later request.
    """
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[2] else match[0], body)


def parse_json(body: bytes, max_depth: int, max_nodes: int) -> Any:
    """Decode the JSON body of a request strictly, and return its value.

    The body must be UTF-8. NaN, numbers out of range, lone surrogates and repeated names in an
    object are refused.

    Args:
        max_depth: maximum nesting of lists and objects, checked before decoding.
        max_nodes: maximum number of JSON values, checked before decoding.

    Raises:
        ApiError: the body is invalid or exceeds a limit (status 400).
    """
    frame = _STRING.sub(b'""', body)
    if frame.count(b",") + frame.count(b"[") + frame.count(b"{") > max_nodes:
        raise ApiError(400, f"the body has more than {max_nodes} JSON values", code="too_large")
    if _depth(frame) > max_depth:
        raise ApiError(400, f"the body is nested deeper than {max_depth}", code="too_deep")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if _count_names(value) != frame.count(b":"):
        raise ApiError(400, "the body gives a name twice in one object", code="duplicate_name")
    return value


def _depth(frame: bytes) -> int:
    depth = deepest = 0
    for bracket in frame.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in _OPENING else -1
        deepest = max(deepest, depth)
    return deepest


def _count_names(value: Any) -> int:
    count, pending = 0, [value] if isinstance(value, dict | list) else []
    while pending:
        container = pending.pop()
        if isinstance(container, dict):
            count += len(container)
            container = container.values()
        pending += [inner for inner in container if isinstance(inner, dict | list)]
    return count


def to_schema(value: Any, schema: type[T]) -> T:
    """Convert a decoded JSON value to a msgspec Struct, and return it.

    Raises:
        ApiError: a field is missing or has the wrong type, or the value is nested too deeply
            (status 400).
    """
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        text = str(error)
        matches = [rule.search(text) for rule in (_PATH, _MISSING)]
        param = ".".join(match.group(1) for match in matches if match is not None) or None
        text = text.replace("`$.", "`").replace(" - at `$`", "")
        raise ApiError(400, text, param, "invalid_type") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deep", code="too_deep") from None


# Templates process arguments recursively, some with ten Python frames per level.
MAX_DEPTH = 64


def given_arguments(arguments: Any) -> dict[str, Any] | str:
    """Return the arguments of a tool call as an object, or as text if they are not a JSON object.

    A token limit may cut arguments, and models may write lists and bare values. Clients send such
    arguments back with every later request. An object nested too deeply for templates also becomes
    text.

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
    """Return the arguments of a tool call as JSON text. Text is returned unchanged, and None is
    "{}".
    """
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)


def custom_arguments(arguments: Any) -> str:
    """Return the JSON arguments of the function that represents a custom tool: {"input": text}.

    Args:
        arguments: input of the call of the custom tool, None for no input.
    """
    text = "" if arguments is None else arguments_text(arguments)
    return json.dumps({"input": text}, ensure_ascii=False)


def read_object(text: str) -> dict[str, Any] | None:
    """Parse JSON text and return its object, or None if the text is not a JSON object.

    Half of a surrogate pair, which JSON can escape and UTF-8 cannot encode, becomes U+FFFD.
    """
    try:
        value = json.loads(without_half_pairs(text.encode()).decode(), strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_within(value: Any, depth: int) -> bool:
    """Return whether a JSON value is nested at most `depth` levels deep. A scalar is one level."""
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
