"""The tuning tables say what they may say, are found, and every entry lowers for the GPU."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import grouped_matmul, kv_write, paged_decode_attention, ragged_paged_attention
from pallas_kernels.arguments import Case, GroupedCase
from pallas_kernels.gpu import tuning

# JAX 0.11 announces the end of Pallas's Triton backend, which still works there.
pytestmark = pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")

TABLES = sorted(tuning.TABLES.glob("*.json"))
H200 = "NVIDIA H200"


def entries(grouped: bool = False) -> list[dict]:
    found = tuning.read_entries(H200)
    return [entry for entry in found if (entry["op"] == "grouped_matmul") == grouped]


def name_of(entry: dict) -> str:
    return f"{entry['op']}-{entry['dtype']}-{entry['head_dim']}-{entry['up_to']}"


def case_of(entry: dict, size: int = 64) -> Case:
    dtype = jnp.dtype(entry["dtype"])
    query = jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype
    op = {"mosaic_ragged": "ragged"}.get(entry["op"], entry["op"])
    return Case(op, "gpu", query, dtype, size, size, 128, 16, 8, 8, 2, entry["head_dim"])


def on_h200():
    """A mesh under which code is traced for an H200."""
    described = jax.sharding.AbstractDevice(device_kind=H200, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_tables_are_well_formed(path) -> None:
    table = json.loads(path.read_text())
    assert path.name == tuning.table_name(table["device_kind"])
    assert table["measured"] == "not measured: defaults" or table["measured"][:2] == "20"
    for entry in table["entries"]:
        kind = tuning.CONFIGS.get(entry["op"], tuning.GroupedConfig)
        kind(**entry["config"])  # refuses a field that does not exist
        assert entry["up_to"] is None or entry["up_to"] > 0


def test_lookup_takes_the_first_entry_that_fits(tmp_path, monkeypatch) -> None:
    shared = {"op": "decode", "dtype": "bfloat16", "head_dim": 128}
    small = {**shared, "up_to": 8, "config": {"block_tokens": 128}}
    large = {**shared, "up_to": None, "config": {"num_warps": 8}}
    table = {"device_kind": "NVIDIA X1", "measured": "2026-01-01", "entries": [small, large]}
    (tmp_path / "x1.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    for rows, block, warps in ((8, 128, 4), (9, 64, 8)):
        found = tuning.lookup(tuning.DecodeConfig, case_of(small, rows), "NVIDIA X1")
        assert (found.block_tokens, found.num_warps) == (block, warps)
    other = tuning.lookup(tuning.DecodeConfig, case_of(small), "NVIDIA X2")
    assert other == tuning.DecodeConfig()


@pytest.mark.parametrize("entry", entries(), ids=name_of)
def test_entry_lowers_for_the_gpu(entry: dict) -> None:
    case = case_of(entry)

    def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = array(case.page_dtype, case.P, case.K, case.S, case.H)
    q = array(case.query_dtype, case.T, case.N, case.H)
    ints = [array(jnp.int32, *s) for s in ((case.R, case.M), (case.R + 1,), (case.R,))]
    fp8 = case.page_dtype.itemsize == 1
    scales = {name: array(jnp.float32, case.K) for name in ("k_scale", "v_scale") if fp8}
    implementation = "mosaic_gpu" if entry["op"] == "mosaic_ragged" else "triton"
    if case.op == "kv_write":
        new = array(case.query_dtype, case.T, case.K, case.H)
        function, arrays = kv_write, (new, new, pages, pages, array(jnp.int32, case.T))
    elif case.op == "decode":
        function, arrays = paged_decode_attention, (q, pages, pages, ints[0], ints[2])
    else:
        function, arrays = ragged_paged_attention, (q, pages, pages, *ints)

    def call(arrays, scales):
        return function(*arrays, **scales, implementation=implementation)

    with on_h200():
        lowered = jax.jit(call).trace(arrays, scales).lower(lowering_platforms=("cuda",))
    assert "custom_call" in lowered.as_text()


@pytest.mark.parametrize("entry", entries(grouped=True), ids=name_of)
def test_grouped_matmul_lowers_for_the_gpu(entry: dict) -> None:
    rows = 8 * (entry["up_to"] or 200)
    dtype = jnp.dtype(entry["dtype"])
    case = GroupedCase("gpu", dtype, rows, 8, 256, 192)
    assert tuning.grouped_config(case, H200) == tuning.GroupedConfig(**entry["config"])
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 256), (8, 256, 192))]
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    with on_h200():
        lowered = jax.jit(grouped_matmul).trace(*shapes, sizes).lower(lowering_platforms=("cuda",))
    assert "custom_call" in lowered.as_text()
