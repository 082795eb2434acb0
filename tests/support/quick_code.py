"""Programs compiled in less time, for tests that do not look at the code that XLA makes.

Their operations are those that users have. Tests of answers to the bit and of what programs hold
compile as users do.
"""

from __future__ import annotations

import os
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest

from jaxserve.execution.start.programs import ProgramStore
from scripts.lib.fast_compile import FAST

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items())


def compile_quickly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have processes of an environment, or this one before its first program, compile quickly."""
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {FLAGS}".strip()


@contextmanager
def quick_programs() -> Generator[None]:
    """Let engines of this process compile quickly while the context lasts."""

    class Lowered:
        def __init__(self, lowered: Any) -> None:
            self.compile = lambda: lowered.compile(compiler_options=FAST)

    compile_program = ProgramStore._compile

    def compile_quick(store: ProgramStore, lowered: Any, name: str) -> Any:
        return compile_program(store, Lowered(lowered), name)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramStore, "_compile", compile_quick)
        yield
