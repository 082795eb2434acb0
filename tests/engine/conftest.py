from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.engine.loading import Loaded, load
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
