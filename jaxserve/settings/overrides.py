"""JSON objects as settings, and `hf_overrides`, which replaces fields of config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxserve.errors import InvalidRequest

MAX_BYTES = 1 << 20
# Although its name ends in _config, it is not the configuration of a model and is not merged.
_NO_MODEL = "quantization_config"


def check_fields(values: dict[str, Any], settings: type[Any], name: str) -> None:
    """Check that a JSON object has only names of a dataclass's fields.

    Args:
        values: the JSON object.
        settings: the dataclass.
        name: name of the setting, for the error.

    Raises:
        InvalidRequest: names the setting, the unknown field, and the allowed fields.
    """
    names = [field.name for field in fields(settings)]
    for field in values:
        if field not in names:
            raise InvalidRequest(
                f"{name} has no field {field!r}; its fields are {', '.join(names)}", name
            )


def json_object(value: Any, name: str) -> dict[str, Any] | None:
    """Return the value of a setting as a JSON object, or None if the value is None.

    Args:
        value: a dict of JSON values, or JSON text, of at most 1 MiB.
        name: name of the setting, for the error.

    Raises:
        InvalidRequest: the value is not a JSON object. The message contains the name and the
            reason.
    """
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if len(text) > MAX_BYTES:
            raise InvalidRequest(f"{name} must have at most {MAX_BYTES} bytes", name)
        result = json.loads(text, parse_constant=_refuse)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{name} must be a JSON object ({str(error)[:100]})", name) from None
    if not isinstance(result, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {type(result).__name__}", name)
    if not isinstance(value, str) and result != value:
        raise InvalidRequest(f"{name} must have texts for names", name)
    return result


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the fields of a config.json after `hf_overrides` has replaced some of them.

    As in vLLM, an object replaces the whole former object (such as `rope_scaling`). Only an object
    for the configuration of a nested model (such as `text_config`) is merged into the former one,
    at every depth.

    Args:
        raw: fields of the checkpoint's config.json.
        overrides: value of the setting hf_overrides.

    Raises:
        InvalidRequest: the value for a nested configuration is not an object.
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
    """Return whether a field name of config.json is that of a nested model's configuration.

    Such a name ends in _config and is not quantization_config.
    """
    return name.endswith("_config") and name != _NO_MODEL


def _merged(former: Any, value: Any) -> Any:
    if not isinstance(former, dict) or not isinstance(value, dict):
        return value
    return former | {name: _merged(former.get(name), inner) for name, inner in value.items()}
