"""A StartPlan is computed without JAX's devices, and outlives the weights that it describes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.commands.cli import main
from jaxserve.engine.metrics import memory_units
from jaxserve.errors import InvalidRequest
from jaxserve.execution.state import PAGES, SAMPLER, MemoryKind
from jaxserve.start import start
from jaxserve.start.device import named_device
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan import memory_plan
from jaxserve.start.plan.make_plan import plan_start
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.sources.find import find_source
from jaxserve.start.weights import place
from tests.support.checkpoint import save_checkpoint

SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "decode_sizes": (2,),
    "token_sizes": (16,),
    "num_scheduler_steps": 1,
    "compilation_cache_dir": None,
}
PLAN = """
import pickle, sys
from jaxserve import EngineConfig
from jaxserve.start.device import named_device
from jaxserve.start.plan.make_plan import plan_start
from jaxserve.start.sources.find import find_source

config = EngineConfig(model=sys.argv[1], **eval(sys.argv[2]))
plans = [plan_start(config, find_source(config), named_device(name)) for name in ("cpu", "H100")]
sys.stdout.buffer.write(pickle.dumps(plans))
"""


def test_a_plan_needs_no_platform_of_jax(tmp_path: Path) -> None:
    """Of a platform that does not exist; and it equals the plan of a process that has a device."""
    save_checkpoint(tmp_path)
    environment = os.environ | {"JAX_PLATFORMS": "nonexistent"}
    command = [sys.executable, "-c", PLAN, str(tmp_path), repr(SMALL)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    config = EngineConfig(model=tmp_path, **SMALL)
    for plan, name in zip(pickle.loads(done.stdout), ("cpu", "H100"), strict=True):
        assert isinstance(plan, StartPlan)
        own = plan_start(config, find_source(config), named_device(name))
        own, plan = (replace(one, device=own.device, budget=0) for one in (own, plan))
        assert plan == replace(own, config=plan.config)
        assert plan.num_pages > 2 and plan.weight_bytes > 0


def test_planned_bytes_are_those_that_a_start_allocates(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    loaded = start.load(EngineConfig(model=tmp_path, **SMALL))
    plan, state = loaded.plan, loaded.runner._state
    assert plan is not None and state is not None
    assert plan.weight_bytes == loaded.runner.weight_bytes
    arrays: dict[str, Any] = {PAGES: state.kv, SAMPLER: state.sampler, **state.others}
    assert {kind.name for kind in plan.memory} == arrays.keys()
    for kind in plan.memory:
        assert kind.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(arrays[kind.name]))
    loaded.runner.close()


def test_a_further_kind_of_memory_needs_no_change_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is allocated, kept by every step, planned, reported and counted under its name."""
    save_checkpoint(tmp_path)
    columns, kinds = [3], memory_plan.memory_kinds

    def with_another(*arguments: Any) -> tuple[MemoryKind, ...]:
        unit = {"carry": jax.ShapeDtypeStruct((4, columns[0]), np.float32)}
        pages, sampler = kinds(*arguments)
        another = MemoryKind.of("carried state", "slot", unit, sampler.count, layers=2)
        return pages, sampler, another

    monkeypatch.setattr(memory_plan, "memory_kinds", with_another)
    config = EngineConfig(model=tmp_path, **SMALL)
    loaded = start.load(config)
    runner, plan = loaded.runner, loaded.plan
    assert plan is not None and runner._state is not None
    *_, kind = plan.memory
    assert kind.num_bytes == 2 * 4 * 3 * 4 * (SMALL["max_num_seqs"] + 1)
    with LLM(loaded) as llm:
        sampling = SamplingParams(max_tokens=4, temperature=0.5, logit_bias={5: 1.0})
        [answer] = llm.generate([[5] * 9], sampling)
        assert len(answer.outputs[0].token_ids) == 4
        arrays = jax.tree.leaves(runner._state.others["carried state"])
        assert len(arrays) == 2 and sum(array.nbytes for array in arrays) == kind.num_bytes
        stats, values = llm.stats(), llm.get_metrics()
    assert (stats.memory[1].count, stats.memory[1].in_use) == (SMALL["max_num_seqs"], 0)
    assert memory_units(stats).keys() == {"num_pages_in_use", "num_carried_state_slots_in_use"}
    names = {value.name for value in values if value.name.endswith("usage_perc")}
    assert names == {"vllm:kv_cache_usage_perc", "jaxserve:carried_state_usage_perc"}

    assert main(["plan", str(tmp_path), "--device", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("│")[1].strip() for line in lines if "│" in line]
    assert rows.index("carried state") + 1 == rows.index("KV cache")
    assert "sampler state" not in rows
    assert main(["plan", str(tmp_path), "--device", "H100", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["plans"][0]
    shown = {one["name"]: one for one in first["memory"]}
    assert shown["carried state"] == {
        "name": "carried state",
        "layers": 2,
        "unit": "slot",
        "bytes_per_unit": 96,
        "count": first["sizes"]["seqs"] + 1,
        "bytes": 96 * (first["sizes"]["seqs"] + 1),
    }

    columns[0] = 1 << 30
    for device in ("cpu", "H100"):
        with pytest.raises(InvalidRequest, match=r"a step 0\.0 GiB, the carried state 96\.0 GiB"):
            plan_start(config, find_source(config), named_device(device))


@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}], ids=["in full", "int4"])
def test_a_released_model_is_rebuilt_for_the_same_programs(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path)
    loaded: Loaded = start.load(EngineConfig(model=tmp_path, **SMALL, **settings))
    plan, source, runner = loaded.plan, loaded.source, loaded.runner
    assert plan is not None and source is not None
    prompt, sampling = [[5] * 9], SamplingParams(max_tokens=8, temperature=0)
    with LLM(loaded) as llm:
        [before] = llm.generate(prompt, sampling)
        compiled = runner.num_compiles
        for leaf in [*runner._leaves, *jax.tree.leaves(runner._state)]:
            leaf.delete()
        with pytest.raises(Exception, match="deleted"):
            jax.block_until_ready(runner._leaves)
        assert plan.fits(plan.needed + plan.pages.num_bytes) and not plan.fits(plan.weight_bytes)
        runner._leaves = place(source, plan).leaves
        runner.reset()
        assert runner.num_compiles == compiled
        [after] = llm.generate(prompt, sampling)
        assert runner.num_compiles == compiled
    assert before.outputs[0].token_ids == after.outputs[0].token_ids
