"""All instructions that are more than an expression, by the pattern of their names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from scripts.machine_code.interpreter.asynchronous_instructions import ASYNCHRONOUS_PATTERNS
from scripts.machine_code.interpreter.control_instructions import CONTROL_PATTERNS
from scripts.machine_code.interpreter.data_instructions import DATA_PATTERNS
from scripts.machine_code.interpreter.matrix_instructions import MATRIX_PATTERNS

Pattern = tuple[re.Pattern[str], Callable[..., Any]]

PATTERNS: tuple[Pattern, ...] = tuple(
    (re.compile(pattern), function)
    for patterns in (DATA_PATTERNS, CONTROL_PATTERNS, MATRIX_PATTERNS, ASYNCHRONOUS_PATTERNS)
    for pattern, function in patterns
)


@functools.cache
def find_instruction(name: str) -> tuple[Callable[..., Any], re.Match[str]] | None:
    """Return the function that translates instructions of a name, and the groups of its pattern."""
    for pattern, function in PATTERNS:
        found = pattern.fullmatch(name)
        if found:
            return function, found
    return None
