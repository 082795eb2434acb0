"""Find block sizes on the GPU at hand and write pallas_kernels/tuned/<device>.json.

    python scripts/tune_kernels.py                 sweep on this GPU (about ten minutes)
    python scripts/tune_kernels.py --dtypes bfloat16 --head-dims 128
    python scripts/tune_kernels.py --defaults "NVIDIA H200"   write the defaults, no GPU needed

For every dtype, head dim and bucket the candidates are timed in turn, interleaved, and the one
with the smallest median is kept. A candidate that does not compile or run is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import gpu_timing
from argument_types import some_of
from pallas_kernels import hopper_ragged, triton_decode, triton_ragged, tuning
from pallas_kernels.arguments import Case

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS, KV_HEADS, PAGE_SIZE = 32, 8, 16
DECODE_BUCKETS = ((1, 8192), (8, 4096), (64, 4096), (256, 2048))
"""(rows, positions of each) that stand for buckets of up to that many rows; the last for any."""
RAGGED_BUCKETS = ((512, 2), (2048, 1), (8192, 1))
"""(tokens, prompts they belong to) likewise."""
UNMEASURED = "not measured: defaults"


def candidates(op: str, case: Case) -> Iterator[Any]:
    """Configurations worth timing for a call."""
    if op == "decode":
        grid = itertools.product((32, 64, 128), (4, 8), (2, 3, 5, 7), (528, 1056, 2112))
        for block, warps, stages, programs in grid:
            yield tuning.DecodeConfig(block, warps, stages, programs)
    elif op == "ragged":
        base = tuning.defaults(tuning.RaggedConfig, case)
        yield base
        for rows, block, stages in itertools.product((64, 128), (32, 64, 128), (2, 3)):
            if case.query_dtype.itemsize == 2:
                yield dataclasses.replace(
                    base,
                    tile_rows=rows,
                    block_tokens=block,
                    num_warps=4 if rows == 64 else 8,
                    num_stages=stages,
                )
    else:
        for block, stages, groups in itertools.product((64, 128), (2, 3, 4), (1, 2)):
            yield tuning.MosaicConfig(block, stages, groups)


def case_of(op: str, dtype: str, head_dim: int, tokens: int, rows: int, pages: int) -> Case:
    """Description of a tuned call. ``pages``: per row."""
    query = jnp.dtype(jnp.bfloat16 if dtype == "float8_e4m3fn" else dtype)
    return Case(
        op="decode" if op == "decode" else "ragged",
        platform="gpu",
        query_dtype=query,
        page_dtype=jnp.dtype(dtype),
        T=tokens,
        R=rows,
        P=rows * pages + 1,
        S=PAGE_SIZE,
        M=pages,
        N=HEADS,
        K=KV_HEADS,
        H=head_dim,
    )


def runner(op: str, case: Case, config: Any, interpret: bool) -> Callable[..., jax.Array]:
    """A jitted call of one operation with one configuration."""
    extra = {"interpret": True} if interpret else {}
    functions = {
        "decode": triton_decode.paged_decode_attention,
        "ragged": triton_ragged.ragged_paged_attention,
        "mosaic_ragged": hopper_ragged.ragged_paged_attention,
    }
    return jax.jit(lambda *arrays: functions[op](*arrays, config=config, **extra))


def sweep_one(
    op: str, case: Case, arrays: tuple[jax.Array, ...], limit: int | None, interpret: bool
) -> tuple[dict[str, Any], float]:
    """The fields in which the fastest configuration differs from the defaults, and its seconds."""
    base = tuning.defaults(tuning.CONFIGS[op], case)
    configs = list(dict.fromkeys([base, *candidates(op, case)]))[:limit]
    timed = {}
    for config in configs:
        call = runner(op, case, config, interpret)
        try:
            jax.block_until_ready(call(*arrays))
        except Exception as error:
            print(f"  {config}: {str(error).splitlines()[0][:100]}")
            continue
        timed[config] = call
    seconds = gpu_timing.interleaved(timed, arrays)
    best = min(seconds, key=seconds.__getitem__)
    changed = {
        field.name: getattr(best, field.name)
        for field in dataclasses.fields(best)
        if getattr(best, field.name) != getattr(base, field.name)
    }
    return changed, seconds[best]


def buckets(op: str, tiny: bool) -> list[tuple[int | None, int, int, int]]:
    """(up_to, tokens, rows, pages per row) of an operation."""
    if op == "decode":
        sizes = ((2, 64),) if tiny else DECODE_BUCKETS
        found = [(rows, rows, rows, length // PAGE_SIZE) for rows, length in sizes]
    else:
        sizes = ((32, 2),) if tiny else RAGGED_BUCKETS
        found = [(T, T, R, -(-T // R // PAGE_SIZE)) for T, R in sizes]
    return [*found[:-1], (None, *found[-1][1:])]


def sweep(
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    operations: tuple[str, ...] = ("decode", "ragged", "mosaic_ragged"),
    tiny: bool = False,
) -> list[dict[str, Any]]:
    """Entries of a tuning table. ``tiny`` rehearses: small shapes, interpreted, two candidates."""
    entries = []
    for op, dtype, head_dim in itertools.product(operations, dtypes, head_dims):
        if op == "mosaic_ragged" and (tiny or dtype not in ("bfloat16", "float16")):
            continue
        if op == "mosaic_ragged" and head_dim not in (64, 128, 256):
            continue
        for up_to, tokens, rows, pages in buckets(op, tiny):
            case = case_of(op, dtype, head_dim, tokens, rows, pages)
            arrays = gpu_timing.attention_arrays(case)
            config, seconds = sweep_one(op, case, arrays, 2 if tiny else None, tiny)
            print(f"{op} {dtype} h{head_dim} up to {up_to}: {seconds * 1e6:.1f} us {config}")
            entry = {"op": op, "dtype": dtype, "head_dim": head_dim, "up_to": up_to}
            entries.append({**entry, "config": config})
    return entries


def default_entries() -> list[dict[str, Any]]:
    """Entries that state the defaults for every dtype and head dim."""
    entries = []
    for op, kind in tuning.CONFIGS.items():
        for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
            mosaic = dtype in ("bfloat16", "float16") and head_dim in (64, 128, 256)
            if op == "mosaic_ragged" and not mosaic:
                continue
            config = tuning.defaults(kind, case_of(op, dtype, head_dim, 64, 64, 64))
            entry = {"op": op, "dtype": dtype, "head_dim": head_dim, "up_to": None}
            entries.append({**entry, "config": dataclasses.asdict(config)})
    for dtype, up_to in itertools.product(DTYPES[:3], tuning.GROUPED_SIZES):
        config = tuning.grouped_defaults(jnp.dtype(dtype), up_to)
        entry = {"op": "grouped_matmul", "dtype": dtype, "head_dim": None, "up_to": up_to}
        entries.append({**entry, "config": dataclasses.asdict(config)})
    return entries


def write(device_kind: str, measured: str, entries: list[dict[str, Any]]) -> None:
    """Write a device's table, one entry a line."""
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    head = f'{{"device_kind": {json.dumps(device_kind)},\n "measured": {json.dumps(measured)},\n'
    path = tuning.TABLES / tuning.table_name(device_kind)
    path.write_text(f'{head} "entries": [\n  {lines}\n ]}}\n')
    print(f"wrote {path}")


