from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jax.stages import Lowered

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.start.loaded import Loaded
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.start import load
from jaxserve.weights import shapes
from scripts.lib.fast_compile import FAST
from tests.support.checkpoint import save_checkpoint
from tests.support.quick_code import quick_programs

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> Loaded:
    """Compiled once; every engine of these tests runs on it."""
    config = EngineConfig(
        model=checkpoint,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        decode_sizes=(4,),
        token_sizes=(32,),
        num_gpu_blocks_override=30,
        check_invariants=True,
    )
    with quick_programs():
        return load(config)


@pytest.fixture(scope="module")
def quick_code() -> Generator[None]:
    """For modules that do not look at the code of programs: see `tests.support.quick_code`."""
    with quick_programs():
        yield


@pytest.fixture
def quick_sampler() -> Generator[None]:
    """Compile quickly what is no step of the model, for tests of what the layers compute.

    Half the time that an engine of a small model takes to compile is that of its sampler.
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


@dataclass
class Canary:
    """A request before and after: its tokens must not change, and nothing may be held."""

    llm: LLM

    def __post_init__(self) -> None:
        self.before = self._sing()

    def _sing(self) -> list[int]:
        [output] = self.llm.generate("canary", GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids

    def check(self) -> None:
        assert self._sing() == self.before
        self.llm.check()
        stats = self.llm.stats()
        assert (stats.pages_in_use, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_compiles == 0


@pytest.fixture
def llm(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    with LLM(loaded) as engine:
        yield engine


@pytest.fixture
def canary(llm: LLM) -> Canary:
    return Canary(llm)
