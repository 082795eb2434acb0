"""Block sizes are found by card, fit every card, and lower for the GPU."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import grouped_matmul, kv_write, paged_decode_attention, ragged_paged_attention
from pallas_kernels.arguments import AttentionOptions, Case, GroupedCase
from pallas_kernels.devices import DeviceLimits, find_card
from pallas_kernels.gpu import tuning
from pallas_kernels.row_arguments import ProductCase
from scripts.lib.paths import RESULTS

# JAX 0.11 announces the end of Pallas's Triton backend, which still works there.
pytestmark = pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")

H200 = find_card("H200").limits
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
OPERATIONS = {
    "decode": paged_decode_attention,
    "ragged": ragged_paged_attention,
    "mosaic_ragged": ragged_paged_attention,
    "kv_write": kv_write,
}


def case_of(
    op: str, dtype_name: str, head_dim: int, size: int = 64, device: DeviceLimits = H200
) -> Case:
    dtype = jnp.dtype(dtype_name)
    query = jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype
    op = {"mosaic_ragged": "ragged"}.get(op, op)
    return Case(op, device, query, dtype, size, size, 128, 16, 8, 8, 2, head_dim)


def compiling_for(device: DeviceLimits) -> AbstractContextManager[None]:
    """Return a context with a mesh under which code is traced for a card."""
    described = jax.sharding.AbstractDevice(
        device_kind=device.kind, num_cores=device.num_sms, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
    return jax.sharding.use_abstract_mesh(mesh)


def test_lookup_takes_the_first_entry_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"op": "decode", "dtype": "bfloat16", "head_dim": 128}
    small = {**shared, "up_to": 8, "config": {"block_tokens": 128}}
    large = {**shared, "up_to": None, "config": {"num_warps": 8}}
    table = {"device_kind": "NVIDIA H200", "measured": "2026-01-01", "entries": [small, large]}
    (tmp_path / "9.0").mkdir()
    (tmp_path / "9.0/h200.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    # Another card of the same capability takes them too, and one of another capability does not.
    for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        device = find_card(kind).limits
        for rows, block, warps in ((8, 128, 4), (9, 64, 8)):
            case = case_of("decode", "bfloat16", 128, rows, device)
            found = tuning.lookup(tuning.DecodeConfig, case)
            assert (found.block_tokens, found.num_warps) == (block, warps)
    case = case_of("decode", "bfloat16", 128, 8, find_card("B200").limits)
    assert tuning.lookup(tuning.DecodeConfig, case) == tuning.defaults(tuning.DecodeConfig, case)


def test_products_take_their_table_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ProductCase("gated_matmul", H200, jnp.dtype(jnp.bfloat16), 32, 4096, 14336)
    few = {"op": case.op, "dtype": "bfloat16", "head_dim": None, "up_to": 32}
    table = {"entries": [{**few, "config": {"block_columns": 32}}]}
    (tmp_path / "9.0").mkdir()
    (tmp_path / "9.0/h200.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    assert tuning.product_config(case).block_columns == 32
    for other in (
        dataclasses.replace(case, T=33),
        dataclasses.replace(case, dtype=jnp.dtype(jnp.float16)),
        dataclasses.replace(case, op="matmul_in_parts"),
        dataclasses.replace(case, device=find_card("A100").limits),
    ):
        assert tuning.product_config(other) == tuning.product_defaults(other)


@pytest.mark.parametrize(
    ("card", "rows", "outputs", "block"),
    [
        ("H200", 256, 14336, (256, 64, 4)),  # all rows in one block, that reads each weight once
        ("H200", 128, 14336, (128, 64, 4)),
        ("H200", 256, 3072, (128, 64, 4)),  # too few columns for that
        ("A100", 256, 14336, (128, 64, 2)),  # too little memory
        ("H200", 32, 3072, (32, 32, 5)),
        ("H200", 1, 3072, (16, 32, 5)),
        ("H200", 1, 14336, (16, 64, 4)),
    ],
)
def test_blocks_of_a_gated_product(
    card: str, rows: int, outputs: int, block: tuple[int, int, int]
) -> None:
    limits = find_card(card).limits
    case = ProductCase("gated_matmul", limits, jnp.dtype(jnp.bfloat16), rows, 4096, outputs)
    found = tuning.product_config(case)
    assert (found.block_rows, found.block_columns, found.num_stages) == block
    tiles = found.block_rows + 2 * found.block_columns
    assert found.num_stages * tiles * found.block_inner * 2 <= limits.shared_memory


@pytest.mark.parametrize("path", sorted(tuning.TABLES.rglob("*.json")), ids=lambda path: path.stem)
def test_kept_tables_fit_their_card(path: Path) -> None:
    table = json.loads(path.read_text())
    device = find_card(table["device_kind"]).limits
    assert tuning.table_path(device) == path
    for entry in table["entries"]:
        case = case_of(entry["op"], entry["dtype"], entry["head_dim"], entry["up_to"] or 256)
        found = tuning.lookup(tuning.CONFIGS[entry["op"]], case)
        for name, value in entry["config"].items():
            assert getattr(found, name) == value
        if isinstance(found, tuning.DecodeConfig):
            memory = tuning.attention_memory(case, 16, found.block_tokens, found.num_stages)
            assert memory <= device.shared_memory


FITTING = [
    # Card, dtype of pages, head dim: decode's block and stages; rows, block, stages of a tile.
    *((name, "bfloat16", 128, (64, 3), (128, 64, 2)) for name in ("A100", "RTX 3060", "L4")),
    *((name, "float16", 64, (64, 3), (128, 64, 2)) for name in ("A100", "RTX 3090", "B200")),
    ("H200", "bfloat16", 256, (64, 2), (128, 64, 2)),
    ("H100", "float16", 256, (64, 2), (128, 64, 2)),
    ("B200", "bfloat16", 256, (64, 2), (64, 64, 2)),
    ("A100", "bfloat16", 256, (64, 2), (64, 64, 2)),
    *((name, "bfloat16", 256, (32, 2), (64, 32, 2)) for name in ("RTX 3060", "RTX 4090", "GB10")),
    *((name, "float32", 256, (16, 2), (16, 16, 2)) for name in ("RTX 3060", "RTX 5090")),
    ("A100", "float32", 256, (32, 2), (16, 32, 2)),
    *((name, "float8_e4m3fn", 128, (64, 3), (128, 64, 2)) for name in ("L4", "H200", "RTX 5090")),
    # By integers.
    *((name, "float8_e4m3fn", 64, (64, 3), (128, 64, 2)) for name in ("A100", "RTX 3090")),
    *((name, "float8_e4m3fn", 128, (64, 3), (128, 32, 2)) for name in ("A100", "RTX 3090")),
    *((name, "float8_e4m3fn", 256, (32, 2), (64, 32, 2)) for name in ("A100", "A10", "L4", "GB10")),
    ("H200", "float8_e4m3fn", 256, (32, 2), (64, 64, 2)),
]


@pytest.mark.parametrize(("name", "dtype", "head_dim", "decode", "ragged"), FITTING)
def test_block_sizes_fit_the_card(
    name: str, dtype: str, head_dim: int, decode: tuple, ragged: tuple
) -> None:
    case = case_of("decode", dtype, head_dim, device=find_card(name).limits)
    chosen = tuning.defaults(tuning.DecodeConfig, case)
    assert (chosen.block_tokens, chosen.num_stages) == decode
    tile = tuning.defaults(tuning.RaggedConfig, case)
    assert (tile.tile_rows, tile.block_tokens, tile.num_stages) == ragged
    for rows, config in ((16, chosen), (tile.tile_rows, tile)):
        memory = tuning.attention_memory(case, rows, config.block_tokens, config.num_stages)
        assert memory <= case.device.shared_memory


def test_a_card_without_much_memory_gets_the_smallest_blocks() -> None:
    small = dataclasses.replace(find_card("RTX 3060").limits, capability=(7, 5))
    case = case_of("decode", "float32", 256, device=small)
    assert tuning.lookup(tuning.RaggedConfig, case).block_tokens == 16


# A kernel of every recorded case, by card: bytes as compiled. Both are of 64 rows, pages of 16.
COMPILED = json.loads((RESULTS / "cards.json").read_text())["cards"]
ATTENTION = re.compile(r"(decode|ragged) (\w+) h(\d+) p16( .*)?")


@pytest.mark.parametrize("name", COMPILED)
def test_the_estimate_is_what_compiled_kernels_take(name: str) -> None:
    card = find_card(name).limits
    compared = 0
    for row in COMPILED[name]["rows"]:
        found = ATTENTION.fullmatch(row["name"])
        if found is None:
            continue
        op, dtype, head_dim, _ = found.groups()
        case = case_of(op, dtype, int(head_dim), device=card)
        config = tuning.lookup(tuning.CONFIGS[op], case)
        rows = config.tile_rows if isinstance(config, tuning.RaggedConfig) else 16
        memory = tuning.attention_memory(case, rows, config.block_tokens, config.num_stages)
        # No default has more than three stages, and an entry of a timed table takes a block more.
        more = max(0, config.num_stages - 3) * config.block_tokens
        memory += more * case.H * case.page_dtype.itemsize
        kind = "ragged_attention" if op == "ragged" else "split_attention"
        [taken] = [k["shared_memory"] for k in row["kernels"] if kind in k["name"]]
        # Warpgroups hold four blocks. A card with tensor memory holds fewer here.
        slack = 1.25 if card.shared_memory > 200_000 else 1
        assert taken <= memory * slack, row["name"]
        compared += 1
    assert compared or not card.runs_triton


@pytest.mark.parametrize("name", COMPILED)
def test_what_readme_names_has_no_faults(name: str) -> None:
    card = COMPILED[name]
    assert find_card(name).limits.shared_memory == card["shared_memory"]
    assert not card["named_in_readme"] or card["faults"] == []


HEAD_DIMS = (64, 80, 96, 128, 256)
CALLS = [
    *product(("decode", "ragged", "kv_write"), DTYPES, HEAD_DIMS),
    *product(("mosaic_ragged",), ("bfloat16", "float16"), (64, 128, 256)),
]


def lowered() -> list[Any]:
    """Return all calls. In the usual run a dtype has every other size of heads, and 256.

    So each operation has each dtype with a size that is padded and with one that is not, and each
    size with half of the dtypes. The tables' sizes of blocks are looked up for all above.
    """
    found = []
    for op, dtype, head_dim in CALLS:
        place = DTYPES.index(dtype) + HEAD_DIMS.index(head_dim)
        is_usual = head_dim == 256 or place % 2 == 0 or (op, dtype) == ("mosaic_ragged", "bfloat16")
        marks = [] if is_usual else [pytest.mark.long]
        found.append(pytest.param(op, dtype, head_dim, marks=marks))
    return found


@pytest.mark.parametrize(("op", "dtype", "head_dim"), lowered())
def test_defaults_lower_for_the_gpu(op: str, dtype: str, head_dim: int) -> None:
    case = case_of(op, dtype, head_dim)

    def array(dtype: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    int32 = jnp.dtype(jnp.int32)
    pages = array(case.page_dtype, case.P, case.K, case.S, case.H)
    q = array(case.query_dtype, case.T, case.N, case.H)
    ints = [array(int32, *s) for s in ((case.R, case.M), (case.R + 1,), (case.R,))]
    fp8 = case.page_dtype.itemsize == 1
    scales = {name: array(jnp.dtype(jnp.float32), case.K) for name in ("k_scale", "v_scale") if fp8}
    if op == "kv_write":
        new = array(case.query_dtype, case.T, case.K, case.H)
        arrays = (new, new, pages, pages, array(int32, case.T))
    elif op == "decode":
        arrays = (q, pages, pages, ints[0], ints[2])
    else:
        arrays = (q, pages, pages, *ints)
    implementation = "mosaic_gpu" if op == "mosaic_ragged" else "triton"

    def call(arrays, scales):
        if op == "kv_write":
            return kv_write(*arrays, **scales, implementation=implementation)
        return OPERATIONS[op](*arrays, AttentionOptions(**scales), implementation=implementation)

    with compiling_for(H200):
        lowered = jax.jit(call).trace(arrays, scales).lower(lowering_platforms=("cuda",))
    assert "custom_call" in lowered.as_text()


@pytest.mark.parametrize(("dtype", "up_to"), [*product(DTYPES[:3], tuning.GROUPED_SIZES)])
def test_grouped_matmul_lowers_for_the_gpu(dtype: str, up_to: int | None) -> None:
    rows = 8 * (up_to or 200)
    case = GroupedCase(H200, jnp.dtype(dtype), rows, 8, 256, 192)
    assert tuning.grouped_config(case) == tuning.grouped_defaults(case.dtype, up_to)
    shapes = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((rows, 256), (8, 256, 192))]
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    with compiling_for(H200):
        lowered = jax.jit(grouped_matmul).trace(*shapes, sizes).lower(lowering_platforms=("cuda",))
    assert "custom_call" in lowered.as_text()
