"""Forms of structured outputs that would take forever without limits."""

from __future__ import annotations

import random
from typing import Any

Form = dict[str, Any]


def words(letters: str, length: int, count: int) -> list[str]:
    return ["".join(random.Random(number).choices(letters, k=length)) for number in range(count)]


def nested(levels: int) -> Form:
    schema: Form = {"type": "integer"}
    for _ in range(levels):
        deeper = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        schema = {"anyOf": [schema, deeper]}
    return schema


def recursive(schema: Form) -> Form:
    return {"$ref": "#/$defs/a", "$defs": {"a": schema}}


SELF = {"$ref": "#/$defs/a"}

HOSTILE: dict[str, Form] = {
    "exponential states": {"regex": "(a|b)*a(a|b){16}"},
    "many wildcards": {"regex": "(.*a){12}.*b.{20}"},
    "nested counts": {"regex": "((a{1,50}){1,50}){1,50}"},
    "backtracking": {"regex": "(a|a)*b{1000000}"},
    "alternatives": {"regex": "|".join(words("ab", 20, 190))},
    "classes": {"regex": r"(\w|\d|\s|\p{L}){1,1000}x"},
    "patterns of keys": {
        "json": {
            "type": "object",
            "patternProperties": {f"^(a|b)*a(a|b){{{n}}}$": {"type": "integer"} for n in range(12)},
        }
    },
    "patterns at once": {
        "json": {"allOf": [{"type": "string", "pattern": f"a.*{c}.*b"} for c in "cdefghijkl"]}
    },
    "long enum": {"json": {"enum": words("abcdef", 50, 1000)}},
    "many properties": {
        "json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    },
    "doubling": {"json": nested(5)},
    "recursive": {
        "json": recursive({"anyOf": [{"type": "array", "items": SELF}, {"type": "integer"}]})
    },
    "endless": {
        "json": recursive({"type": "object", "properties": {"n": SELF}, "required": ["n"]})
    },
    "only itself": {"json": recursive(SELF)},
    "long text": {"json": {"type": "string", "minLength": 60_000, "maxLength": 60_001}},
    "multiples": {
        "json": {"type": "integer", "multipleOf": 99_991, "minimum": 0, "maximum": 10**15}
    },
    "unsatisfiable": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "ambiguous": {"grammar": 'start: start start | "a" | "b"'},
    "more ambiguous": {"grammar": 'start: x\nx: x x x | x x | "a" | "b" | x "c" x |'},
    "doubling rules": {
        "grammar": "start: r0\n"
        + "\n".join(f'r{n}: r{n + 1} r{n + 1} | "a"' for n in range(1000))
        + '\nr1000: "b"'
    },
}
