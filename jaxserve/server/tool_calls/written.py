"""WrittenCall: a call that was read; Tools: the ones that may be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The schema of the arguments of each tool that may be called, by its name.
Tools = Mapping[str, dict[str, Any]]
NAME = r"[A-Za-z0-9_.-]{1,128}"


@dataclass(frozen=True)
class WrittenCall:
    """A call, or the beginning of one that a grammar forms.

    Attributes:
        name: of the tool.
        arguments: JSON text of an object, or its beginning.
        id: as the model wrote it; None where it writes none that templates need.
    """

    name: str
    arguments: str
    id: str | None = None
