"""JSON schemas in a form that grammars can enforce, without malformed and unsupported keywords."""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

_log = logging.getLogger(__name__)

# Type names of other notations, in lower case.
TYPE_NAMES = {
    "str": "string",
    "text": "string",
    "enum": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_TYPES = frozenset("string number integer boolean object array null".split())
# Keywords whose values are schemas by name, lists of schemas, or one schema.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTED = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_SINGLE = frozenset(("additionalProperties", "items"))
# Keywords of JSON Schema that llguidance does not enforce.
_UNSUPPORTED = frozenset(
    "not if then else propertyNames uniqueItems contains minContains maxContains dependentRequired "
    "dependentSchemas dependencies unevaluatedProperties unevaluatedItems $dynamicRef "
    "$dynamicAnchor $recursiveRef $recursiveAnchor $schema".split()
)
# Keywords that remain if a schema contradicts itself: _SHAPE, or else _BONES, or else an empty set.
_SHAPE = (*_NAMED, *_LISTED, *_SINGLE, "type", "required", "enum", "const", "$ref")
_BONES = ("properties", "$defs", "definitions", "anyOf", "oneOf", "items", "type", "$ref")

_MAX_PATTERNS = 64  # distinct patterns that are compiled separately
_MAX_TRIES = 64
_MAX_CACHED = 256
_MAX_CACHED_CHARS = 1 << 20
_INDEX = re.compile("[0-9]{1,9}")  # Python refuses to parse thousands of digits
_GONE = object()
Path = tuple[str | int, ...]
# Function from a schema and llguidance's `lenient` to the error of compiling it, or None.
Problem = Callable[[dict[str, Any], bool], str | None]


class UnenforceableSchema(ValueError):
    """Error: a JSON schema has a keyword that grammars cannot enforce. The message has its path."""


class EnforceableSchemas:
    """Thread-safe cache of JSON schemas in the form that grammars can enforce; see `enforceable`.

    Args:
        problem: function that returns the error of compiling a schema, or None.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._lock = threading.Lock()
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._chars = 0

    def get(self, schema: dict[str, Any], is_strict: bool, owner: str) -> dict[str, Any]:
        """Return the form of a JSON schema that grammars can enforce, from the cache or newly
        computed.

        Args:
            is_strict: True to refuse a schema with a keyword that cannot be enforced, not to reduce
                it.
            owner: name of the schema's owner in the log.

        Raises:
            UnenforceableSchema: the schema is strict, and a keyword cannot be enforced.
        """
        text = json.dumps([schema, is_strict])
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
                return self._known[text]
        form = enforceable(schema, is_strict, owner, self._problem)
        with self._lock:
            if text not in self._known:
                self._known[text] = form
                self._chars += len(text)
            while len(self._known) > _MAX_CACHED or self._chars > _MAX_CACHED_CHARS:
                self._chars -= len(self._known.popitem(last=False)[0])
        return form


def enforceable(
    schema: dict[str, Any], is_strict: bool, owner: str, problem: Problem
) -> dict[str, Any]:
    """Return the form of a JSON schema that grammars can enforce.

    Malformed and unsupported keywords are removed and logged. Names and types of properties remain.
    A schema without such keywords is returned unchanged.

    Args:
        is_strict: True to refuse a schema with such keywords, not to reduce it.
        owner: name of the schema's owner in the log.
        problem: function from a schema and llguidance's option `lenient` to the error of compiling
            it, or None.

    Raises:
        UnenforceableSchema: the schema is strict, and a keyword cannot be enforced.
    """
    reason, faults = problem(schema, False), _Faults(schema)
    if reason is None and any(map(faults.is_loop, faults.places)):
        reason = "a reference leads back to itself"
    if reason is None:
        return schema
    reduced, left_out = _without_faults(schema, _regex_check(problem))
    if is_strict:
        if problem(reduced, False) is not None:
            left_out.insert(0, shown(_culprit(reduced, problem, False)))
        raise UnenforceableSchema(f"{', '.join(left_out[:5])[:300]}: {reason}")
    left_out = left_out or [reason]
    forms = [reduced]
    if problem(reduced, True) is not None:
        place = _culprit(reduced, problem, True)
        for path in [place, ()] if place else [()]:
            forms += [_reduced_at(reduced, path, keywords) for keywords in (_SHAPE, _BONES, ())]
        left_out.append(f"limits that contradict each other at {shown(place)}")
    form = next((form for form in forms if problem(form, True) is None), {})
    _log.warning("the grammar for %s leaves out: %s", owner[:200], ", ".join(left_out)[:500])
    return form


def well_formed(schema: Any) -> Any:
    """Return a JSON schema without malformed keywords, for chat templates that read the schema.

    A schema without malformed keywords is returned itself, not as a copy.
    """
    return _without_faults(schema, None)[0]


def first_line(message: str) -> str:
    """Return the first line of a compiler's error message, and its first line that begins with
    "error:".
    """
    lines = [line.strip() for line in message.strip().splitlines()] or ["it cannot be compiled"]
    if lines[0] == "NoExtensionBias":  # llguidance's term
        return "no text satisfies it"
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *reasons[:1]])[:200]


def _regex_check(problem: Problem) -> Callable[[Any], bool]:
    # The cache limits the number of compilations. Further patterns count as invalid.
    verdicts: dict[str, bool] = {}

    def check(pattern: Any) -> bool:
        if not isinstance(pattern, str):
            return False
        if pattern not in verdicts and len(verdicts) < _MAX_PATTERNS:
            verdicts[pattern] = problem({"type": "string", "pattern": pattern}, False) is None
        return verdicts.get(pattern, False)

    return check


def _without_faults(schema: Any, is_regex: Callable[[Any], bool] | None) -> tuple[Any, list[str]]:
    # With `is_regex` None, only malformed values are faults, not keywords that grammars cannot
    # enforce.
    left_out: list[str] = []
    # Removing a fault may leave a reference without target, which is another fault.
    while faults := _Faults(schema, is_regex).found:
        schema = copy.deepcopy(schema)
        left_out += [shown(path) for path, _ in faults]
        for path, value in faults:
            _put(schema, path, value)
    return schema, left_out


class _Faults:
    """Search for faults of a JSON schema: malformed keywords, and keywords that grammars cannot
    enforce.

    Args:
        is_regex: function that returns whether grammars can enforce a pattern. With None, only
            malformed keywords are faults.
    """

    def __init__(self, root: Any, is_regex: Callable[[Any], bool] | None = None) -> None:
        self._root = root
        self._is_regex = is_regex
        self._loops: dict[Path, bool] = {}
        # Path and replacement of each fault. `_GONE` removes the value.
        self.found: list[tuple[Path, Any]] = []
        self.places: list[Path] = []  # paths of all schemas that were visited
        self._waiting: list[tuple[Path, Any]] = [((), root)]
        seen: set[int] = set()
        while self._waiting:
            path, node = self._waiting.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self.places.append(path)
            for name, value in node.items():
                self._keyword((*path, name), value, node)

    def _keyword(self, path: Path, value: Any, node: dict[str, Any]) -> None:
        name = str(path[-1])
        if name in _NAMED:
            self._schemas(path, value, dict)
        elif name in _LISTED or (name == "items" and isinstance(value, list)):
            self._schemas(path, value, list)
        elif name in _SINGLE:
            if not isinstance(value, dict | bool):
                self.found.append((path, {"true": True, "false": False}.get(str(value), _GONE)))
            self._waiting.append((path, value))
        elif not _fits(name, value, node):
            self.found.append((path, _GONE))
        elif self._is_regex is not None:
            self._support(path, value, node)

    def _schemas(self, path: Path, value: Any, kind: type) -> None:
        if not isinstance(value, kind) or (path[-1] in ("anyOf", "oneOf", "allOf") and not value):
            self.found.append((path, _GONE))
            return
        for key, inner in value.items() if kind is dict else enumerate(value):
            place = (*path, key)
            is_pattern = path[-1] == "patternProperties" and self._is_regex is not None
            if is_pattern and not self._is_regex(key):  # type: ignore[misc]
                self.found.append((place, _GONE))
            elif not isinstance(inner, dict | bool):
                self.found.append((place, {}))
            self._waiting.append((place, inner))

    def _support(self, path: Path, value: Any, node: dict[str, Any]) -> None:
        """Record a fault if grammars do not support a well-formed keyword of a schema.

        Args:
            path: path of the keyword in the whole schema.
            value: value of the keyword.
            node: schema with the keyword.
        """
        name = path[-1]
        assert self._is_regex is not None
        if name in _UNSUPPORTED or (name == "pattern" and not self._is_regex(value)):
            self.found.append((path, _GONE))
        elif name == "type":
            types = [TYPE_NAMES.get(kind.lower(), kind.lower()) for kind in _listed(value)]
            if not types or not _TYPES.issuperset(types):
                self.found.append((path, _GONE))
            elif types != _listed(value):
                self.found.append((path, types if isinstance(value, list) else types[0]))
        elif name == "required" and node.get("additionalProperties") in (False, "false"):
            declared = node.get("properties")
            declared_names = [
                key for key in value if isinstance(declared, dict) and key in declared
            ]
            if declared_names != value and not node.get("patternProperties"):
                self.found.append((path, declared_names))
        elif name == "$ref":
            self._reference(path, value)

    def _reference(self, path: Path, value: str) -> None:
        place = place_of(value)
        if place is not None:
            target = value_at(self._root, place)
            if isinstance(target, dict | bool) and not self.is_loop(place):
                self._waiting.append((place, target))
                return
        elif value in self._names():
            return
        self.found.append((path, _GONE))

    def is_loop(self, start: Path) -> bool:
        """Return whether following the `$ref` of the schema at a path leads back to the same
        schema.
        """
        chain: dict[Path, None] = {}
        place: Path | None = start
        while place is not None and place not in self._loops and place not in chain:
            chain[place] = None
            node = value_at(self._root, place)
            reference = node.get("$ref") if isinstance(node, dict) else None
            place = place_of(reference) if isinstance(reference, str) else None
        is_loop = place is not None and self._loops.get(place, True)
        self._loops.update(dict.fromkeys(chain, is_loop))
        return is_loop

    def _names(self) -> set[str]:
        names, level = set[str](), [self._root]
        while level:
            node = level.pop()
            if isinstance(node, dict):
                names |= {f"#{node.get('$anchor')}", str(node.get("$id"))}
            level += node.values() if isinstance(node, dict) else []
            level += node if isinstance(node, list) else []
        return names


def _fits(name: str, value: Any, node: dict[str, Any]) -> bool:
    """Return whether the value of a keyword has the type and range that JSON Schema defines."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name.startswith(("min", "max")) and name.endswith(("Length", "Items", "Properties")):
        return is_number and isinstance(value, int) and value >= 0
    if name in ("minimum", "maximum"):
        return is_number
    if name in ("exclusiveMinimum", "exclusiveMaximum"):
        return isinstance(value, int | float)  # booleans in older drafts
    if name == "multipleOf":
        return is_number and value > 0
    if name in ("pattern", "format", "$ref"):
        return isinstance(value, str)
    if name == "enum":
        return isinstance(value, list) and bool(value)
    if name == "required":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if name == "type":
        return all(isinstance(item, str) for item in _listed(value))
    return True


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def value_at(root: Any, path: Path) -> Any:
    """Return the value at a path of names and indices within `root`, or None if there is none."""
    for key in path:
        if isinstance(root, dict):
            root = root.get(key)
        elif isinstance(root, list) and _INDEX.fullmatch(str(key)) and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def place_of(reference: str) -> Path | None:
    """Return the path in a schema that a `$ref` names, or None if the reference is not a JSON
    pointer.
    """
    if reference != "#" and not reference.startswith("#/"):
        return None
    keys = reference.removeprefix("#").split("/")[1:]
    return tuple(unquote(key).replace("~1", "/").replace("~0", "~") for key in keys)


def _put(root: Any, path: Path, value: Any) -> None:
    holder = value_at(root, path[:-1])
    if isinstance(holder, list):
        holder[int(path[-1])] = value
    elif isinstance(holder, dict) and value is _GONE:
        holder.pop(path[-1], None)
    elif isinstance(holder, dict) and path:
        holder[path[-1]] = value


def shown(path: Path) -> str:
    """Return a path in a schema as a JSON pointer, such as "#/properties/a", with keys
    shortened.
    """
    return "#" + "".join(f"/{str(key)[:60]}" for key in path)


def _culprit(schema: dict[str, Any], problem: Problem, lenient: bool) -> Path:
    # The innermost schema without which the rest compiles.
    for path in sorted(_Faults(schema).places, key=len, reverse=True)[:_MAX_TRIES]:
        rest = copy.deepcopy(schema)
        _put(rest, path, {})
        if path and problem(rest, lenient) is None:
            return path
    return ()


def _reduced_at(schema: dict[str, Any], path: Path, keywords: tuple[str, ...]) -> dict[str, Any]:
    part = _reduced(value_at(schema, path), keywords)
    if not path:
        return part
    reduced = copy.deepcopy(schema)
    _put(reduced, path, part)
    return reduced


def _reduced(schema: Any, keywords: tuple[str, ...]) -> Any:
    """Return a copy of a JSON schema with only the given keywords, at all depths."""
    if isinstance(schema, list):
        return [_reduced(item, keywords) for item in schema]
    if not isinstance(schema, dict):
        return schema
    reduced: dict[str, Any] = {}
    for name in keywords:
        if name in schema:
            value = schema[name]
            if name in _NAMED:
                value = {key: _reduced(inner, keywords) for key, inner in value.items()}
            elif name in _LISTED or name in _SINGLE:
                value = _reduced(value, keywords)
            reduced[name] = value
    return reduced
