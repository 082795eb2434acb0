"""Whole steps of the engine as a card would execute them draw the tokens of the engine on CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from jaxserve.execution.batch import unpack
from jaxserve.execution.page_table import ROWS
from scripts.machine_code.compiled_program import Program
from scripts.machine_code.faults import Fault
from scripts.machine_code.xla_programs import Executable, Options, run_program
from tests.machine_code.case import Capability
from tests.machine_code.steps.engine import RecordedEngine, Recording
from tests.machine_code.steps.execution import Execution
from tests.machine_code.steps.judgement import compare_step, differing_tokens, rows_that_count
from tests.machine_code.steps.kept import FILE, MOST_BYTES, SETUP, KeptPrograms
from tests.machine_code.steps.models import MODELS, VOCAB
from tests.machine_code.steps.near_ties import NearTies, noise_of
from tests.machine_code.steps.programs import LOAD_SLOT, SET_ROWS, mask_program
from tests.machine_code.steps.replay import Replay
from tests.machine_code.steps.schedules import SCHEDULES
from tests.support.quick_code import quick_programs

MIXED, DECODE = "32 tokens, 4 rows", "greedy decode 4"
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

    def make(num_steps: int) -> RecordedEngine:
        with quick_programs():
            return RecordedEngine(SETUP, num_steps)

    return cache(make)


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
        ((9, 0), "few-several", {MIXED, "decode 4, up to 4 steps", LOAD_SLOT}, 11),
        # Its programs are executed by `before_decode` too.
        pytest.param((8, 0), "few-greedy", {MIXED, DECODE}, 7, marks=pytest.mark.long),
        ((8, 0), "few-edited", {MIXED, "decode 4", mask_program(1), LOAD_SLOT}, 7),
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
    kernels = {"rope_kv_write", "split_plan", "split_attention", "ragged_attention", "add_norm"}
    assert kernels <= outcome.kernels


@pytest.fixture(scope="module")
def before_decode(executables: Executables, engines: Engines) -> tuple[Recording, list[np.ndarray]]:
    """The calls up to the first decode, and the state that a card has before it."""
    recording = record(engines, "few-greedy")
    first = next(n for n, c in enumerate(recording.calls) if c.program == DECODE)
    recording = dataclasses.replace(recording, calls=recording.calls[: first + 1])
    replay = Replay(executables((8, 0)), recording.weights)
    for call in recording.calls[:-1]:
        replay.run(call)
    return recording, replay.state


def faults_of_decode(
    program: Program, recording: Recording, state: list[np.ndarray], weights: list[np.ndarray]
) -> list[str]:
    """Execute the last call alone by another program. Return its faults."""
    replay = Replay({DECODE: Executable.of(program)}, weights, state=state)
    call, bucket = recording.calls[-1], SETUP.steps()[DECODE]
    try:
        output = replay.run(call)
    except Fault as fault:
        return [str(fault)]
    differs, _ = differing_tokens(call, bucket, output, SETUP.num_slots)
    compared = compare_step(call, bucket, output, replay.state)
    faults = list(compared.faults)
    if differs.any():
        faults.append("tokens differ")
    if compared.pages > 1e-5:
        faults.append(f"pages are off by {compared.pages}")
    return faults


def test_a_launch_that_is_left_out_is_noticed(
    executables: Executables, before_decode: tuple[Recording, list[np.ndarray]]
) -> None:
    """Most leave memory that is read and was never written. kv_write leaves other pages."""
    recording, state = before_decode
    program = executables((8, 0))[DECODE].program
    assert faults_of_decode(program, recording, state, recording.weights) == []
    # The first puts new pages into the page table, and this step brings none.
    for left_out in (1, len(program.commands) // 2, len(program.commands) - 1):
        commands = [c for number, c in enumerate(program.commands) if number != left_out]
        lacking = dataclasses.replace(program, commands=tuple(commands))
        assert faults_of_decode(lacking, recording, state, recording.weights), left_out


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_whole_rows_of_the_page_table_are_replaced(
    capability: Capability, executables: Executables
) -> None:
    """No few-row schedule shares more cached pages than a launch has room for."""
    rng = np.random.default_rng(0)
    table, rows = (rng.integers(1, 26, (count, 5)).astype(np.int32) for count in (5, ROWS))
    slots = np.full(ROWS, 6, np.int32)  # past the table
    slots[:2] = 3, 1
    (found,) = run_program(executables(capability)[SET_ROWS], [table, slots, rows], Options())
    expected = table.copy()
    expected[[3, 1]] = rows[:2]
    assert np.array_equal(found, expected)


def test_weights_that_differ_are_noticed(
    executables: Executables, before_decode: tuple[Recording, list[np.ndarray]]
) -> None:
    recording, state = before_decode
    weights = [array * np.float32(1.001) for array in recording.weights]
    program = executables((8, 0))[DECODE].program
    assert faults_of_decode(program, recording, state, weights)


@pytest.mark.parametrize("name", ["few-edited", "few-several"])
def test_the_judge_of_near_ties_draws_what_the_engine_drew(name: str, engines: Engines) -> None:
    """In chunks, decodes and each step of a launch, where logits hardly move."""
    recording = record(engines, name)
    ties = NearTies(engines(1).decoder)
    before, steps, judged = list(recording.empty_state), SETUP.steps(), 0
    for call in recording.calls:
        if call.output is not None:
            bucket = steps[call.program]
            batch = unpack(call.arguments[0], bucket.num_tokens, bucket.num_rows)
            expected = call.output.token_ids.reshape(-1, bucket.num_rows)
            counts = rows_that_count(batch, expected, SETUP.num_slots, bucket.num_steps)
            for step, row in np.argwhere(counts).tolist():
                here = np.zeros_like(counts)
                here[step, row] = True
                for token_ids, share in ((expected, 1), ((expected + 1) % VOCAB, 0)):
                    [tie] = ties.judge(call, bucket, before, token_ids, here, noise=1e-6)
                    assert (tie.row, tie.step, tie.share) == (row, step, share), str(tie)
                judged += 1
        before[len(before) - len(call.state) :] = call.state
    assert judged >= sum(map(len, recording.answers.values()))


def test_only_narrow_numbers_have_near_ties() -> None:
    assert noise_of(MODELS["llama-float32"], "highest") == 0
    assert noise_of(MODELS["llama-float32-int8"], "highest") == 0
    assert noise_of(MODELS["llama-bfloat16"], "highest") > 0
    assert noise_of(MODELS["llama-float32"], "high") > 0
