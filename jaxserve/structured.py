"""StructuredOutputsParams: the format that the text of an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.errors import InvalidRequest

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_ITEMS = 1000
MAX_REGEX_CHARS = 4096
MAX_CHOICES = 1000
MAX_CHOICE_CHARS = 4096

Form = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
NAME = "structured_outputs"
# Keywords of JSON Schema whose entries are schemas by name, and keywords with plain values.
_OF_NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const", "default", "examples"))
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format that the text of an answer must have: one of six kinds, under vLLM's names.

    Exactly one of the first six arguments must be set. All further arguments are options.

    Args:
        json: a JSON schema, as text or as a mapping.
        json_object: True for any JSON object.
        regex: a regular expression that matches the whole text, without backreferences and
            look-around.
        choice: a list of texts, one of which is the answer.
        grammar: a context-free grammar in the syntax of Lark or GBNF (`root ::= ...`).
        structural_tag: free text in which tags enclose parts of a given format, as JSON or as a
            mapping: {"type": "structural_tag", "format": {...}} in xgrammar's language, or the
            older {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.
        whitespace_pattern: a regular expression for the whitespace between the elements of a JSON
            text. None allows up to 16 spaces and line ends.
        disable_any_whitespace: forbid whitespace between the elements of a JSON text.
        disable_additional_properties: allow only the properties that an object of the schema names.
        lenient: omit keywords of `json` that are malformed or that a grammar cannot enforce.

    Raises:
        InvalidRequest: on construction, if there is not exactly one format or if a value exceeds a
            limit. Contents that the compiler of grammars does not support are found later.
    """

    # `form` and `text` are the format as values that can be hashed.
    json: str | Mapping[str, Any] | None = field(default=None, hash=False)
    json_object: bool | None = None
    regex: str | None = None
    choice: Listing[str] | None = field(default=None, hash=False)
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = field(default=None, hash=False)
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        forms = [name for name in Form.__args__ if getattr(self, name) not in (None, False)]
        if len(forms) != 1:
            said = " and ".join(forms) or "none"
            raise InvalidRequest(
                f"{NAME} takes exactly one of {', '.join(Form.__args__)}, got {said}", NAME
            )
        form: Form = forms[0]
        for name in ("disable_any_whitespace", "disable_additional_properties", "lenient"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{NAME}.{name} must be true or false", NAME)
        if self.whitespace_pattern is not None:
            _text("whitespace_pattern", MAX_REGEX_CHARS)(self.whitespace_pattern)
        text = _TEXTS[form](getattr(self, form))
        if form == "json":
            text = json.dumps(plain_schema(json.loads(text), self.disable_additional_properties))
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "text", text)

    form: Form = "json"
    text: str = ""


def plain_schema(schema: Any, closes: bool = False) -> Any:
    """Return a copy of a JSON schema without `format` values that the grammar compiler lacks.

    By JSON Schema, an unknown format does not restrict a value. Keywords are examined at all
    levels, except inside plain values such as `enum` and `default`.

    Args:
        schema: a JSON schema, or a value inside one.
        closes: also set `additionalProperties` to False in every object that has `properties`.
    """
    if isinstance(schema, list):
        return [plain_schema(item, closes) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _OF_NAMES and isinstance(value, dict):
            plain[name] = {key: plain_schema(item, closes) for key, item in value.items()}
        elif name in _VALUES:
            plain[name] = value
        elif name != "format" or not isinstance(value, str) or value in _FORMATS:
            plain[name] = plain_schema(value, closes)
    if closes and isinstance(plain.get("properties"), dict):
        plain["additionalProperties"] = False
    return plain


def _problem(form: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{NAME}.{form} {message}", NAME)


def _object(form: str, noun: str) -> Any:
    """Return a function that validates a JSON object and returns it as JSON text.

    The function takes text or a mapping. It raises InvalidRequest if the value is not a JSON
    object, or exceeds the limits of bytes, entries and levels. Its messages name the field `form`
    ("json") and the expected value `noun` ("a JSON schema").
    """

    def check(value: Any) -> str:
        text = value
        if not isinstance(value, str):
            try:
                text = json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                raise _problem(form, f"must be {noun}") from None
        if len(text.encode(errors="replace")) > MAX_SCHEMA_BYTES:
            raise _problem(form, f"takes at most {MAX_SCHEMA_BYTES} bytes")
        try:
            result = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _problem(form, f"is not JSON: {error}"[:200]) from None
        if not isinstance(result, dict):
            raise _problem(form, f"must be {noun}, an object")
        _check_size(result, form)
        return json.dumps(result)

    return check


def _check_size(schema: Any, form: str) -> None:
    """Raise InvalidRequest if a decoded JSON value has too many levels or too large containers.

    `form` is the name of the checked field in the error message.
    """
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict | list):
                if len(node) > MAX_SCHEMA_ITEMS:
                    raise _problem(form, f"takes at most {MAX_SCHEMA_ITEMS} entries at one place")
                below.extend(node.values() if isinstance(node, dict) else node)
        if not below:
            return
        level = below
    raise _problem(form, f"takes at most {MAX_SCHEMA_DEPTH} levels")


def _text(form: str, most: int) -> Any:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= most:
            raise _problem(form, f"must be a text of 1 to {most} characters")
        return value

    return check


def _choices(value: Any) -> str:
    if not isinstance(value, list | tuple) or not all(isinstance(choice, str) for choice in value):
        raise _problem("choice", "must be a list of texts")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise _problem("choice", f"takes 1 to {MAX_CHOICES} texts")
    if not all(1 <= len(choice) <= MAX_CHOICE_CHARS for choice in value):
        raise _problem("choice", f"takes texts of 1 to {MAX_CHOICE_CHARS} characters")
    if sum(map(len, value)) > MAX_SCHEMA_BYTES:
        raise _problem("choice", f"takes at most {MAX_SCHEMA_BYTES} characters in all")
    return json.dumps(list(dict.fromkeys(value)))


def _any_object(value: Any) -> str:
    if value is not True:
        raise _problem("json_object", "must be true")
    return "{}"


_TEXTS = {
    "json": _object("json", "a JSON schema"),
    "json_object": _any_object,
    "regex": _text("regex", MAX_REGEX_CHARS),
    "choice": _choices,
    "grammar": _text("grammar", MAX_SCHEMA_BYTES),
    "structural_tag": _object("structural_tag", "a structural tag"),
}
