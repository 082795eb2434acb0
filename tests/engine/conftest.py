from collections.abc import Generator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from jax.stages import Lowered

from jaxserve.start.programs.store import ProgramStore
from jaxserve.weights import shapes
from tests.support.fast_compile import FAST
from tests.support.quick_code import quick_programs


@pytest.fixture(scope="module")
def quick_code() -> Generator[None]:
    """Compile quickly, for modules that do not check compiled code.

    See `tests.support.quick_code`.
    """
    with quick_programs():
        yield


@pytest.fixture
def quick_sampler() -> Generator[None]:
    """Compile the sampler quickly, for tests of the results of layers.

    The sampler takes half the compilation time of an engine of a small model.
    """
    kinds = ("state", "sampler", "score", "project", "load slot", "set ")
    compile_program = ProgramStore._compile

    def compile_quick(store: ProgramStore, lowered: Any, name: str) -> Any:
        if name.startswith(kinds) and isinstance(lowered, Lowered):
            quick = partial(lowered.compile, compiler_options=FAST)
            lowered = SimpleNamespace(compile=quick)
        return compile_program(store, lowered, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramStore, "_compile", compile_quick)
        yield


@pytest.fixture(scope="module")
def shapes_once() -> Generator[None]:
    """Make the description of a model once in a module whose tests plan for the same models often.

    A description is read only, and that of a large model takes a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "abstract_model", cache(shapes.abstract_model))
        yield