def merge(device_kind: str, measured: str, entries: list[dict[str, Any]]) -> None:
    """Put measured entries in a device's table in place of those for the same calls."""
    done = {(e["op"], e["dtype"], e["head_dim"]) for e in entries}
    known = tuning.read_entries(device_kind) or default_entries()
    rest = [e for e in known if (e["op"], e["dtype"], e["head_dim"]) not in done]
    write(device_kind, measured, entries + rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--defaults", metavar="DEVICE", help="write untuned defaults for a device")
    parser.add_argument("--dtypes", type=some_of(DTYPES), default="bfloat16,float8_e4m3fn")
    sizes = some_of([str(size) for size in HEAD_DIMS])
    parser.add_argument("--head-dims", type=sizes, default="64,128,256")
    arguments = parser.parse_args()
    if arguments.defaults:
        write(arguments.defaults, UNMEASURED, default_entries())
        return
    if jax.default_backend() != "gpu":
        raise SystemExit("no GPU: a sweep measures; --defaults DEVICE writes the untuned table")
    dtypes = tuple(arguments.dtypes)
    head_dims = tuple(int(h) for h in arguments.head_dims)
    today = datetime.date.today().isoformat()
    merge(jax.devices()[0].device_kind, today, sweep(dtypes, head_dims))


if __name__ == "__main__":
    main()
