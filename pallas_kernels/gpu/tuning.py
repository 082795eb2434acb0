"""Block sizes, by card, dtype, head dim and size of the call; read while tracing.

`defaults` computes sizes that fit the card. ``tuned/<capability>/<card>.json`` holds what a sweep
found better on a card (``scripts.gpu.tune_kernels``):

    {"device_kind": "NVIDIA H200",
     "measured": "2026-01-31",
     "entries": [{"op": "decode", "dtype": "bfloat16", "head_dim": 128, "up_to": 64,
                  "config": {"block_tokens": 64, ...}}, ...]}

A card without a file takes that of another one of its compute capability, the first by name.
``dtype`` is that of the pages, or of the weights of products, which have no head dim ("head_dim"
is null). ``up_to`` bounds the bucket: rows R for "decode", tokens T for "ragged", "mosaic_ragged",
"kv_write", "gated_matmul" and "matmul_in_parts", rows a group for "grouped_matmul"; null means
any. The first entry that fits is used,
and fields it leaves out keep their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, TypeVar

import jax.numpy as jnp

from pallas_kernels.arguments import Case, GroupedCase
from pallas_kernels.devices import DeviceLimits
from pallas_kernels.product_arguments import ProductCase

TABLES = pathlib.Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Sizes of split-KV decode.

    Attributes:
        block_tokens: KV positions per loop step; above the page size, pages are gathered.
        num_warps, num_stages: of the attention kernel; a stage is one block of K and V in flight.
        programs_per_sm: programs an SM over which all KV of the step is divided.
        min_blocks: blocks of a program at least.
        merge_numbers: numbers of partial results that a program reads at a time.
    """

    block_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    min_blocks: int = 1
    merge_numbers: int = 4096


@dataclasses.dataclass(frozen=True)
class RaggedConfig:
    """Sizes of tiles of query tokens times the heads of a group.

    Attributes:
        tile_rows: rows (tokens x group heads) of a tile, a power of two of at least 16.
        block_tokens, num_warps, num_stages: as in ``DecodeConfig``.
        split_queries: rows of at most so many queries go to the kernel that splits KV; 0 for none.
        split_rows: rows of its tiles.
    """

    tile_rows: int = 128
    block_tokens: int = 64
    num_warps: int = 8
    num_stages: int = 2
    split_queries: int = 16
    split_rows: int = 32


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """Sizes of the Hopper kernel: each compute warpgroup takes 64 rows of the same tile."""

    block_tokens: int = 64
    num_stages: int = 4
    warpgroups: int = 2


@dataclasses.dataclass(frozen=True)
class KvWriteConfig:
    """Sizes of the KV write: one program per token."""

    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """Sizes of a grouped product: rows and columns of a program, inputs of a loop step.

    They are powers of two from 16 on.
    """

    block_rows: int = 64
    block_columns: int = 128
    block_inner: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """Sizes of a product of few rows: a program's rows and columns, inputs of a loop step.

    They are powers of two from 16 on.
    """

    block_rows: int = 16
    block_columns: int = 64
    block_inner: int = 64
    num_warps: int = 4
    num_stages: int = 4


CONFIGS = {
    "decode": DecodeConfig,
    "ragged": RaggedConfig,
    "mosaic_ragged": MosaicConfig,
    "kv_write": KvWriteConfig,
}
Config = TypeVar("Config", DecodeConfig, RaggedConfig, MosaicConfig, KvWriteConfig)
Fitted = TypeVar("Fitted", DecodeConfig, RaggedConfig)


def table_path(device: DeviceLimits) -> pathlib.Path:
    """Return where a card's table is: "NVIDIA H200" -> tuned/9.0/h200.json."""
    words = [w for w in device.kind.lower().replace("/", " ").split() if w != "nvidia"]
    return TABLES / ".".join(map(str, device.capability)) / ("-".join(words) + ".json")


def read_entries(device: DeviceLimits) -> list[dict]:
    """Read the table of a card or, where it has none, of another of its compute capability."""
    path = table_path(device)
    found = [path] if path.is_file() else sorted(path.parent.glob("*.json"))
    return json.loads(found[0].read_text())["entries"] if found else []


def attention_memory(case: Case, rows: int, block_tokens: int, num_stages: int) -> int:
    """Compute bytes of shared memory that a tile of query rows takes, found by compiling.

    Queries and weights of the softmax have the products' dtype. Of keys and values together there
    are three blocks in flight, however many stages above one; of float8 a block is half widened.
    Products of warpgroups hold four blocks and no weights, on cards with more than twice as much.
    """
    itemsize = case.page_dtype.itemsize
    blocks = (3 if num_stages > 1 else 1) * itemsize + (1 if itemsize == 1 else 0)
    queries = rows * (case.H + block_tokens) * case.query_dtype.itemsize
    return queries + block_tokens * case.H * blocks + SMALL_ARRAYS


SMALL_ARRAYS = 512
"""Bytes of maxima, sums and page ids."""


def fitted(config: Fitted, case: Case, rows: int) -> Fitted:
    """Shrink a configuration's blocks until a tile of so many rows fits the card."""
    block = config.block_tokens
    while block > 16:
        if attention_memory(case, rows, block, config.num_stages) <= case.device.shared_memory:
            break
        block //= 2
    return dataclasses.replace(config, block_tokens=block)


