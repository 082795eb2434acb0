"""Operations outside of any program compiled in less time, where their code is not looked at."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import compiler

from tests.support.fast_compile import FAST


@contextmanager
def quick_operations() -> Generator[None]:
    """Let JAX compile with the options of `FAST` unless a call names its own.

    A test that runs a model or a converter operation by operation compiles hundreds of them, and
    each takes half of the time. They are forgotten at the end, so that no later test has them.
    """
    get_compile_options = compiler.get_compile_options

    def quick_options(*arguments: Any, **options: Any) -> Any:
        options["env_options_overrides"] = options.get("env_options_overrides") or FAST
        return get_compile_options(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick_options)
        try:
            yield
        finally:
            jax.clear_caches()
