"""EngineArgs and AsyncEngineArgs: an engine's settings under vLLM's names for them."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from jaxserve.settings.compat import ENGINE, served, unserved
from jaxserve.settings.config import EngineConfig


class EngineArgs(SimpleNamespace):
    """The arguments of an engine, as attributes; a namespace that may be changed until it is used.

    Args:
        model: as for `EngineConfig`.
        **settings: further fields of `EngineConfig`, and vLLM's names of unsupported settings, of
            which only neutral values pass.

    Raises:
        TypeError: a name that neither has.
    """

    def __init__(self, model: Any = None, **settings: Any) -> None:
        known_names = {field.name: field.default for field in fields(EngineConfig)}
        others = sorted(settings.keys() - known_names.keys())
        unknown = [name for name in others if name not in unserved(ENGINE)]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no argument {unknown[0]!r}")
        super().__init__(**known_names | {"model": model} | settings)

    def create_engine_config(self, *_: Any, **__: Any) -> EngineConfig:
        """Return the settings, checked. What else vLLM takes here changes nothing.

        Raises:
            InvalidRequest: a setting is out of range or not supported.
        """
        return EngineConfig(**served(vars(self), EngineConfig.__dataclass_fields__))


class AsyncEngineArgs(EngineArgs):
    """The arguments of an engine for asyncio programs: the same ones."""
