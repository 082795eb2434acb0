"""Reader of `compat.toml`: names that other servers have and jaxserve does not serve.

Parsing the file takes about 10 ms. It is read on first use, not by `--help` or a plain start.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import is_equal, is_neutral

ENGINE, SERVER, BENCH = "engine_arguments", "server_options", "bench_options"
FIELDS = "request_fields"


class Unserved(NamedTuple):
    """An argument, option or request field that is not served.

    Attributes:
        neutral: values without effect, which are accepted. None accepts every value.
        instead: a suggestion for any other value.
        below, above: numbers beyond these bounds are accepted.
        needs: neutral values of served fields. Every value is accepted while they have these.
        short: short form of the option, or None.
    """

    neutral: tuple[Any, ...] | None
    instead: str
    below: float = -math.inf
    above: float = math.inf
    needs: Mapping[str, Any] | None = None
    short: str | None = None

    def passes(self, value: Any, fields: Mapping[str, Any] | None = None) -> bool:
        """Return whether a value has no effect, beside the other `fields` of its request."""
        if value is None or self.neutral is None or any(is_equal(value, x) for x in self.neutral):
            return True
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (value < self.below or value > self.above):
            return True
        sent = [((fields or {}).get(name), x) for name, x in (self.needs or {}).items()]
        return bool(sent) and all(x is None or is_equal(x, neutral) for x, neutral in sent)


@cache
def table() -> dict[str, Any]:
    """Return the contents of `compat.toml`."""
    import tomllib  # takes 4 ms, and most processes do not need it

    return tomllib.loads(Path(__file__).with_name("compat.toml").read_text(encoding="utf-8"))


@cache
def unserved(kind: str) -> dict[str, Unserved]:
    """Return the rows of ENGINE, SERVER, BENCH or FIELDS, by name."""
    rows = {}
    for name, row in table()[kind].items():
        neutral = row.get("neutral", ())
        more = {key: row[key] for key in row.keys() - {"neutral", "instead", "reason"}}
        rows[name] = Unserved(None if neutral == "any" else tuple(neutral), suggestion(row), **more)
    return rows


def suggestion(row: Mapping[str, str]) -> str:
    """Return the suggestion of a row, or the reason that it names."""
    return row["instead"] if "instead" in row else table()["reasons"][row["reason"]]


def served(
    settings: Mapping[str, Any], names: Collection[str], kind: str = ENGINE
) -> dict[str, Any]:
    """Return the settings without unserved names. `names` are served.

    Raises:
        InvalidRequest: an unserved name has a value that would change something.
    """
    rows = unserved(kind) if settings.keys() - set(names) else {}
    for name, value in settings.items():
        if name in rows and not rows[name].passes(value):
            shown = name if name == "hf_token" else f"{name}={value!r}"
            raise InvalidRequest(f"{shown} is not supported: {rows[name].instead}", name)
    return {name: value for name, value in settings.items() if name not in rows}


def check_fields(fields: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the fields of a request that are neither in `names` nor in the file.

    Raises:
        InvalidRequest: names the first row of the file whose value in `fields` is not neutral.
    """
    others = fields.keys() - set(names)
    rows = unserved(FIELDS) if others else {}
    for name, row in rows.items():
        if name in others and not row.passes(fields[name], fields):
            raise InvalidRequest(f"{name} is not supported: {row.instead}", name)
    return [name for name in fields if name in others and name not in rows]


@cache
def endpoint_fields(endpoint: str) -> dict[str, tuple[Any, ...]]:
    """Return the fields that only other endpoints serve, each with its neutral values."""
    rows = table()["endpoint_fields"].items()
    return {name: (None, *row["neutral"]) for name, row in rows if endpoint in row["endpoints"]}


def refuse_unsupported(
    fields: Mapping[Any, Any], unsupported: Mapping[str, tuple[Any, ...]], by: str = ""
) -> None:
    """Check that fields which an endpoint does not serve have neutral values.

    Raises:
        InvalidRequest: names the first other one in the alphabet. The message ends with `by`.
    """
    for name in sorted(fields.keys() & unsupported.keys()):
        if not is_neutral(fields[name], unsupported[name]):
            raise InvalidRequest(f"{name} is not supported{by}", name)


class UnservedRoute(NamedTuple):
    """A route that is not served. Its path may end with a parameter in braces."""

    path: str
    methods: list[str]
    api: str
    instead: str

    def matches(self, path: str) -> bool:
        """Return whether the path of a request is one of this route."""
        start, _, parameter = self.path.partition("{")
        if not parameter or not path.startswith(start):
            return path == self.path
        return parameter.endswith(":path}") or (path != start and "/" not in path[len(start) :])


@cache
def unserved_routes() -> tuple[UnservedRoute, ...]:
    """Return all routes of the file, in its order."""
    return tuple(
        UnservedRoute(path, row["methods"], row["api"], row["instead"])
        for row in table()["routes"]
        for path in row["paths"].split()
    )
