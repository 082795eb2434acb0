"""Typed access to the fields of structural tags. Invalid fields raise ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def from_older(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form of a structural tag (`structures`, `triggers`) to a format."""
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
    """Return the string field `name`."""
    value = form.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value


def list_field(form: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list field `name`."""
    value = form.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value


def texts_field(form: Mapping[str, Any], name: str) -> list[str]:
    """Return the field `name`, a list of non-empty strings, [] by default."""
    value = form.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name} must be a list of texts that are not empty")
    return value


def flag_field(form: Mapping[str, Any], name: str) -> bool:
    """Return the boolean field `name`, False by default."""
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value


def number_field(form: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return the integer field `name`, which must be from `low` to `high`."""
    value = form.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer of {low} to {high}")
    return value


def content_field(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the format in the field `content`."""
    content = form.get("content")
    if not isinstance(content, Mapping):
        raise ValueError("content must be a format, an object with a type")
    return content


def elements_field(form: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the formats in the field `elements`, at least one."""
    elements = list_field(form, "elements")
    if not elements or not all(isinstance(element, Mapping) for element in elements):
        raise ValueError("elements must be a list of formats, at least one")
    return elements


def tags_field(form: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tags in the field `tags`, at least one."""
    tags = list_field(form, "tags")
    if not tags or not all(isinstance(t, Mapping) and t.get("type", "tag") == "tag" for t in tags):
        raise ValueError("tags must be a list of tags, at least one")
    return tags
