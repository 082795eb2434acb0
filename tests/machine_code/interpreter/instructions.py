"""All instructions that are more than an expression, by the pattern of their names."""

from __future__ import annotations

import re

from tests.machine_code.interpreter.asynchronous_instructions import ASYNCHRONOUS_PATTERNS
from tests.machine_code.interpreter.control_instructions import CONTROL_PATTERNS
from tests.machine_code.interpreter.data_instructions import DATA_PATTERNS
from tests.machine_code.interpreter.matrix_instructions import MATRIX_PATTERNS

PATTERNS = tuple(
    (re.compile(pattern), function)
    for patterns in (DATA_PATTERNS, CONTROL_PATTERNS, MATRIX_PATTERNS, ASYNCHRONOUS_PATTERNS)
    for pattern, function in patterns
)
