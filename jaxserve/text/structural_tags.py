"""Structural tags as grammars: free text in which a trigger begins a tag with a constrained format.

The language is that of xgrammar 0.2 (structural_tag.py), which vLLM accepts in
`structured_outputs.structural_tag` and `response_format`, including the older form with
`structures` and `triggers`. The result is in llguidance's dialect of Lark. Its lexer is greedy, so
every regular part (texts, patterns, free text up to an end) becomes a single terminal, which
considers all ways to match a text. Rules are used only for JSON, grammars, and formats that contain
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.text.added_texts import pattern_of_any

# Any text, and any non-empty text.
_BASIS = ("ANY: /(?s:.*)/", "SOME: /(?s:.+)/")
_MAX_CHARS = 4096  # maximum length that a terminal counts
_MAX_REPEAT = 1000
_MAX_SIZE = 1 << 20
_PIECE = re.compile(r"\\.|.", re.DOTALL)  # one element of a regular expression
_REPEATED = {"optional": "?", "star": "*", "plus": "+"}
TYPES = tuple(
    "any_text const_string json_schema regex grammar token tag sequence or optional star plus "
    "repeat triggered_tags tags_with_separator dispatch".split()
)


@dataclass(frozen=True)
class _Ending:
    """Lark terms of the text or token that closes a tag, and thereby the free text before it."""

    stop: str | None = None  # terminal of the texts that end free text, or None
    prefix: str | None = None  # terminal of the text before a special token, or None
    token: str = ""  # Lark term of the special token and the text after it, or ""

    @property
    def rule(self) -> str:
        """Lark terms of the ending of a tag, for use after anything except free text."""
        return " ".join(filter(None, (self.stop, self.prefix, self.token)))


_OPEN = _Ending()


def structural_tag_grammar(
    tag: Mapping[str, Any],
    specials: Mapping[str, int],
    schema_rule: Callable[[Any, int | None], str],
    grammar_rule: Callable[[str], str],
) -> str:
    """Return a Lark grammar whose rule `start` matches the texts that a structural tag allows.

    Args:
        tag: {"type": "structural_tag", "format": ...}, or the older {"structures", "triggers"}.
        specials: ids of special tokens by text.
        schema_rule: function that returns the right side of a Lark rule for a JSON schema. Its
            second argument is the maximum length of white space, None for the default.
        grammar_rule: function that returns the right side of a Lark rule for the text of a grammar.

    Raises:
        ValueError: the tag is invalid or not supported.
    """
    if "structures" in tag or "triggers" in tag:
        form = from_older(tag)
    else:
        if text_field(tag, "type", "structural_tag") != "structural_tag":
            raise ValueError("type must be structural_tag")
        form = tag.get("format")
    writer = _Writer(specials, schema_rule, grammar_rule)
    start = writer.write(form, _OPEN) or '""'
    return "\n".join((*_BASIS, f"start: {start}", *writer.lines))


def _any_of(texts: list[str]) -> str:
    return "(" + " | ".join(json.dumps(text) for text in texts) + ")"


def _without(text: str, *parts: str | None) -> str:
    return "(" + " & ".join([text, *(f"~(ANY {part} ANY)" for part in parts if part)]) + ")"


def _pattern(form: Mapping[str, Any]) -> str:
    spelled = {"/": r"\x2f", r"\/": r"\x2f", "\n": r"\n", "\r": r"\r"}
    return (
        "/(?:" + _PIECE.sub(lambda m: spelled.get(m[0], m[0]), text_field(form, "pattern")) + ")/"
    )


class _Writer:
    """Writer of the Lark rules and terminals of one structural tag; see
    `structural_tag_grammar`.
    """

    def __init__(
        self,
        specials: Mapping[str, int],
        schema_rule: Callable[[Any, int | None], str],
        grammar_rule: Callable[[str], str],
    ) -> None:
        self._specials = {text: number for text, number in specials.items() if text}
        self._special = re.compile(f"({pattern_of_any(self._specials)})")
        self._schema_rule = schema_rule
        self._grammar_rule = grammar_rule
        self.lines: list[str] = []  # rules and terminals written so far
        self._size = 0

    def _put(self, name: str, right: str) -> str:
        named = f"{name}{len(self.lines)}"
        self._size += len(right)
        if self._size > _MAX_SIZE:
            raise ValueError(f"a tag may become a grammar of at most {_MAX_SIZE} characters")
        self.lines.append(f"{named}: {right}")
        return named

    def _literal(self, text: str) -> str:
        parts = self._special.split(text)
        return " ".join(
            f"<[{self._specials[part]}]>" if index % 2 else json.dumps(part)
            for index, part in enumerate(parts)
            if part
        )

    def _is_text(self, text: str) -> bool:
        return self._special.search(text) is None

    def write(self, form: Any, ending: _Ending) -> str:
        """Write the Lark rules of a format and of the ending after it. Return the terms that match
        both.

        Args:
            form: format of a structural tag, an object with a type.

        Raises:
            ValueError: the format is invalid or not supported.
        """
        if not isinstance(form, Mapping):
            raise ValueError("a format must be an object with a type")
        kind = form.get("type")
        if kind not in TYPES:
            raise ValueError(
                f"a format of type {str(kind)[:40]!r} is not supported; types are "
                + ", ".join(TYPES)
            )
        regular = self._regular(form, ending.stop)
        if regular is not None:
            if ending.prefix is not None:
                regular += f" {ending.prefix}"
            return f"{self._put('T', regular)} {ending.token}"
        return getattr(self, f"_write_{kind}")(form, ending)

    def _regular(self, form: Mapping[str, Any], stop: str | None = None) -> str | None:
        """Return a Lark terminal that matches a format and the text `stop` after it.

        The result is None if the format contains parts that no regular expression can match, such
        as a JSON schema or a special token.

        Args:
            stop: terminal of the text that ends free text in the format, or None.
        """
        kind, behind = form.get("type"), f" {stop}" if stop else ""
        if kind == "const_string":
            value = text_field(form, "value")
            return json.dumps(value) + behind if self._is_text(value) else None
        if kind == "regex":
            return _pattern(form) + behind
        if kind == "any_text":
            return self._free(form, stop) + behind
        if kind in ("sequence", "or"):
            elements = elements_field(form)
            stops = [stop if kind == "or" else None] * (len(elements) - 1) + [stop]
            parts = [self._regular(*pair) for pair in zip(elements, stops, strict=True)]
            if None in parts:
                return None
            return "(" + (" " if kind == "sequence" else " | ").join(filter(None, parts)) + ")"
        if kind in _REPEATED or kind == "repeat":
            inner = self._regular(content_field(form))
            return None if inner is None else f"({inner}){self._times(form)}{behind}"
        if kind == "tag":
            begin, end = form.get("begin"), self._ending(form)
            if not isinstance(begin, str) or not self._is_text(begin) or end.token:
                return None
            inner = self._regular(content_field(form), end.stop)
            return None if inner is None else f"({json.dumps(begin)} {inner}){behind}"
        return None

    def _free(self, form: Mapping[str, Any], *stops: str | None) -> str:
        excluded = texts_field(form, "excludes")
        if form.get("max_tokens") is not None:
            raise ValueError("max_tokens is not supported; max_chars is")
        text = "ANY"
        if form.get("max_chars") is not None:
            text = f"/(?s:.{{0,{number_field(form, 'max_chars', 0, _MAX_CHARS)}}})/"
        return _without(text, *stops, _any_of(excluded) if excluded else None)

    @staticmethod
    def _times(form: Mapping[str, Any]) -> str:
        if form["type"] != "repeat":
            return _REPEATED[form["type"]]
        least = number_field(form, "min", 0, _MAX_REPEAT)
        if form.get("max") == -1:
            return f"{{{least},}}"
        return f"{{{least},{number_field(form, 'max', max(least, 1), _MAX_REPEAT)}}}"

    def _token(self, form: Mapping[str, Any]) -> str:
        token = form.get("token")
        number = self._specials.get(token) if isinstance(token, str) else token
        if type(number) is not int or number < 0:
            raise ValueError("token must be the id or the text of a special token")
        return f"<[{number}]>"

    def _ending(self, form: Mapping[str, Any]) -> _Ending:
        """Return the ending of a tag from its field `end`: a text, a list of texts, or a token."""
        end = form.get("end")
        if isinstance(end, Mapping):
            return _Ending(token=self._token(end))
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(e, str) for e in ends):
            raise ValueError("end must be a text, a list of texts or a token")
        if all(map(self._is_text, ends)):
            if len(ends) > 1 and not all(ends):
                raise ValueError("an end of several may not be empty")
            return _Ending(_any_of(ends)) if ends[0] else _OPEN
        if len(ends) > 1:
            raise ValueError("several ends may not hold special tokens")
        prefix, *rest = self._special.split(ends[0], maxsplit=1)
        return _Ending(
            prefix=json.dumps(prefix) if prefix else None, token=self._literal("".join(rest))
        )

    def _write_json_schema(self, form: Mapping[str, Any], ending: _Ending) -> str:
        if form.get("style", "json") != "json" or form.get("excludes"):
            raise ValueError("json_schema takes the style json alone, and no excludes")
        if not isinstance(form.get("json_schema"), dict | bool):
            raise ValueError("json_schema must be a JSON schema, an object")
        spaces = form.get("max_whitespace_cnt")
        if spaces is not None:
            spaces = number_field(form, "max_whitespace_cnt", 0, _MAX_CHARS)
        return f"{self._put('r', self._schema_rule(form['json_schema'], spaces))} {ending.rule}"

    def _write_grammar(self, form: Mapping[str, Any], ending: _Ending) -> str:
        return f"{self._put('r', self._grammar_rule(text_field(form, 'grammar')))} {ending.rule}"

    def _write_const_string(self, form: Mapping[str, Any], ending: _Ending) -> str:
        return f"{self._literal(text_field(form, 'value'))} {ending.rule}"

    def _write_token(self, form: Mapping[str, Any], ending: _Ending) -> str:
        return f"{self._token(form)} {ending.rule}"

    def _write_sequence(self, form: Mapping[str, Any], ending: _Ending) -> str:
        elements, written, run = elements_field(form), [], []
        for place, element in enumerate(elements):
            if self._regular(element) is not None:
                run.append(element)
                continue
            last = ending if place == len(elements) - 1 else _OPEN
            written.append(self._write_behind(run, element, last))
            run = []
        if run:
            written.append(self.write({"type": "sequence", "elements": run}, ending))
        return " ".join(written)

    def _write_behind(
        self, run: list[Mapping[str, Any]], element: Mapping[str, Any], ending: _Ending
    ) -> str:
        """Return Lark terms for regular formats and the format `element` after them.

        Free text at the end of the regular formats extends to the beginning of `element`, a tag.

        Args:
            run: regular formats, in order.
            ending: ending after `element`.

        Raises:
            ValueError: free text precedes a format that is not a tag with text as its beginning.
        """
        if not run:
            return self.write(element, ending)
        if run[-1].get("type") != "any_text":
            return " ".join(
                (
                    self.write({"type": "sequence", "elements": run}, _OPEN),
                    self.write(element, ending),
                )
            )
        begin = element.get("begin") if element.get("type") == "tag" else None
        if not isinstance(begin, str) or not begin or not self._is_text(begin):
            raise ValueError("any_text in a sequence is the last element, or stands before a tag")
        free = self.write({"type": "sequence", "elements": run}, _Ending(_any_of([begin])))
        return f"{free} {self._inside(element, '', ending)}"

    def _write_or(self, form: Mapping[str, Any], ending: _Ending) -> str:
        ways = [self.write(element, ending) or '""' for element in elements_field(form)]
        return self._put("r", " | ".join(ways))

    def _write_repeat(self, form: Mapping[str, Any], ending: _Ending) -> str:
        inner = self._put("r", self.write(content_field(form), _OPEN))
        return f"{self._put('r', f'{inner}{self._times(form)}')} {ending.rule}"

    _write_optional = _write_star = _write_plus = _write_repeat

    def _write_tag(self, form: Mapping[str, Any], ending: _Ending) -> str:
        begin = form.get("begin")
        if isinstance(begin, Mapping):
            return f"{self._token(begin)} {self._inside(form, '', ending)}"
        return self._inside(form, text_field(form, "begin"), ending)

    def _inside(self, tag: Mapping[str, Any], begin: str, ending: _Ending) -> str:
        return self._around(begin, self._content(tag), ending)

    def _content(self, tag: Mapping[str, Any]) -> str:
        return self.write(content_field(tag), self._ending(tag))

    def _around(self, begin: str, content: str, ending: _Ending) -> str:
        return " ".join(filter(None, (self._literal(begin), content, ending.rule)))

    def _write_tags_with_separator(self, form: Mapping[str, Any], ending: _Ending) -> str:
        tag = self._put("r", " | ".join(self._write_tag(tag, _OPEN) for tag in tags_field(form)))
        separator = self._literal(text_field(form, "separator"))
        several = tag if flag_field(form, "stop_after_first") else f"{tag} ({separator} {tag})*"
        listed = self._put("r", several if flag_field(form, "at_least_one") else f"({several})?")
        return f"{listed} {ending.rule}"

    def _write_triggered_tags(self, form: Mapping[str, Any], ending: _Ending) -> str:
        triggers, tags = texts_field(form, "triggers"), tags_field(form)
        if not triggers:
            raise ValueError("triggers must hold at least one")
        inside: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        written: list[tuple[str, str]] = []
        for tag in tags:
            begin, content = text_field(tag, "begin"), self._content(tag)
            written.append((begin, content))
            matching = [trigger for trigger in inside if begin.startswith(trigger)]
            if len(matching) != 1:
                raise ValueError(
                    f"the tag that begins with {begin[:60]!r} must begin with one of the triggers, "
                    f"and begins with {len(matching)}"
                )
            inside[matching[0]].append(self._around(begin[len(matching[0]) :], content, _OPEN))
        rules = {trigger: ways for trigger, ways in inside.items() if ways}
        first, loops = "", not flag_field(form, "stop_after_first")
        if flag_field(form, "at_least_one"):
            # Each content is written once. Otherwise nested tags would double at each level.
            ways = [self._around(begin, content, _OPEN) for begin, content in written]
            first = self._put("r", " | ".join(ways))
            if not loops:
                return f"{first} {ending.rule}"
        return f"{first} {self._dispatch(form, rules, loops, ending)}"

    def _write_dispatch(self, form: Mapping[str, Any], ending: _Ending) -> str:
        rules: dict[str, list[str]] = {}
        for rule in list_field(form, "rules"):
            if not (isinstance(rule, list) and len(rule) == 2 and isinstance(rule[0], str)):
                raise ValueError("rules must be pairs of a text and a format")
            rules.setdefault(rule[0], []).append(self.write(rule[1], _OPEN))
        if not rules or not all(rules):
            raise ValueError("rules must hold at least one pair, and no empty text")
        loops = form.get("loop") is None or flag_field(form, "loop")
        return self._dispatch(form, rules, loops, ending)

    def _dispatch(
        self, form: Mapping[str, Any], rules: dict[str, list[str]], loops: bool, ending: _Ending
    ) -> str:
        """Return Lark terms for free text in which each trigger is followed by one of its formats.

        Args:
            rules: Lark terms of the formats by trigger, a text or a special token.
            loops: True if several triggers may occur, False for at most one.
            ending: ending after the free text.

        Raises:
            ValueError: a trigger mixes text and special tokens.
        """
        texts = [trigger for trigger in rules if self._is_text(trigger)]
        mixed = [trigger for trigger in rules if trigger not in texts]
        for trigger in mixed:
            if trigger not in self._specials:
                raise ValueError(
                    f"the trigger {trigger[:60]!r} must be a special token, or hold none"
                )
        stops = [_any_of(texts) if texts else None, ending.stop]
        free = self._free(form, *stops)
        ways = []
        allowed, first = self._free(form, ending.stop), f"~(ANY {stops[0]} SOME)"
        for trigger in texts:
            # Free text up to its first trigger, and the trigger.
            hit = self._put("T", f"(({allowed} {json.dumps(trigger)}) & {first})")
            ways.append((hit, rules[trigger]))
        if mixed:
            before = self._put("T", free)
            ways += [(f"{before} <[{self._specials[text]}]>", rules[text]) for text in mixed]
        tagged = self._put("r", " | ".join(f"{hit} ({' | '.join(forms)})" for hit, forms in ways))
        last = " ".join(filter(None, (free, ending.stop, ending.prefix)))
        rest = f"{self._put('T', last)} {ending.token}"
        if loops:
            return self._put("r", f"{tagged}* {rest}")
        return self._put("r", f"{tagged} {ending.rule} | {rest}")


# Typed access to the fields of structural tags. Invalid fields raise ValueError.


def from_older(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format that the older form of a structural tag (`structures`, `triggers`)
    describes.
    """
    structures = list_field(tag, "structures")
    if not structures or not all(isinstance(entry, Mapping) for entry in structures):
        raise ValueError("structures must be a list of objects with begin, schema and end")
    tags = [
        {
            "type": "tag",
            "begin": text_field(structure, "begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
            "end": text_field(structure, "end"),
        }
        for structure in structures
    ]
    return {"type": "triggered_tags", "tags": tags, "triggers": tag.get("triggers")}


def text_field(form: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return the string field `name` of a format, or `default`. Raise ValueError for other
    types.
    """
    value = form.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value


def list_field(form: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list field `name` of a format. Raise ValueError if it is not a list."""
    value = form.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value


def texts_field(form: Mapping[str, Any], name: str) -> list[str]:
    """Return the field `name` of a format, a list of non-empty strings, [] if it is missing.

    Raises:
        ValueError: the field has another type, or contains an empty string.
    """
    value = form.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name} must be a list of texts that are not empty")
    return value


def flag_field(form: Mapping[str, Any], name: str) -> bool:
    """Return the boolean field `name` of a format, or False. Raise ValueError for other types."""
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value


def number_field(form: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return the integer field `name` of a format. Raise ValueError if it is not in `low` to
    `high`.
    """
    value = form.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer of {low} to {high}")
    return value


def content_field(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the format in the field `content` of a format. Raise ValueError if it is not an
    object.
    """
    content = form.get("content")
    if not isinstance(content, Mapping):
        raise ValueError("content must be a format, an object with a type")
    return content


def elements_field(form: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the list of formats in the field `elements` of a format. Raise ValueError if it is
    empty.
    """
    elements = list_field(form, "elements")
    if not elements or not all(isinstance(element, Mapping) for element in elements):
        raise ValueError("elements must be a list of formats, at least one")
    return elements


def tags_field(form: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the list of tags in the field `tags` of a format. Raise ValueError if it is empty."""
    tags = list_field(form, "tags")
    if not tags or not all(isinstance(t, Mapping) and t.get("type", "tag") == "tag" for t in tags):
        raise ValueError("tags must be a list of tags, at least one")
    return tags
