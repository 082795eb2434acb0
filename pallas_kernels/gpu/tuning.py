"""Block sizes, by card, dtype, head dim and size of the call. They are read while JAX traces.

`defaults` computes sizes that fit the card. ``tuned/<capability>/<card>.json`` holds better sizes
that a sweep found on a card (``scripts.gpu.tune_kernels``):

    {"device_kind": "NVIDIA H200",
     "measured": "2026-01-31",
     "entries": [{"op": "decode", "dtype": "bfloat16", "head_dim": 128, "up_to": 64,
                  "config": {"block_tokens": 64, ...}}, ...]}

A card without a file uses the file of another card of its compute capability, the first by name.
``dtype`` is the dtype of the pages, or of the weights of products, which have no head dim
("head_dim" is null). ``up_to`` bounds the size: rows R for "decode", tokens T for "ragged",
"mosaic_ragged", "kv_write", "gated_matmul" and "matmul_in_parts", rows per group for
"grouped_matmul". null means any size. The first matching entry is used, and fields that it omits
keep their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, TypeVar

import jax.numpy as jnp

from pallas_kernels.arguments import Case, GroupedCase
from pallas_kernels.devices import DeviceLimits
from pallas_kernels.row_arguments import ProductCase

TABLES = pathlib.Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Block sizes of attention with split KV, for decodes."""

    block_tokens: int = 64  # KV positions per loop step. Above the page size, pages are gathered.
    num_warps: int = 4  # of the attention kernel
    num_stages: int = 3  # a stage is one block of K and V in flight
    programs_per_sm: int = 2  # programs per SM over which all KV of the step is divided
    min_blocks: int = 1  # fewest blocks of a program
    merge_numbers: int = 4096  # how many numbers of partial results a program reads at a time


@dataclasses.dataclass(frozen=True)
class RaggedConfig:
    """Block sizes of attention of rows of any length. A tile is query tokens times group heads."""

    tile_rows: int = 128  # rows (tokens x group heads) of a tile, a power of two from 16 on
    block_tokens: int = 64  # as in ``DecodeConfig``
    num_warps: int = 8
    num_stages: int = 2
    # the split-KV kernel computes rows of at most this many queries. 0 disables it.
    split_queries: int = 16
    split_rows: int = 32  # rows of the tiles of that kernel


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """Block sizes of the Hopper attention kernel.

    Each compute warpgroup takes 64 rows of the same tile of queries.
    """

    block_tokens: int = 64
    num_stages: int = 4
    warpgroups: int = 2


