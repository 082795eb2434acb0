"""EngineArgs and AsyncEngineArgs: the settings of an engine with vLLM's class names."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from jaxserve.settings.compat import ENGINE, served, unserved
from jaxserve.settings.config import EngineConfig


class EngineArgs(SimpleNamespace):
    """The settings of an engine as attributes that can be changed before an engine is created.

    It has vLLM's class name. All fields of `EngineConfig` are attributes with their defaults.

    Args:
        model: folder, file or hub name of the model. None is the bundled model.
        **settings: other fields of `EngineConfig`, and settings of vLLM that jaxserve does not
            support, with values that have no effect.

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
        """Return the settings of this object as a validated `EngineConfig`.

        All arguments are ignored. They allow calls that pass the arguments of vLLM's method.

        Raises:
            InvalidRequest: a setting is out of range or not supported.
        """
        return EngineConfig(**served(vars(self), EngineConfig.__dataclass_fields__))


class AsyncEngineArgs(EngineArgs):
    """The settings of an engine for `AsyncLLM.from_engine_args`, identical to `EngineArgs`."""
