"""Runs the tests of models with real weights.

python -m tests.real [--long] [--folder DIR] [arguments of pytest]
"""

from __future__ import annotations

import sys

import pytest

NAMES = {"--folder": "--real-folder"}

if __name__ == "__main__":
    words = [NAMES.get(word, word) for word in sys.argv[1:]]
    places = [] if any(word.startswith("tests/") for word in words) else ["tests/real"]
    sys.exit(pytest.main(["-n", "0", *places, *words]))