def defaults(kind: type[Config], case: Case) -> Any:
    """Return sizes that fit the card and spill no registers."""
    exact = case.query_dtype.itemsize == 4  # no tensor cores: small tiles, many threads
    wide = case.H > 128
    narrow = case.page_dtype.itemsize == 1
    if kind is DecodeConfig:
        # Widening takes registers: more of them for tiles of several queries.
        is_tight = narrow and (wide or case.op == "ragged")
        merged = 2048 if narrow or (case.op == "decode" and not wide) else 4096
        config = DecodeConfig(
            32 if is_tight else 64, num_stages=2 if wide else 3, merge_numbers=merged
        )
        if exact:
            config = DecodeConfig(block_tokens=32, num_warps=8, num_stages=2)
        return fitted(config, case, rows=16)
    if kind is RaggedConfig:
        # Hopper alone keeps 128 rows of 256 sums in the registers of 8 warps.
        short = wide and (narrow or not case.device.has_wgmma)
        # Widening by integers takes registers of its own.
        by_integers = narrow and not case.device.widens_fp8
        block = 32 if by_integers and case.H > 64 else 64
        # Wide heads and those that are widened leave registers for 16 rows of a split tile.
        split_rows = 16 if wide or narrow else 32
        config = RaggedConfig(64 if short else 128, block, split_rows=split_rows)
        if exact:
            config = RaggedConfig(tile_rows=16, block_tokens=32, split_rows=16)
        return fitted(config, case, config.tile_rows)
    if kind is MosaicConfig and wide:
        return MosaicConfig(num_stages=2, warpgroups=1)
    return kind()


def lookup(kind: type[Config], case: Case) -> Config:
    """Return the configuration for a call."""
    op = next(name for name, config in CONFIGS.items() if config is kind)
    size = case.R if op == "decode" else case.T
    base = defaults(kind, case)
    for entry in read_entries(case.device):
        if entry["op"] != op or entry["dtype"] != case.page_dtype.name:
            continue
        if entry["head_dim"] != case.H or (entry["up_to"] is not None and size > entry["up_to"]):
            continue
        return dataclasses.replace(base, **entry["config"])
    return base


GROUPED_SIZES = (16, 64, None)
"""Rows of a group up to which an entry for "grouped_matmul" holds."""


def grouped_defaults(dtype: jnp.dtype, up_to: int | None) -> GroupedConfig:
    """Return sizes that compile for an H200 without spills; none was timed."""
    rows = {16: 16, 64: 64, None: 128}[up_to]
    if dtype.itemsize == 4:  # no tensor cores: small tiles, many threads
        return GroupedConfig(16, 64, 32, num_warps=8, num_stages=2)
    return GroupedConfig(rows, num_warps=8 if rows == 128 else 4)


def grouped_config(case: GroupedCase) -> GroupedConfig:
    """Return the configuration for a call."""
    mean = -(-case.A // case.E)
    up_to = next(size for size in GROUPED_SIZES if size is None or mean <= size)
    for entry in read_entries(case.device):
        if entry["op"] != case.op or entry["dtype"] != case.dtype.name:
            continue
        if entry["up_to"] is None or mean <= entry["up_to"]:
            return dataclasses.replace(grouped_defaults(case.dtype, up_to), **entry["config"])
    return grouped_defaults(case.dtype, up_to)


def product_config(case: ProductCase) -> ProductConfig:
    """Return the configuration for a call: sizes that fit the card, and what was measured on it."""
    base = product_defaults(case)
    for entry in read_entries(case.device):
        if entry["op"] != case.op or entry["dtype"] != case.dtype.name:
            continue
        if entry["up_to"] is None or entry["up_to"] >= case.T:
            return dataclasses.replace(base, **entry["config"])
    return base


def product_defaults(case: ProductCase) -> ProductConfig:
    """Return sizes that fit the card."""
    if case.is_gated and case.T <= 64 and case.device.num_sms >= 2 * (case.F // 64):
        # Half as many columns make programs for twice as many multiprocessors.
        rows = next(size for size in (16, 32, 64) if size >= case.T)
        return ProductConfig(rows, 32, num_warps=4 if rows == 16 else 2, num_stages=5)
    if case.T <= 16:
        return ProductConfig(block_inner=64 if case.is_gated else 128, num_stages=3 + case.is_gated)
    if case.T <= 64:
        rows = 32 if case.T <= 32 else 64
        return ProductConfig(rows, num_stages=3 if case.is_gated else 4)
    if case.is_gated and case.device.shared_memory >= ROOM_FOR_FOUR_STAGES:
        # One block of all rows reads each weight once, where columns are enough for most programs.
        is_wide = case.T > 128 and 3 * case.device.num_sms <= 4 * (case.F // 64)
        return ProductConfig(256 if is_wide else 128, num_warps=8, num_stages=4)
    return ProductConfig(128, num_warps=8, num_stages=2 if case.is_gated else 3)


ROOM_FOR_FOUR_STAGES = 4 * (256 + 2 * 64) * 64 * 2
"""Bytes of shared memory that four stages of 256 rows and 64 columns of two matrices take."""
