"""The profile's sums: what belongs to which class, and no time counted twice."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from step_trace import (
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
