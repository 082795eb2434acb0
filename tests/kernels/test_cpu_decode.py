"""The CPU decode kernel: right at every edge, and the same to the bit whatever is beside a row."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from pallas_kernels import paged_decode_attention, reference
from pallas_kernels.cpu import decode as cpu_decode
from pallas_kernels.cpu.arithmetic import exp2, tanh
from pallas_kernels.cpu.ffi import Kernel, compiled, host
from pallas_kernels.cpu.ir_builder import I64, POINTER, VOID, Code, const
from tests.support.fast_compile import FAST
from tests.support.paged_cases import (
    PagedCall,
    assert_close,
    operation_with_keywords,
    paged_call,
    with_keywords,
)

STATIC = ("scale", "window", "soft_cap")
SETUPS = {
    "plain": {},
    "float64": {"dtype": jnp.float64},
    "bfloat16 pages under float64, head dim 8": {
        "dtype": jnp.float64,
        "page_dtype": jnp.bfloat16,
        "head_dim": 8,
        "heads": 2,
    },
    "bfloat16, page size 8, group of 7": {"dtype": jnp.bfloat16, "page_size": 8, "heads": 14},
    "float16, multi-query, page size 32, sinks": {
        "dtype": jnp.float16,
        "page_size": 32,
        "heads": 5,
        "kv_heads": 1,
        "sinks": True,
    },
    "float16 pages, page size 24, window, head dim 40": {
        "page_dtype": jnp.float16,
        "page_size": 24,
        "head_dim": 40,
        "window": 30,
    },
    "page size 64, cap, window, scales": {
        "page_size": 64,
        "soft_cap": 3.0,
        "window": 50,
        "scales": True,
    },
    "float64, cap, sinks, long window": {
        "dtype": jnp.float64,
        "soft_cap": 2.0,
        "window": 200,
        "sinks": True,
        "scale": 0.4,
    },
    "group of 16, head dim 128, shared pages": {"heads": 32, "head_dim": 128, "shared": True},
    "one number a page, many": {"page_size": 1, "head_dim": 8, "window": 7},
    "page size 48, head dim 80": {"page_size": 48, "head_dim": 80},
    "int8, page size 8, cap, window": {
        "dtype": jnp.bfloat16,
        "page_dtype": jnp.int8,
        "page_size": 8,
        "soft_cap": 3.0,
        "window": 50,
    },
    "int8 under float64, group of 7, head dim 40": {
        "dtype": jnp.float64,
        "page_dtype": jnp.int8,
        "head_dim": 40,
        "heads": 14,
    },
    "bfloat16, page size 128, head dim 64": {
        "dtype": jnp.bfloat16,
        "page_size": 128,
        "head_dim": 64,
    },
}


def run(function, call: PagedCall) -> jax.Array:
    """Run a jitted decode with window, scale and cap fixed in the program."""
    static = {name: call.options[name] for name in STATIC}
    arrays = {name: value for name, value in call.options.items() if name not in STATIC}
    jitted = jax.jit(functools.partial(function, **static), compiler_options=FAST)
    return jitted(*call.decode, **arrays)


llvm = operation_with_keywords(paged_decode_attention, "llvm")
oracle = with_keywords(reference.paged_decode_attention)


def decode_call(lengths: list[int], **setup) -> PagedCall:
    return paged_call([(1, length) for length in lengths], **setup)


@pytest.mark.parametrize("name", SETUPS)
def test_every_edge_of_a_page_and_a_block(name: str) -> None:
    setup = SETUPS[name]
    size = setup.get("page_size", 16)
    lengths = [0, 1, size - 1, size, size + 1, 63, 64, 65, 127, 128, 129, 0, 300]
    with jax.enable_x64(setup.get("dtype") is jnp.float64):
        call = decode_call(lengths, **setup)
        wide = call if call.q.dtype == jnp.float64 else call.wide()
        actual = run(llvm, call)
        assert actual.dtype == call.q.dtype
        assert_close(actual, run(oracle, wide), call.q.dtype)
        assert not np.asarray(actual)[np.asarray(call.kv_len) == 0].any()


def select(call: PagedCall, rows: list[int]) -> tuple[jax.Array, ...]:
    q, table, lengths = (
        jnp.asarray(np.asarray(array)[rows]) for array in (call.q, call.page_table, call.kv_len)
    )
    return q, call.k_pages, call.v_pages, table, lengths


@pytest.mark.parametrize(
    "setup", [{}, {"dtype": jnp.bfloat16, "window": 150, "soft_cap": 4.0, "sinks": True}]
)
def test_a_row_is_the_same_to_the_bit_whatever_its_mates(setup: dict) -> None:
    """Alone, in other places, among rows that make other cuts of the work."""
    lengths = [5, 700, 0, 2000, 33, 1, 1500, 128]
    call = decode_call(lengths, heads=6, **setup)
    together = np.asarray(llvm(*call.decode, **call.options))
    for rows in ([0], [1], [3], [6, 3], [7, 7, 7], [4, 3, 2, 1, 0], [3] * 9):
        some = np.asarray(llvm(*select(call, rows), **call.options))
        np.testing.assert_array_equal(some, together[rows])


def parts_of(kernel: Kernel, arrays: tuple[jax.Array, ...]) -> int:
    """Return the number of parts into which a kernel divides a call without a window."""
    operands = [np.asarray(x) for x in arrays]
    window = np.array([2**31 - 1], np.int32)
    buffers = [*operands, np.zeros(1), window, np.zeros(1), np.zeros(1)]
    module = ir.Module("parts")
    kinds = [POINTER if field.size is None else I64 for field in kernel.fields]
    function = ir.Function(module, ir.FunctionType(I64, kinds), "parts")
    code = Code(function)
    code.ret(kernel.parts(code, function.args))
    engine = compiled(module, host())
    kinds = [ctypes.c_void_p if kind is POINTER else ctypes.c_int64 for kind in kinds]
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *kinds)(engine.get_function_address("parts"))
    fields = ((buffers[field.buffer], field.size) for field in kernel.fields)
    return call(*(x.ctypes.data if size is None else x.shape[size] for x, size in fields))


def test_large_work_is_many_parts_and_small_work_one() -> None:
    lengths = np.linspace(0, 5000, 33).astype(int)
    lengths[7], lengths[20] = 0, 1
    call = decode_call(lengths.tolist(), head_dim=32)
    kernel = cpu_decode.PagedDecode(
        "float32", "float32", 16, 2, 32, capped=False, query_dtype="float32"
    )
    assert parts_of(kernel, call.decode) > 8
    assert parts_of(kernel, select(call, [3])) == 1
    assert parts_of(kernel, select(call, [7])) == 1
    assert_close(run(llvm, call), run(oracle, call), jnp.float32)


def test_several_threads_at_once() -> None:
    call = decode_call([900, 3, 0, 2500, 1200, 77], heads=6)
    jitted = jax.jit(llvm)
    expected = np.asarray(jitted(*call.decode))

    def many(_: int) -> bool:
        return all(np.array_equal(jitted(*call.decode), expected) for _ in range(20))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(many, range(6)))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("which", ["k_pages", "v_pages", "q"])
def test_what_is_not_finite_spoils_its_own_row_only(bad: float, which: str) -> None:
    call = decode_call([40, 200, 33])
    call.q = jnp.asarray(np.abs(np.asarray(call.q)))  # a score of -inf would have no weight
    before = np.asarray(llvm(*call.decode))
    values = np.asarray(getattr(call, which)).copy()
    if which == "q":
        values[1, 0, 0] = bad
    else:
        page = int(call.page_table[1, 9])
        values[page, 0, 3, 0] = bad
    setattr(call, which, jnp.asarray(values))
    after = np.asarray(llvm(*call.decode))
    assert not np.isfinite(after[1, 0]).all()
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    np.testing.assert_array_equal(after[1, 2:], before[1, 2:])  # heads of the other kv head


def test_large_scores_do_not_overflow() -> None:
    """The softmax so far shrinks and grows: peaks early, late, and far apart."""
    call = decode_call([300, 300], scale=40.0)
    actual = run(llvm, call)
    assert_close(actual, run(oracle, call), jnp.float32)


def test_infinite_sinks() -> None:
    """A sink of -inf counts as no sink, and one of +inf gives all other scores no weight."""
    call = decode_call([20, 300])
    plain = llvm(*call.decode)
    sinks = jnp.asarray([-jnp.inf, 0, 1e30, -jnp.inf])
    actual = llvm(*call.decode, sinks=sinks)
    np.testing.assert_array_equal(actual[:, 0], plain[:, 0])
    assert not np.asarray(actual[:, 2]).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_pages_are_not_copied(dtype) -> None:
    call = decode_call([20, 30], dtype=dtype)
    text = jax.jit(llvm).lower(*call.decode).compile().as_text()
    entry = text[text.index("ENTRY") :]
    shape = ",".join(map(str, call.k_pages.shape))
    made = [line for line in entry.splitlines() if f"[{shape}]" in line.partition(" = ")[2][:40]]
    assert len(made) == 2 and all("parameter(" in line for line in made)


def over(write, x: np.ndarray) -> np.ndarray:
    """Return the results of `write(code, vector)` for each 4 numbers of x."""
    real = {4: ir.FloatType(), 8: ir.DoubleType()}[x.dtype.itemsize]
    module = ir.Module("over")
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, POINTER, I64]), "over")
    code = Code(function)
    source, target, count = function.args
    with code.loop(const(0), count, 4) as (at, _):
        code.write_vector(write(code, code.read_vector(source, at, real, 4)), target, at)
    code.ret_void()
    engine = compiled(module, host())
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    y = np.empty_like(x)
    kind(engine.get_function_address("over"))(x.ctypes.data, y.ctypes.data, x.size)
    return y


@pytest.mark.parametrize(("dtype", "least"), [(np.float32, -126), (np.float64, -1022)])
def test_exp2_and_tanh(dtype, least: int) -> None:
    unit = np.finfo(dtype).eps
    x = np.concatenate([np.linspace(least, 4, 100_000), np.linspace(-1e-3, 1e-3, 1000)])
    x = x.astype(dtype)
    exact = np.exp2(x.astype(np.longdouble))
    assert np.abs(over(exp2, x) / exact - 1).max() < 1.5 * unit
    x = np.concatenate([np.linspace(-30, 30, 100_000), np.geomspace(1e-30, 1, 1000)]).astype(dtype)
    exact = np.tanh(x.astype(np.longdouble))
    assert np.abs(over(tanh, x) - exact).max() < 2 * unit
    real = exact != 0
    assert np.abs(over(tanh, x)[real] / exact[real] - 1).max() < 4 * unit
    edges = np.array([-np.inf, 2 * least, np.nan, 0], dtype)
    np.testing.assert_array_equal(over(exp2, edges), np.array([0, 0, np.nan, 1], dtype))
    edges = np.array([-np.inf, np.inf, np.nan, 0], dtype)
    np.testing.assert_array_equal(over(tanh, edges), np.array([-1, 1, np.nan, 0], dtype))


def test_llvm_is_imported_when_it_is_used() -> None:
    program = "import sys, pallas_kernels; print([m for m in sys.modules if 'llvm' in m])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
