"""Query: checked arguments of a request's query string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from jaxserve.errors import InvalidRequest

T = TypeVar("T")
MAX_LIMIT, DEFAULT_LIMIT = 100, 20
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class Query:
    """Reader of the query arguments of an HTTP request, which checks their values."""

    def __init__(self, request: Request) -> None:
        self._given = request.query_params

    def flag(self, name: str) -> bool:
        """Return the query argument `name` as a bool, False if it is absent.

        Raises:
            InvalidRequest: the value is none of true, false, 1 and 0.
        """
        text = self._given.get(name, "false").lower()
        if text not in _FLAGS:
            raise InvalidRequest(f"{name} must be true or false, got {text[:40]!r}", name)
        return _FLAGS[text]

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Return the query argument `name` as an integer, or `default` if it is absent.

        Raises:
            InvalidRequest: the value is not an integer from `low` to `high`.
        """
        text = self._given.get(name)
        if text is None:
            return default
        is_number = text.isascii() and text.isdecimal() and len(text) < 12
        if not is_number or not low <= int(text) <= high:
            raise InvalidRequest(
                f"{name} must be an integer from {low} to {high}, got {text[:40]!r}", name
            )
        return int(text)

    def choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        """Return the query argument `name`, which is one of `choices`, or None if it is absent.

        Raises:
            InvalidRequest: the value is not one of the choices.
        """
        text = self._given.get(name)
        if text is not None and text not in choices:
            raise InvalidRequest(f"{name} must be {' or '.join(choices)}", name)
        return text

    def page(
        self,
        entries: list[T],
        id_of: Callable[[T], Any],
        order: Literal["asc", "desc"],
        most: int = MAX_LIMIT,
        default: int = DEFAULT_LIMIT,
    ) -> tuple[list[T], str | None, str | None, bool]:
        """Return the page of a list that the query arguments `limit`, `order` and `after` select.

        Args:
            entries: the list, oldest first.
            id_of: returns the id of an entry.
            order: order without the argument `order`: "asc" (oldest first) or "desc".
            most: maximum of `limit`.
            default: value of `limit` if it is absent.

        Returns:
            The entries of the page, which follow the entry with the id `after`, the ids of the
            first and the last of them (None for an empty page), and whether more entries follow.

        Raises:
            InvalidRequest: an argument is wrong, or `after` is not the id of an entry.
        """
        limit = self.integer("limit", default, 1, most)
        order_given = self.choice("order", ("asc", "desc")) or order
        if order_given == "desc":
            entries = entries[::-1]
        after, first = self._given.get("after"), 0
        if after is not None:
            ids = [id_of(entry) for entry in entries]
            if after not in ids:
                raise InvalidRequest(f"after: there is no {after[:60]!r} in the list", "after")
            first = ids.index(after) + 1
        shown = entries[first : first + limit]
        has_more = len(entries) > first + limit
        if not shown:
            return shown, None, None, has_more
        return shown, id_of(shown[0]), id_of(shown[-1]), has_more
