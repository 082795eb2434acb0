"""Suppliers of programs know an engine by its pickled plan: any process compiles the same ones."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import parse_model_config
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.compiler import LOAD_SLOT, SET_ROWS, Compiler, Key
from jaxserve.start.programs.compiling_process import CompilationFailed, CompilingProcess
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.suppliers import Compiling, ProgramSupplier, Stored
from jaxserve.weights import random_weights
from scripts.lib.placed_model import model_leaves, plan_of_model
from tests.equivalence import TINY

pytestmark = pytest.mark.usefixtures("no_jax_cache")
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 32,
    "decode_sizes": (2,),
    "token_sizes": (8,),
    "num_gpu_blocks_override": 6,
    "num_scheduler_steps": 1,
}
# Plans a model of this process's settings where JAX has no device at all.
PLANNER = """
import json, pickle, sys
from jax._src import xla_bridge
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import named_device
from jaxserve.start.plan.make_plan import plan_start
from jaxserve.start.sources.find import find_source

config = EngineConfig(model=sys.argv[1], load_format="dummy", **json.loads(sys.argv[2]))
plan = plan_start(config, find_source(config, config_only=True), named_device("cpu"))
assert not xla_bridge.backends_are_initialized()
sys.stdout.buffer.write(pickle.dumps(plan))
"""


def planned(form: str | None = None) -> tuple[StartPlan, list[Any]]:
    model_config = parse_model_config(dict(TINY))
    config = EngineConfig(**SETTINGS).resolve("cpu", 32)
    model = random_weights(model_config, jnp.float32, 0, form, panels=True)
    return plan_of_model(config, model_config.for_length(32), model), model_leaves(model)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", [None, "int8"])
def test_another_process_compiles_from_a_plan_with_equal_keys(
    tmp_path: Path, form: str | None
) -> None:
    plan, leaves = planned(form)
    decode = plan.buckets.largest_decode
    keys: list[Key] = [decode, SET_ROWS]
    here, there = (open_store(tmp_path / name, plan) for name in ("here", "there"))
    supplier: ProgramSupplier = CompilingProcess(plan, there)
    try:
        programs = [supplier.supply(key) for key in keys]
    finally:
        supplier.close()
    assert (there.num_built, there.num_loaded) == (0, 2)
    compiling, stored = Compiling(plan, here), Stored(plan, here)
    assert [stored.supply(key) for key in keys] == [None, None]
    own = [compiling.supply(key) for key in keys]
    assert (here.num_built, here.num_loaded) == (2, 0) and all(map(stored.has, keys))
    shared = {name for name in files(tmp_path / "here") if not name.startswith("kernels")}
    assert shared == {n for n in files(tmp_path / "there") if not n.startswith("kernels")}
    assert len([name for name in shared if name.startswith("objects")]) == 2
    tokens = []
    for program in (programs[0], own[0]):
        assert program is not None
        state = compiling.compiler.make_state()
        _, output = program(leaves, state, compiling.compiler.null_batch(decode))
        tokens.append(np.asarray(output.token_ids).tolist())
    assert tokens[0] == tokens[1]


def test_a_plan_is_made_without_a_device_and_gives_the_programs_of_this_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(TINY)))
    command = [sys.executable, "-c", PLANNER, str(tmp_path), json.dumps(SETTINGS)]
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    plan: StartPlan = pickle.loads(done.stdout)
    own, _ = planned()
    assert plan.model.leaves == own.model.leaves and plan.num_pages == own.num_pages
    for key in (plan.buckets.largest_decode, LOAD_SLOT):
        texts = [Compiler(one_plan).lower(key).as_text() for one_plan in (plan, own)]
        assert texts[0] == texts[1]


def test_a_process_of_another_fingerprint_compiles_nothing(tmp_path: Path) -> None:
    plan, _ = planned()
    store = open_store(tmp_path / "programs", plan)
    store.fingerprint["source"] = "another"
    supplier = CompilingProcess(plan, store)
    try:
        with pytest.raises(CompilationFailed, match="another source than the engine"):
            supplier.supply(SET_ROWS)
    finally:
        supplier.close()
    assert not any((tmp_path / "programs/objects").iterdir())
