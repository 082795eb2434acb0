"""Suppliers of programs know an engine by its pickled plan: any process compiles the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.buckets import SET_ROWS, Key
from jaxserve.models import parse_model_config
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.start_plan import StartPlan
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
