"""The profile's sums: classes of operations, with no time counted twice; the script's arguments."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.settings.config import EngineConfig
from jaxserve.start.start import load
from scripts.gpu import profile_step
from scripts.lib.profiler_trace import (
    ATTENTION,
    GATHER,
    PRODUCTS,
    REST,
    SAMPLER,
    WEIGHTS,
    WRITE,
    class_of,
    device_time,
    instructions,
    read_events,
    self_times,
)
from tests.support.checkpoint import save_checkpoint

HLO = """HloModule jit_step, is_scheduled=true

%fused_dot (p: f32[4,8], q: f32[8,4]) -> f32[4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, metadata={op_name="x"}
}

%fused_gather (p.1: f32[4,8], i: s32[4]) -> f32[4,8] {
  %p.1 = f32[4,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  ROOT %gather.7 = f32[4,8]{1,0} gather(%p.1, %i), metadata={op_name="y"}
}

ENTRY %main (a: f32[4,8]) -> (f32[4,4]) {
  %a = f32[4,8]{1,0} parameter(0)
  %one = f32[4,4]{1,0} fusion(%a), calls=%fused_dot, TOP:layer_0/mlp/dot_general
  %two = f32[4,4]{1,0} fusion(%a), calls=%fused_dot, AT:while/body/dot_general
  %three = f32[4,8]{1,0} fusion(%a), calls=%fused_gather, AT:while/body/gather
  %four = f32[4,4]{1,0} fusion(%a), calls=%fused_dot, AT:dot_general
  %five = f32[4,8]{1,0} scatter(%a, %a), AT:scatter
  %six = f32[4]{0} exponential(%a), AT:while/body/exp
  %seven = (s32[4]{0}, f32[4]{0}) sort(%a), TOP:sample/sort
  %eight = f32[4]{0} add(%a, %a), TOP:layer_0/add
  %while.1 = (s32[], f32[4]{0}) while(%a), body=%b, AT:while
  ROOT %nine = (f32[4,4]{1,0}) tuple(%one)
}
"""
# In full, as XLA writes it.
for _short, _path in (("AT:", "layer_0/attention/"), ("TOP:", "")):
    HLO = re.sub(f"{_short}(.*)", rf'metadata={{op_name="jit(step)/{_path}\1"}}', HLO)


def test_operations_are_told_apart_by_where_they_come_from_and_what_they_do() -> None:
    known = instructions(HLO)
    expected = {
        "one": WEIGHTS,
        "two": PRODUCTS,
        "three": GATHER,
        "four": WEIGHTS,
        "five": WRITE,
        "six": ATTENTION,
        "seven": SAMPLER,
        "eight": REST,
    }
    assert {name: class_of(name, known[name]) for name in expected} == expected


def event(op: str, start: float, micros: float, thread: int = 1, **extra: Any) -> dict[str, Any]:
    args = {"hlo_op": op, "hlo_module": "jit_step"}
    one = {"ph": "X", "pid": 1, "tid": thread, "ts": start, "dur": micros}
    return one | {"name": op, "args": args} | extra


EVENTS = [
    event("while.1", 0, 100),
    event("two", 10, 30),
    event("three", 50, 20),
    event("one", 100, 40),
    event("two", 0, 7, thread=2),
    event("one", 141, 1, name="end: one"),
    {"ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 900, "name": "ThunkExecutor::Execute"},
]


def test_what_runs_inside_another_counts_once() -> None:
    times = self_times(EVENTS)
    assert times == {"while.1": (50, 1), "two": (37, 2), "three": (20, 1), "one": (40, 1)}


def test_classes_add_up_to_the_time_of_all_operations(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*EVENTS, {"ph": "M", "name": "process_name"}]}, file)
    found = device_time(read_events(tmp_path / "trace.json.gz"), HLO, steps=2)
    assert sum(found.micros.values()) == pytest.approx(147 / 2)
    assert found.micros[WEIGHTS] == 20 and found.micros[PRODUCTS] == 18.5
    assert found.micros[ATTENTION] == 25 and found.micros[GATHER] == 10
    assert [one[2] for one in found.operations] == ["while.1", "one", "two", "three"]


def test_a_real_trace_names_the_operations_of_its_program(tmp_path: Path) -> None:
    def step(weights: Any, x: Any) -> Any:
        with jax.named_scope("mlp"):
            x = x @ weights
        with jax.named_scope("sample"):
            return jnp.argsort(x[0])

    arrays = np.ones((64, 64), np.float32), np.ones((8, 64), np.float32)
    program = jax.jit(step).lower(*arrays).compile()
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        for _ in range(3):
            jax.block_until_ready(program(*arrays))
    [path] = tmp_path.rglob("*.trace.json.gz")
    found = device_time(read_events(path), program.as_text(), steps=3)
    assert found.micros[WEIGHTS] > 0 and found.micros[SAMPLER] > 0
    assert found.micros[PRODUCTS] == found.micros[WRITE] == 0


def refused(arguments: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """Return the error about arguments that end the script before its first output."""
    patch.setattr(sys, "argv", ["scripts/gpu/profile_step.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        profile_step.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    return said.err.partition("error: ")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps: '0' must be an integer of at least 1"),
        ("--rows -1", "--rows: '-1' must be an integer of at least 1"),
        ("--rows few", "--rows: 'few' must be an integer of at least 1"),
        ("--context 0", "--context: '0' must be an integer of at least 1"),
        ("--prompt -1", "--prompt: '-1' must be an integer of at least 0"),
        ("--longest -1", "--longest: '-1' must be an integer of at least 0"),
        ("--out /nonexist/x.gz", "--out: '/nonexist/x.gz' must be in a folder that exists"),
        ("--json /nonexist/x.json", "--json: '/nonexist/x.json' must be in a folder that exists"),
        ("--model /nonexist", "model: '/nonexist' is not a folder with a checkpoint"),
        ("--context 100000", "--context must be from 1 to 1022 here, got 100000"),
        ("--prompt 1024", "--prompt must be from 0 to 1023 here, got 1024"),
        ("--rows 33", "--rows must be from 1 to 32 here, got 33"),
        ("--rows 32 --prompt 8", "--rows must be from 1 to 31 here, got 32"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_say_what_is_allowed(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Includes arguments beyond the model's limits: they fail before the model is loaded."""
    monkeypatch.setattr(profile_step, "load", None)
    monkeypatch.chdir(tmp_path)
    assert message in refused(arguments.split(), monkeypatch, capsys)


def test_every_option_says_its_default() -> None:
    for action in profile_step.make_parser()._actions[1:]:
        assert "(default: " in (action.help or ""), action.dest


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Start an engine of 256 tokens a sequence, without a tokenizer."""
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    config = EngineConfig(
        model=folder,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        decode_sizes=(2,),
        token_sizes=(32,),
        skip_tokenizer_init=True,
        compilation_cache_dir=None,
    )
    engine = Engine(load(config))
    yield engine
    engine.close()


def test_rows_begin_anew_so_that_each_measured_launch_is_of_all(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """120 launches take more tokens than a row has."""
    out, tables = tmp_path / "trace.json.gz", tmp_path / "tables.json"
    given = ["--rows=2", "--context=20", "--steps=30", f"--out={out}", f"--json={tables}"]
    profile_step.profile(engine, profile_step.make_parser().parse_args(given), {"command": "x"})
    found = json.loads(tables.read_text())
    assert found["bucket"].startswith("decode 2") and found["host_us"]["commit"] > 0
    assert found["device_us"][WEIGHTS] > 0 and found["device_us"][ATTENTION] > 0
    assert f"trace: {out}" in capsys.readouterr().out and out.stat().st_size > 0


def test_rows_that_would_end_at_once_are_refused(engine: Engine, tmp_path: Path) -> None:
    given = ["--rows=2", "--context=240", f"--out={tmp_path / 'trace.json.gz'}"]
    with pytest.raises(profile_step.TooShort, match="--rows 2, --context 240: the 16 tokens"):
        profile_step.profile(engine, profile_step.make_parser().parse_args(given), {"command": "x"})