@dataclasses.dataclass(frozen=True)
class KvWriteConfig:
    """Number of warps of the kernel that writes keys and values, which has a program per token."""

    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """Block sizes of a grouped product: rows and columns of a program, inputs of a loop step.

    They are powers of two from 16 on.
    """

    block_rows: int = 64
    block_columns: int = 128
    block_inner: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """Block sizes of a product of few rows: rows and columns of a program, inputs of a loop step.

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
    """Return the path of a card's table of block sizes: tuned/9.0/h200.json for "NVIDIA H200".

    The file may not exist.
    """
    words = [w for w in device.kind.lower().replace("/", " ").split() if w != "nvidia"]
    return TABLES / ".".join(map(str, device.capability)) / ("-".join(words) + ".json")


def read_entries(device: DeviceLimits) -> list[dict]:
    """Return the entries of a card's table of block sizes, as the JSON file lists them.

    A card without a table has the entries of another card of its compute capability, or none.
    """
    path = table_path(device)
    paths = [path] if path.is_file() else sorted(path.parent.glob("*.json"))
    return json.loads(paths[0].read_text())["entries"] if paths else []


def attention_memory(case: Case, rows: int, block_tokens: int, num_stages: int) -> int:
    """Return the bytes of shared memory that an attention kernel takes, as measured by compiling.

    Queries and weights of the softmax have the dtype of the products. Three blocks of keys and
    values together are in flight for any number of stages above one. Half a float8 block is
    converted at a time. Products of warpgroups hold four blocks and no weights, on cards with more
    than twice the memory.

    Args:
        case: shapes and dtypes of the call.
        rows: query rows of a tile.
        block_tokens: positions of a block of keys and values.
        num_stages: stages of the loop over blocks.
    """
    itemsize = case.page_dtype.itemsize
    blocks = (3 if num_stages > 1 else 1) * itemsize + (1 if itemsize == 1 else 0)
    queries = rows * (case.H + block_tokens) * case.query_dtype.itemsize
    return queries + block_tokens * case.H * blocks + SMALL_ARRAYS


SMALL_ARRAYS = 512
"""Bytes of maxima, sums and page ids."""


def fitted(config: Fitted, case: Case, rows: int) -> Fitted:
    """Return `config` with `block_tokens` halved until a tile fits the card's shared memory.

    `rows` is the number of query rows of a tile. `block_tokens` stays at least 16.
    """
    block = config.block_tokens
    while block > 16:
        if attention_memory(case, rows, block, config.num_stages) <= case.device.shared_memory:
            break
        block //= 2
    return dataclasses.replace(config, block_tokens=block)


def fit_block(block_tokens: int, case: Case) -> int:
    """Return `block_tokens`, halved while half of it still holds the longest KV of a row.

    The result is at least 16, the rows of the smallest product of tensor cores.
    """
    longest = case.M * case.S
    while block_tokens > 16 and block_tokens // 2 >= longest:
        block_tokens //= 2
    return block_tokens


def defaults(kind: type[Config], case: Case) -> Any:
    """Return the default block sizes for attention or a KV write, as an instance of `kind`.

    They fit the shared memory of the card of the call `case`, and spill no registers.
    """
    exact = case.query_dtype.itemsize == 4  # without tensor cores: small tiles, many threads
    wide = case.H > 128
    narrow = case.page_dtype.itemsize == 1
    if kind is DecodeConfig:
        # Conversion takes registers, more for tiles of several queries.
        is_tight = narrow and (wide or case.op == "ragged")
        merged = 2048 if narrow or (case.op == "decode" and not wide) else 4096
        config = DecodeConfig(
            32 if is_tight else 64, num_stages=2 if wide else 3, merge_numbers=merged
        )
        if exact:
            config = DecodeConfig(block_tokens=32, num_warps=8, num_stages=2)
        return fitted(config, case, rows=16)
    if kind is RaggedConfig:
        # Only Hopper holds 128 rows of 256 sums in the registers of 8 warps.
        short = wide and (narrow or not case.device.has_wgmma)
        # Conversion by integers takes registers of its own.
        by_integers = narrow and not case.device.widens_fp8
        block = 32 if by_integers and case.H > 64 else 64
        # Wide heads, and heads that are converted, leave registers for 16 rows of a split tile.
        split_rows = 16 if wide or narrow else 32
        config = RaggedConfig(64 if short else 128, block, split_rows=split_rows)
        if exact:
            config = RaggedConfig(tile_rows=16, block_tokens=32, split_rows=16)
        return fitted(config, case, config.tile_rows)
    if kind is MosaicConfig and wide:
        return MosaicConfig(num_stages=2, warpgroups=1)
    return kind()


def lookup(kind: type[Config], case: Case) -> Config:
    """Return the block sizes for attention or a KV write, as an instance of `kind`.

    These are the defaults, with the changes of the first entry of the card's table that matches the
    call's operation, dtype, head dim and size.
    """
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
"""Bounds of the mean rows of a group, by which an entry for "grouped_matmul" is chosen."""


def grouped_defaults(dtype: jnp.dtype, up_to: int | None) -> GroupedConfig:
    """Return the default block sizes of a grouped product, from the dtype of its weights.

    `up_to` is the upper limit of the mean rows of a group, one of GROUPED_SIZES. The sizes compile
    for an H200 without spills. They were not timed.
    """
    rows = {16: 16, 64: 64, None: 128}[up_to]
    if dtype.itemsize == 4:  # without tensor cores: small tiles, many threads
        return GroupedConfig(16, 64, 32, num_warps=8, num_stages=2)
    return GroupedConfig(rows, num_warps=8 if rows == 128 else 4)


def grouped_config(case: GroupedCase) -> GroupedConfig:
    """Return the block sizes for a grouped product: defaults, changed by the card's table."""
    mean = -(-case.A // case.E)
    up_to = next(size for size in GROUPED_SIZES if size is None or mean <= size)
    for entry in read_entries(case.device):
        if entry["op"] != case.op or entry["dtype"] != case.dtype.name:
            continue
        if entry["up_to"] is None or mean <= entry["up_to"]:
            return dataclasses.replace(grouped_defaults(case.dtype, up_to), **entry["config"])
    return grouped_defaults(case.dtype, up_to)


def product_config(case: ProductCase) -> ProductConfig:
    """Return the block sizes for a product of few rows: defaults, with changes by card.

    The changes are of the first entry of the card's table that matches the call.
    """
    base = product_defaults(case)
    for entry in read_entries(case.device):
        if entry["op"] != case.op or entry["dtype"] != case.dtype.name:
            continue
        if entry["up_to"] is None or entry["up_to"] >= case.T:
            return dataclasses.replace(base, **entry["config"])
    return base


def product_defaults(case: ProductCase) -> ProductConfig:
    """Return the default block sizes for a product of few rows, which fit the card."""
    if case.is_gated and case.T <= 64 and case.device.num_sms >= 2 * (case.F // 64):
        # Half as many columns give programs for twice as many multiprocessors.
        rows = next(size for size in (16, 32, 64) if size >= case.T)
        return ProductConfig(rows, 32, num_warps=4 if rows == 16 else 2, num_stages=5)
    if case.T <= 16:
        return ProductConfig(block_inner=64 if case.is_gated else 128, num_stages=3 + case.is_gated)
    if case.T <= 64:
        rows = 32 if case.T <= 32 else 64
        return ProductConfig(rows, num_stages=3 if case.is_gated else 4)
    if case.is_gated and case.device.shared_memory >= ROOM_FOR_FOUR_STAGES:
        # One block of all rows reads each weight once, if there are columns for most programs.
        is_wide = case.T > 128 and 3 * case.device.num_sms <= 4 * (case.F // 64)
        return ProductConfig(256 if is_wide else 128, num_warps=8, num_stages=4)
    return ProductConfig(128, num_warps=8, num_stages=2 if case.is_gated else 3)


ROOM_FOR_FOUR_STAGES = 4 * (256 + 2 * 64) * 64 * 2
"""Bytes of shared memory that four stages of 256 rows and 64 columns of two matrices take."""
