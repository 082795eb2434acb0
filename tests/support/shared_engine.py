"""The one tiny model that the tests of a process share, loaded and compiled once.

A plugin of pytest, which tests/conftest.py registers in processes that run tests. Tests of
schedules, stops, failures and streams take `loaded`, or `llm` over it. A test of `tests/engine`
whose engine loads another model has the marker `own_engine`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxserve import SamplingParams

if TYPE_CHECKING:  # other modules are imported by the first test that uses them: seconds
    from jaxserve import LLM
    from jaxserve.start.loaded import Loaded

GREEDY = SamplingParams(temperature=0, max_tokens=12)
OWN = "own_engine"
CHECKED = "tests/engine/"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.checkpoint import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> Loaded:
    """Return a model with its programs, over which engines may run one after the other."""
    from jaxserve import EngineConfig
    from jaxserve.start.start import load
    from tests.support.quick_code import quick_programs

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


@dataclass
class Canary:
    """A request before and after: its tokens must not change, and no page may be in use."""

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
    from jaxserve import LLM

    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    with LLM(loaded) as engine:
        yield engine


@pytest.fixture
def canary(llm: LLM) -> Canary:
    return Canary(llm)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test of `CHECKED` without the marker whose engine loads a model."""
    if not item.nodeid.startswith(CHECKED) or item.get_closest_marker(OWN):
        return (yield)
    from jaxserve.engine import engine

    load = engine.load

    def load_another(*arguments: Any, **options: Any) -> Loaded:
        loaded = load(*arguments, **options)  # a refusal loads no model
        loaded.runner.close()
        pytest.fail("this test loads a model of its own: use `loaded`, or mark it own_engine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load", load_another)
        return (yield)
