"""Whole steps of the engine as a card would execute them: tokens are those of the engine on CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.machine_code.case import Capability
from tests.machine_code.steps.engine import RecordedEngine, Recording
from tests.machine_code.steps.execution import Execution
from tests.machine_code.steps.kept import FILE, MOST_BYTES, SETUP, KeptPrograms
from tests.machine_code.steps.schedules import SCHEDULES
from tests.machine_code.xla_programs import Executable

Executables = Callable[[Capability], dict[str, Executable]]
Engines = Callable[[int], RecordedEngine]


@pytest.fixture(scope="module")
def kept() -> KeptPrograms:
    return KeptPrograms.read()


@pytest.fixture(scope="module")
def executables(kept: KeptPrograms) -> Executables:
    return cache(kept.executables)


@pytest.fixture(scope="module")
def engines() -> Engines:
    """Engines on the CPU by the steps of their launches."""
    return cache(lambda num_steps: RecordedEngine(SETUP, num_steps))


def record(engines: Engines, name: str) -> Recording:
    schedule = SCHEDULES[name]
    engine = engines(SETUP.launch_steps if schedule.has_long_launches else 1)
    return engine.serve(schedule)


def test_what_is_kept_is_of_the_source(kept: KeptPrograms) -> None:
    kept.check()
    assert FILE.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize(
    ("capability", "name", "programs", "tokens"),
    [
        ((9, 0), "several", {"decode 4, up to 4 steps", "32 tokens, 4 rows", "load slot"}, 29),
        ((8, 0), "few-greedy", {"greedy decode 4", "32 tokens, 4 rows"}, 7),
        ((8, 0), "few-edited", {"decode 4", "set allowed, 1", "load slot"}, 6),
    ],
)
def test_tokens_are_those_of_the_engine_on_the_cpu(
    capability: Capability,
    name: str,
    programs: set[str],
    tokens: int,
    executables: Executables,
    engines: Engines,
) -> None:
    """In a random order of launches."""
    recording = record(engines, name)
    assert programs <= {call.program for call in recording.calls}
    outcome = Execution(recording, executables(capability), np.random.default_rng(0)).run()
    assert outcome.compared.faults == []
    assert outcome.calls == len(recording.calls)
    # Of a step in flight when its row ended, tokens are compared that the engine drops.
    assert outcome.compared.tokens == tokens >= sum(map(len, recording.answers.values()))
    assert outcome.compared.logprobs < 1e-5 and outcome.compared.pages < 1e-5
    kernels = {"kv_write", "paged_decode_split", "paged_decode_merge", "ragged_attention"}
    assert kernels <= outcome.kernels
