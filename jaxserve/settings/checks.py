"""Checks of values from callers: exact integers, finite numbers, lists, flags and choices."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Literal, get_args

from jaxserve.errors import InvalidRequest

ContentFormat = Literal["auto", "string", "openai"]


def exact_int(value: Any, name: str, low: int, high: int, parameter: str | None = None) -> int:
    """Return `value` as an int if it is an integer (NumPy's too, but no bool) from `low` to `high`.

    Raises:
        InvalidRequest: the message contains `name` and the range. The error's parameter is
            `parameter`, or `name` by default.
    """
    parameter = parameter or name
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise InvalidRequest(f"{name} must be an integer, got {kind}", parameter) from None
    if not low <= number <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {number}", parameter)
    return number


def is_listing(value: Any) -> bool:
    """Return whether a value can be a list of numbers: a list or array, but no text or scalar."""
    sized = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0
    return sized and not isinstance(value, str | bytes)


def finite_float(value: Any, name: str) -> float:
    """Return a number as a finite float.

    Raises:
        InvalidRequest: the value is a bool, a text, no number, infinite or NaN. The message
            contains `name`.
    """
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise InvalidRequest(f"{name} must be a number, got {type(value).__name__}", name)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{name} must be one finite number", name) from None
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be finite, got {number}", name)
    return number


def flag(value: Any, name: str) -> bool:
    """Return `value` if it is True or False.

    Raises:
        InvalidRequest: `value` has another type. The message contains `name`.
    """
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, got {type(value).__name__}", name)
    return value


def within(value: Any, name: str, low: float, high: float) -> float:
    """Return `value` as a finite float from `low` to `high`, both included.

    Raises:
        InvalidRequest: the value is no such number. The message contains `name` and the range.
    """
    number = finite_float(value, name)
    if not low <= number <= high:
        raise InvalidRequest(f"{name} must be from {low:g} to {high:g}, got {number}", name)
    return number


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal. A bool is never equal to a number."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Return whether a value is equal to an element of `neutral` and has the same type."""
    return any(type(value) is type(other) and value == other for other in neutral)


def check_content_format(value: Any) -> None:
    """Check that a value of chat_template_content_format is "auto", "string" or "openai".

    Raises:
        InvalidRequest: it is not. The message lists the allowed values.
    """
    if value not in get_args(ContentFormat):
        names = ", ".join(get_args(ContentFormat))
        raise InvalidRequest(
            f"chat_template_content_format must be one of {names}; got {str(value)[:60]!r}",
            "chat_template_content_format",
        )
