"""JSON schemas over the common keywords, each of which short texts satisfy."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(**properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def some(required: list[str], **properties: Schema) -> Schema:
    """Return the schema of an object of which only some properties are required."""
    return closed(**properties) | {"required": required}


def listed(items: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(most: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most} | more


INTEGER: Schema = {"type": "integer", "minimum": -999, "maximum": 999}
NUMBER: Schema = {"type": "number", "minimum": -99, "maximum": 99}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
TEXT = text()
COLOUR: Schema = {"enum": ["red", "green", "blue"]}

SCALARS: list[Schema] = [
    INTEGER,
    NUMBER,
    BOOLEAN,
    NULL,
    TEXT,
    COLOUR,
    {"const": "fixed"},
    {"const": 42},
    {"const": None},
    {"const": {"a": [1, 2]}},
    {"enum": [1, 2, 3]},
    {"enum": [True, None, "maybe", 0.5]},
    {"enum": ["", " ", "\n", '"', "\\", "ä", "日本"]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": ["string", "boolean"], "maxLength": 4},
    {"type": "integer", "minimum": 0, "maximum": 0},
    {"type": "integer", "minimum": 7, "maximum": 13},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "minimum": -120, "maximum": -8},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    {"type": "number", "minimum": -0.5, "maximum": 0.5},
]

STRINGS: list[Schema] = [
    text(0),
    text(1),
    text(5, minLength=5),
    text(6, minLength=2),
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^[a-z]{3}$",
            "^[A-Z][a-z]{1,6}$",
            "^[0-9]{4}-[0-9]{2}$",
            "^(yes|no|maybe)$",
            "^#[0-9a-f]{6}$",
            "^a?b{0,3}c$",
            "^\\d{1,3}\\.\\d{1,3}$",
            '^[^"]{1,4}$',
            "^(ab){1,3}$",
            "^[ -~]{2,6}$",
            "^\\w{1,5}@\\w{1,5}\\.(com|org)$",
            "^(\\+49|0)[1-9][0-9]{2,5}$",
        )
    ),
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4")),
]

ARRAYS: list[Schema] = [
    listed(INTEGER),
    listed(INTEGER, 1, 1),
    listed(INTEGER, 2, 4),
    listed(TEXT, 0, 2),
    listed(BOOLEAN, 3, 3),
    listed(NULL, 0, 3),
    listed(COLOUR, 1, 3),
    listed(NUMBER, 1, 2),
    listed({"const": "x"}, 0, 5),
    listed(listed(INTEGER, 0, 2), 0, 2),
    listed(listed(listed(BOOLEAN, 1, 1), 1, 2), 1, 2),
    listed(closed(id=INTEGER), 1, 2),
    listed({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, 1, 3),
    listed({"anyOf": [INTEGER, TEXT]}, 1, 3),
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [INTEGER, TEXT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [BOOLEAN], "items": INTEGER, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [COLOUR, COLOUR], "items": False, "minItems": 1},
]

OBJECTS: list[Schema] = [
    closed(),
    closed(a=INTEGER),
    closed(a=INTEGER, b=TEXT),
    closed(a=INTEGER, b=TEXT, c=BOOLEAN, d=NULL),
    closed(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    closed(inner=closed(x=NUMBER, y=NUMBER)),
    closed(a=closed(b=closed(c=closed(d=BOOLEAN)))),
    closed(items=listed(INTEGER, 1, 3)),
    closed(items=listed(closed(k=COLOUR, v=INTEGER), 1, 2)),
    closed(a={"const": 1}, b={"const": 2}),
    closed(kind=COLOUR, size={"enum": ["S", "M", "L"]}),
    closed(**{"with space": INTEGER, "ünïcode": BOOLEAN}),
    closed(**{'quo"te': INTEGER, "back\\slash": BOOLEAN}),
    closed(**{"": INTEGER}),
    closed(**{f"key{number}": BOOLEAN for number in range(12)}),
    some([], a=INTEGER, b=INTEGER),
    some(["a"], a=INTEGER, b=TEXT),
    some(["b"], a=INTEGER, b=TEXT, c=BOOLEAN),
    some(["c"], a=INTEGER, b=TEXT, c=BOOLEAN),
    some(["a", "c"], a=INTEGER, b=closed(x=INTEGER), c=listed(BOOLEAN, 0, 2)),
    {"type": "object", "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": INTEGER},
        "required": ["a"],
        "additionalProperties": BOOLEAN,
        "maxProperties": 3,
    },
    {
        "type": "object",
        "title": "Person",
        "description": "ignored",
        "properties": {"name": TEXT | {"description": "who"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    closed(when={"type": "string", "format": "date"}, ok=BOOLEAN),
    closed(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"}, count=INTEGER),
    closed(tags=listed(text(4, minLength=1), 0, 3), rating={"enum": [1, 2, 3, 4, 5]}),
]

COMBINED: list[Schema] = [
    {"anyOf": [INTEGER, TEXT]},
    {"anyOf": [NULL, INTEGER]},
    {"anyOf": [closed(a=INTEGER), closed(b=TEXT)]},
    {"anyOf": [{"const": 1}, {"const": "one"}, listed(INTEGER, 1, 1)]},
    {"anyOf": [listed(INTEGER, 0, 2), closed(list=listed(INTEGER, 0, 2))]},
    closed(value={"anyOf": [INTEGER, BOOLEAN, NULL]}),
    closed(shape={"anyOf": [closed(r=NUMBER), closed(w=NUMBER, h=NUMBER)]}),
    {"anyOf": [closed(kind={"const": "a"}, x=INTEGER), closed(kind={"const": "b"}, y=TEXT)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 8}]},
    {"allOf": [text(6), {"type": "string", "minLength": 2}]},
    {"oneOf": [{"const": "left"}, {"const": "right"}]},
    {"oneOf": [closed(a=INTEGER), closed(b=INTEGER)]},
]


def _with_definitions(schema: Schema, **definitions: Schema) -> Schema:
    return schema | {"$defs": definitions}


POINT = {"$ref": "#/$defs/point"}
REFERENCES: list[Schema] = [
    _with_definitions(POINT, point=closed(x=INTEGER, y=INTEGER)),
    _with_definitions(closed(a=POINT, b=POINT), point=closed(x=INTEGER)),
    _with_definitions(listed(POINT, 1, 2), point=closed(x=INTEGER, y=BOOLEAN)),
    _with_definitions(
        closed(from_={"$ref": "#/$defs/city"}, to={"$ref": "#/$defs/city"}),
        city={"enum": ["Oslo", "Rome", "Lima"]},
    ),
    _with_definitions(
        {"$ref": "#/$defs/outer"}, outer=closed(inner={"$ref": "#/$defs/inner"}), inner=INTEGER
    ),
    _with_definitions(
        {"$ref": "#/$defs/tree"},
        tree=closed(value=BOOLEAN, next={"anyOf": [NULL, {"$ref": "#/$defs/tree"}]}),
    ),
    {"definitions": {"flag": BOOLEAN}} | closed(on={"$ref": "#/definitions/flag"}),
]


def schemas() -> list[Schema]:
    """Return all schemas: each kind alone, and small ones inside objects and arrays."""
    small = [*SCALARS, *STRINGS]
    return [
        *small,
        *ARRAYS,
        *OBJECTS,
        *COMBINED,
        *REFERENCES,
        *(closed(value=one, done=BOOLEAN) for one in small),
        *(listed(one, 1, 2) for one in small[::2]),
    ]
