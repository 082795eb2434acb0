"""Calls written in tags: XML-like parameters (Qwen3-Coder), and key-value pairs (GLM)."""

from __future__ import annotations

import functools
import html
import re
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.source import Reading, Source
from jaxserve.server.tool_calls.tag_reading import TagCall
from jaxserve.server.tool_calls.values import convert
from jaxserve.server.tool_calls.written import NAME


@dataclass(frozen=True)
class XmlCall(TagCall):
    """Call with one named tag per argument: `<function=f><parameter=a>1</parameter></function>`.

    Args:
        parameter: text before the name of a parameter.
        parameter_end: text after the value of a parameter.
        end: text after the last parameter.
        outer_end: text after `end` that closes the section around the call.
        is_quoted: True if names are quoted.
        trims: True if one line break on either side of a value is not part of it.
        types: name of the attribute that tells strings ("true" or "string") from other values.
        before: text between the marker of the call and its name.
        tag_end: text that ends a tag after its attributes.
        whole: texts before and after a JSON object that holds all arguments.
        is_escaped: True if names are HTML-escaped.
    """

    parameter: str
    parameter_end: str
    end: str
    outer_end: str
    is_quoted: bool = False
    trims: bool = False
    types: str = ""
    before: str = ""
    tag_end: str = ">"
    whole: tuple[str, str] = ("", "")
    is_escaped: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.parameter, self.parameter_end, self.end, self.before, *self.whole)

    @property
    def value_tags(self) -> tuple[str, str]:
        return self.parameter, self.parameter_end

    def _head(self) -> re.Pattern[str]:
        return _opening(self.before, self.is_quoted, self.types, self.tag_end)

    def opening(self) -> re.Pattern[str]:
        return _opening(self.parameter, self.is_quoted, self.types, self.tag_end)

    def _name(self, found: re.Match[str]) -> str:
        return html.unescape(found["name"]) if self.is_escaped else found["name"]

    def is_text(self, found: re.Match[str], schema: dict[str, Any]) -> bool:
        if not self.types or found["type"] is None:
            return super().is_text(found, schema)
        return found["type"] in ("true", "string")

    def _value(self, raw: str, found: re.Match[str], schema: dict[str, Any]) -> Any:
        if self.trims:
            raw = raw.removeprefix("\n").removesuffix("\n")
        if not self.types or found["type"] is None:
            return super()._value(raw, found, schema)
        return raw if self.is_text(found, schema) else convert(raw, {"type": "json"}, schema)


@functools.lru_cache(maxsize=64)
def _opening(before: str, is_quoted: bool, types: str, end: str) -> re.Pattern[str]:
    name = r"[^\s<>\"'](?:[^<>\"'\n]{0,254}[^\s<>\"'])??"
    name = rf"(?P<quote>[\"']?)(?P<name>{name})(?P=quote)" if is_quoted else rf"(?P<name>{name})"
    types = rf"(?:\s+(?:{types}|index)=\"(?P<type>\w{{1,9}})\")?" if types else ""
    before = rf"{loosely(before)}\s*" if before else ""
    return re.compile(rf"\s*{before}{name}{types}\s*{re.escape(end)}")


@dataclass(frozen=True)
class KeyedCall(TagCall):
    """Call as a name and tagged pairs: `f<arg_key>a</arg_key><arg_value>1</arg_value>`.

    Args:
        end: text after all pairs.
        after: marker that may follow the name of the function.
        suffix: text at the end of the name of each tag.
    """

    end: str
    after: str = ""
    suffix: str = ""

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """Tags before and after a key, and before and after a value."""
        before, after = f"arg_key{self.suffix}>", f"arg_value{self.suffix}>"
        return f"<{before}", f"</{before}", f"<{after}", f"</{after}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.tags, self.end, self.after)

    @property
    def value_tags(self) -> tuple[str, str]:
        return self.tags[2:]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return (self.tags[:2], self.tags[2:])

    def _head(self) -> re.Pattern[str]:
        return _KEYED_HEAD

    def _take_head(self, source: Source) -> Reading[tuple[re.Match[str], str]]:
        found, _ = yield from super()._take_head(source)
        return found, (yield from source.takes(self.after))

    def opening(self) -> re.Pattern[str]:
        return _keyed_opening(*self.tags[:3])

    def counts(self, text: str, position: int) -> bool:
        return True


_KEYED_HEAD = re.compile(rf"\s*(?P<name>{NAME})\s*(?=<)")


@functools.lru_cache(maxsize=64)
def _keyed_opening(key: str, key_end: str, value: str) -> re.Pattern[str]:
    key, key_end, value = map(re.escape, (key, key_end, value))
    return re.compile(rf"\s*{key}\s*(?P<name>[^<]{{0,256}}?)\s*{key_end}\s*{value}")


def loosely(text: str) -> str:
    """Return a pattern that matches `text` with any amount of white space at its spaces."""
    return r"\s*".join(map(re.escape, text.split()))
