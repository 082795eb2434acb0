"""EngineArgs and AsyncEngineArgs: the settings of an engine with vLLM's class names."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from jaxserve.settings.compat import ENGINE, served, unserved
from jaxserve.settings.config import EngineConfig


class EngineArgs(SimpleNamespace):
    """The arguments of an engine as attributes that can be changed before use.

    Args:
        model: see `EngineConfig`.
        **settings: other fields of `EngineConfig`, and unsupported settings of vLLM with neutral
            values.

    Raises:
        TypeError: an argument is unknown.
    """

    def __init__(self, model: Any = None, **settings: Any) -> None:
        known_names = {field.name: field.default for field in fields(EngineConfig)}
        others = sorted(settings.keys() - known_names.keys())
        unknown = [name for name in others if name not in unserved(ENGINE)]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no argument {unknown[0]!r}")
        super().__init__(**known_names | {"model": model} | settings)

    def create_engine_config(self, *_: Any, **__: Any) -> EngineConfig:
        """Return the checked settings. Arguments of vLLM's method are accepted and ignored.

        Raises:
            InvalidRequest: a setting is out of range or not supported.
        """
        return EngineConfig(**served(vars(self), EngineConfig.__dataclass_fields__))


class AsyncEngineArgs(EngineArgs):
    """The arguments of an engine for asyncio programs, equal to `EngineArgs`."""
