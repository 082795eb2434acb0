"""The project's CPU kernels beside XLA's own code for the same work, in turns of one process.

    python -m scripts.bench.cpu_kernels                            # everything, about three minutes
    python -m scripts.bench.cpu_kernels --part products --rows 16 --json kernels.json

Parts:

    products   rows times weights of 768 by 2048, in each form that weights have here. XLA's are in
               float32, stored in the plain order. The weights lie in more copies than caches hold.
    experts    the same for 8 experts, of which each token takes two
    decode     one query a row over pages: 16 rows of 150 to 450 tokens, and one of 300
    chunk      512 tokens of a prompt, behind 0 and 1,024 others
    draws      tokens of 1 and 8 rows of 49,152 logits. XLA runs the specification in plain JAX

A ratio is how many times as fast ours is: the median over turns, with the least and the most. The
speeds beside it are of the median turn, in GFLOP/s, and in GB/s of weights, keys and values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.commands.argument_types import positive_integer
from jaxserve.execution.sampling import plain_draw
from pallas_kernels import (
    DrawSettings,
    draw,
    grouped_matmul,
    paged_decode_attention,
    ragged_paged_attention,
)
from pallas_kernels.arguments import Case
from pallas_kernels.cpu.ffi import host
from pallas_kernels.cpu.panels import PANEL, in_panels
from pallas_kernels.ops import panel_product, quantized_panel_product
from scripts.lib.argument_types import bench_parser, integers
from scripts.lib.attention_arrays import attention_arrays
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

INPUTS, OUTPUTS, EXPERTS, TAKEN = 768, 2048, 8, 2
VOCABULARY = 49152
BEYOND_CACHES = 100e6  # bytes
SECONDS_A_TURN = 0.05
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 12, 4, 64, 16
FORMS = ("float32", "bfloat16", "int8", "fp8", "int4")
Arrays = tuple[jax.Array, ...]


class Pair(NamedTuple):
    """Pair of ways to the same result.

    Attributes:
        name: of the work.
        ours, theirs: functions that are called with each copy of the weights or pages in turn.
        copies, their_copies: the copies of weights or pages.
        operations, bytes: of one call of ours.
    """

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    copies: Sequence[Arrays]
    their_copies: Sequence[Arrays]
    operations: float
    bytes: float


def copies_of(arrays: Arrays) -> list[Arrays]:
    """Make so many copies that no cache holds all."""
    size = sum(array.nbytes for array in arrays)
    return [arrays, *(tuple(a.copy() for a in arrays) for _ in range(int(BEYOND_CACHES // size)))]


def stored(form: str, weight: np.ndarray, random: np.random.Generator) -> Arrays:
    """Store a weight [..., I, O] as a form's kernel takes it, quantized ones by random codes."""
    if form in ("float32", "bfloat16"):
        whole = weight.reshape(-1, *weight.shape[-2:])
        panels = [in_panels(np.asarray(jnp.asarray(matrix).astype(form))) for matrix in whole]
        return (jnp.asarray(np.stack(panels).reshape(*weight.shape[:-2], *panels[0].shape)),)
    *experts, inputs, outputs = weight.shape
    rows, groups = (inputs // 2, inputs // PANEL) if form == "int4" else (inputs, 1)
    kind = np.int8 if form == "int8" else np.uint8
    shape = (*experts, outputs // PANEL)
    codes = random.integers(0, 120, (*shape, rows, PANEL)).astype(kind)
    scales = random.random((*shape, groups, PANEL), np.float32)
    return jnp.asarray(codes), jnp.asarray(scales)


def product(form: str, grouped: bool) -> Callable[..., Any]:
    """Make a kernel of ours that multiplies rows by weights (or by the weights of its expert)."""

    def run(x: jax.Array, counts: jax.Array | None, *weights: jax.Array) -> jax.Array:
        if form in ("float32", "bfloat16"):
            return panel_product(x, weights[0], form, counts)
        codes, scales = weights
        return quantized_panel_product(
            x, codes, scales, None, form=form, scales_dtype="float32", num_rows=counts
        )

    if grouped:
        return jax.jit(run)
    return jax.jit(lambda x, *weights: run(x, None, *weights))


def products(sizes: Sequence[int], grouped: bool = False) -> Iterator[Pair]:
    """Yield pairs of a product in each form, by rows, or, if `grouped`, of experts by tokens."""
    random = np.random.default_rng(0)
    shape = (EXPERTS, INPUTS, OUTPUTS) if grouped else (INPUTS, OUTPUTS)
    weight = random.standard_normal(shape, np.float32)
    plain = copies_of((jnp.asarray(weight),))
    theirs = jax.jit(lambda x, w: x @ w)
    if grouped:
        theirs = jax.jit(lambda x, counts, w: grouped_matmul(x, w, counts, implementation="xla"))
    for form in FORMS:
        mine = copies_of(stored(form, weight, random))
        ours, read = product(form, grouped), sum(array.nbytes for array in mine[0])
        for size in sizes:
            rows, share, groups = size, 1.0, ()
            if grouped:
                rows = size * TAKEN
                chosen = [random.choice(EXPERTS, TAKEN, replace=False) for _ in range(size)]
                counts = np.bincount(np.concatenate(chosen), minlength=EXPERTS).astype(np.int32)
                share, groups = np.count_nonzero(counts) / EXPERTS, (jnp.asarray(counts),)
            x = jnp.asarray(random.standard_normal((rows, INPUTS), np.float32))
            narrow = x.astype(jnp.bfloat16) if form == "bfloat16" and host().dots else x
            yield Pair(
                f"{form}, {'tokens' if grouped else 'rows'}: {size}",
                ours,
                theirs,
                [(narrow, *groups, *arrays) for arrays in mine],
                [(x, *groups, *arrays) for arrays in plain],
                2 * rows * INPUTS * OUTPUTS,
                read * share,
            )


def attention(
    name: str, function: Callable[..., Any], lengths: Sequence[int], queries: int
) -> Pair:
    """Make a pair for rows of these lengths, `queries` in each, over scattered pages."""
    rows, pages = len(lengths), -(-max(lengths) // PAGE_SIZE)
    kind, dtype = ("decode" if queries == 1 else "ragged"), jnp.dtype(jnp.float32)
    tokens, number = rows * queries, rows * pages
    sizes = (tokens, rows, number, PAGE_SIZE, pages, HEADS, KV_HEADS, HEAD_DIM)
    case = Case(kind, "cpu", dtype, dtype, *sizes)
    q, k_pages, v_pages, *where = attention_arrays(case, np.array(lengths))

    def by(implementation: str) -> Callable[..., Any]:
        return jax.jit(lambda *arrays: function(*arrays, implementation=implementation))

    copies = [(q, *key_values, *where) for key_values in copies_of((k_pages, v_pages))]
    seen = sum(length - (queries - 1) / 2 for length in lengths) * queries
    numbers = 2 * KV_HEADS * HEAD_DIM * sum(lengths)
    return Pair(
        name, by("llvm"), by("xla"), copies, copies, 4 * HEADS * HEAD_DIM * seen, 4 * numbers
    )


def decode(_: Sequence[int]) -> Iterator[Pair]:
    lengths = np.linspace(150, 450, 16).astype(int).tolist()
    yield attention("16 rows of 150 to 450", paged_decode_attention, lengths, 1)
    yield attention("1 row of 300", paged_decode_attention, [300], 1)


def chunk(_: Sequence[int]) -> Iterator[Pair]:
    for before in (0, 1024):
        yield attention(f"512 behind {before:,}", ragged_paged_attention, [before + 512], 512)


def draws(_: Sequence[int]) -> Iterator[Pair]:
    settings = {"temperature": (0, 1.0), "top_k 50": (50, 1.0), "top_p 0.9": (0, 0.9)}
    for rows in (1, 8):
        random = np.random.default_rng(rows)
        logits = jnp.asarray(random.normal(0, 3, (rows, VOCABULARY)), jnp.float32)
        likeliest = logits.max(axis=1), logits.argmax(axis=1).astype(jnp.int32)
        seed, position = random.integers(0, 2**32, (rows, 2), np.uint32), np.arange(rows)
        for name, (top_k, top_p) in settings.items():
            floats = (np.full(rows, number, np.float32) for number in (0.8, 0.0, top_p))
            temperature, min_p, share = map(jnp.asarray, floats)
            count = jnp.full(rows, top_k, jnp.int32)
            where = jnp.asarray(seed), jnp.asarray(position, jnp.int32)
            drawing = DrawSettings(temperature, min_p, count, share, *where)
            arrays = (logits, *likeliest, drawing)
            run = f"{name}, rows: {rows}", jax.jit(draw), jax.jit(plain_draw)
            yield Pair(*run, [arrays], [arrays], logits.size, 4 * logits.size)


PARTS = {
    "products": products,
    "experts": partial(products, grouped=True),
    "decode": decode,
    "chunk": chunk,
    "draws": draws,
}


def seconds_a_call(run: Callable[..., Any], copies: Sequence[Arrays], calls: int) -> float:
    started = time.perf_counter()
    for nth in range(calls):
        result = run(*copies[nth % len(copies)])
    result.block_until_ready()
    return (time.perf_counter() - started) / calls


def timed(pair: Pair, turns: int) -> dict[str, Any]:
    """Time both in turn, each beginning every second time."""
    sides = [(pair.ours, pair.copies), (pair.theirs, pair.their_copies)]
    calls = []
    for run, copies in sides:
        run(*copies[0]).block_until_ready()
        once = seconds_a_call(run, copies, len(copies))
        calls.append(max(len(copies), int(SECONDS_A_TURN / once)))
    found: list[list[float]] = [[], []]
    for turn in range(turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            found[side].append(seconds_a_call(*sides[side], calls[side]))
    ratios = [theirs / ours for ours, theirs in zip(*found, strict=True)]
    ours = statistics.median(found[0])
    return {
        "work": pair.name,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "gflops": pair.operations / ours / 1e9,
        "gbytes": pair.bytes / ours / 1e9,
    }


def main() -> int:
    parser = bench_parser("scripts.bench.cpu_kernels", __doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument(
        "--rows", type=integers, default=[1, 4, 16, 64, 256], help="of products, tokens of experts"
    )
    parser.add_argument("--turns", type=positive_integer, default=7)
    arguments = parser.parse_args()
    about = about_run()
    for part in arguments.part or PARTS:
        print(f"{part:34}{'over XLA':>9}{'least':>7}{'most':>7}{'GFLOP/s':>9}{'GB/s':>7}")
        rows = []
        for pair in PARTS[part](arguments.rows):
            row = timed(pair, arguments.turns)
            rows.append(row)
            print(
                f"  {row['work']:32}{row['ratio']:>9.2f}{row['least']:>7.2f}{row['most']:>7.2f}"
                f"{row['gflops']:>9.0f}{row['gbytes']:>7.1f}",
                flush=True,
            )
        if arguments.json:
            keep(arguments.json, {part: rows}, about)
    return 0


if __name__ == "__main__":
    run_main(main)
