"""Fields that take the place of a checkpoint's config.json: the setting `hf_overrides`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxserve.errors import InvalidRequest

MAX_BYTES = 1 << 20
# Its objects are replaced whole, as those of all fields that hold no model's configuration.
_NO_MODEL = "quantization_config"


def check_fields(given: dict[str, Any], settings: type[Any], name: str) -> None:
    """Refuse a JSON object of a setting with a field that its class has not.

    Raises:
        InvalidRequest: naming the setting, the field, and those that there are.
    """
    names = [field.name for field in fields(settings)]
    for field in given:
        if field not in names:
            raise InvalidRequest(
                f"{name} has no field {field!r}; its fields are {', '.join(names)}", name
            )


def json_object(value: Any, name: str) -> dict[str, Any] | None:
    """Return a setting that holds a JSON object, given as one or as its text; None if absent.

    Raises:
        InvalidRequest: naming the setting, and what is wrong with it.
    """
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if len(text) > MAX_BYTES:
            raise InvalidRequest(f"{name} must have at most {MAX_BYTES} bytes", name)
        found = json.loads(text, parse_constant=_refuse)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{name} must be a JSON object ({str(error)[:100]})", name) from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {type(found).__name__}", name)
    if not isinstance(value, str) and found != value:
        raise InvalidRequest(f"{name} must have texts for names", name)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the fields of a config.json with others in their place.

    As in vLLM, an object replaces another whole (`rope_scaling`), except the configuration of a
    model inside (`text_config`), into which it is merged at every depth.

    Args:
        raw: the checkpoint's fields.
        overrides: the setting.

    Raises:
        InvalidRequest: a nested configuration is to become something else than an object.
    """
    fields = dict(raw)
    for name, value in (json_object(overrides, "hf_overrides") or {}).items():
        former = fields.get(name)
        nested = is_nested(name) and isinstance(former, dict)
        if nested and not isinstance(value, dict):
            raise InvalidRequest(
                f"hf_overrides.{name} must be an object, as in config.json", "hf_overrides"
            )
        fields[name] = _merged(former, value) if nested else value
    return fields


def is_nested(name: str) -> bool:
    """Return whether a field holds the configuration of a model inside."""
    return name.endswith("_config") and name != _NO_MODEL


def _merged(former: Any, value: Any) -> Any:
    if not isinstance(former, dict) or not isinstance(value, dict):
        return value
    return former | {name: _merged(former.get(name), inner) for name, inner in value.items()}
