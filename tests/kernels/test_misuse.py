"""A wrong call is refused with the name of the argument at fault."""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    check_page_table,
    kv_write,
    paged_decode_attention,
    quantized_kv_write,
    ragged_paged_attention,
)
from pallas_kernels.arguments import AttentionOptions, Case
from pallas_kernels.devices import DeviceLimits, find_card
from pallas_kernels.implementation import choose


def zeros(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


CODES = zeros(4, 2, 16, 16, dtype=jnp.int8)


def good() -> dict:
    """Return arguments of a correct ragged call: T=5, R=2, P=4, S=16, M=2, N=4, K=2, H=16."""
    return {
        "q": zeros(5, 4, 16),
        "k_pages": zeros(4, 2, 16, 16),
        "v_pages": zeros(4, 2, 16, 16),
        "page_table": zeros(2, 2, dtype=jnp.int32),
        "query_start": jnp.asarray([0, 2, 5], jnp.int32),
        "kv_len": jnp.asarray([2, 9], jnp.int32),
    }


WRONG = {
    "q of rank 2": ({"q": zeros(5, 64)}, r"q has 2 dimensions .* \[T,N,H\]"),
    "int q": ({"q": zeros(5, 4, 16, dtype=jnp.int32)}, "q has dtype int32; allowed: bfloat16"),
    "head dim": ({"q": zeros(5, 4, 32)}, "q has head dim 32; expected that of k_pages, 16"),
    "heads": ({"q": zeros(5, 3, 16)}, "q has N = 3 heads; expected a multiple of the K = 2"),
    "no tokens": ({"q": zeros(0, 4, 16)}, "q has no tokens"),
    "int pages": ({"k_pages": zeros(4, 2, 16, 16, dtype=jnp.int16)}, "k_pages has dtype int16"),
    "int8 without scales": (
        {"k_pages": CODES, "v_pages": CODES},
        r"k_pages has dtype int8; expected k_scale and v_scale, \[P,K,S\]",
    ),
    "int8 with scales of heads": (
        {"k_pages": CODES, "v_pages": CODES, "k_scale": zeros(2), "v_scale": zeros(2)},
        r"k_scale has shape \(2,\); expected \[P,K,S\] = \(4, 2, 16\)",
    ),
    "v shape": ({"v_pages": zeros(4, 2, 8, 16)}, "v_pages has shape"),
    "v dtype": ({"v_pages": zeros(4, 2, 16, 16, dtype=jnp.bfloat16)}, "v_pages has dtype bfloat16"),
    "table dtype": ({"page_table": zeros(2, 2)}, "page_table has dtype float32; allowed: int32"),
    "table rank": ({"page_table": zeros(2, dtype=jnp.int32)}, "page_table has 1 dimensions"),
    "lengths": ({"kv_len": zeros(3, dtype=jnp.int32)}, r"kv_len has shape \(3,\); expected \[R\]"),
    "starts": ({"query_start": zeros(2, dtype=jnp.int32)}, r"query_start has shape \(2,\)"),
    "window": ({"window": 0}, "window is 0; expected None or a positive int"),
    "soft cap": ({"soft_cap": -1.0}, "soft_cap is -1.0"),
    "scale": ({"scale": float("nan")}, "scale is nan"),
    "sinks": ({"sinks": zeros(2)}, r"sinks has shape \(2,\); expected \[N\] = \(4,\)"),
    "one scale": ({"k_scale": zeros(2)}, "k_scale and v_scale must be given together"),
    "scale shape": ({"k_scale": zeros(3), "v_scale": zeros(2)}, r"k_scale has shape \(3,\)"),
    "name": ({"implementation": "cuda"}, "implementation is 'cuda'; allowed: auto, mosaic_gpu"),
    "no gpu": ({"implementation": "triton"}, "triton needs a GPU and the platform is cpu"),
}


def attend(implementation: str = "auto", **arguments: Any) -> jax.Array:
    arrays = {name: arguments.pop(name) for name in good()}
    options = AttentionOptions(**arguments)
    return ragged_paged_attention(**arrays, options=options, implementation=implementation)


@pytest.mark.parametrize("name", WRONG)
def test_ragged_refuses(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        attend(**{**good(), **change})


def test_int8_pages_are_written_with_their_scales_alone() -> None:
    new, slots = zeros(5, 2, 16), zeros(5, dtype=jnp.int32)
    scales = {name: zeros(4, 2, 16) for name in ("k_scale", "v_scale")}
    with pytest.raises(ValueError, match="k_pages has dtype int8; quantized_kv_write stores"):
        kv_write(new, new, CODES, CODES, slots, **scales)
    pages = zeros(4, 2, 16, 16)
    with pytest.raises(ValueError, match="k_pages has dtype float32; allowed: int8"):
        quantized_kv_write(new, new, pages, pages, *scales.values(), slots)
    arrays = (new, new, CODES, CODES, *scales.values(), slots)
    with pytest.raises(ValueError, match="triton needs a GPU"):
        quantized_kv_write(*arrays, implementation="triton")


def test_decode_refuses_another_number_of_rows() -> None:
    arguments = good()
    del arguments["query_start"]
    with pytest.raises(ValueError, match="q has 5 rows; expected the R = 2 rows of page_table"):
        paged_decode_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": zeros(5, 3, 16)}, "k has shape"),
        ({"v": zeros(5, 2, 16, dtype=jnp.bfloat16)}, "v has dtype bfloat16"),
        ({"slot_mapping": zeros(4, dtype=jnp.int32)}, "slot_mapping has shape"),
        ({"slot_mapping": zeros(5)}, "slot_mapping has dtype float32"),
    ],
)
def test_kv_write_refuses(change: dict, message: str) -> None:
    arguments = {
        "k": zeros(5, 2, 16),
        "v": zeros(5, 2, 16),
        "k_pages": zeros(4, 2, 16, 16),
        "v_pages": zeros(4, 2, 16, 16),
        "slot_mapping": zeros(5, dtype=jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        kv_write(**{**arguments, **change})


CPU = DeviceLimits("cpu", "cpu")


def gpu_case(**change) -> Case:
    fields = {
        "op": "decode",
        "device": find_card("H200").limits,
        "query_dtype": jnp.dtype(jnp.bfloat16),
        "page_dtype": jnp.dtype(jnp.bfloat16),
        "T": 8,
        "R": 8,
        "P": 1024,
        "S": 16,
        "M": 64,
        "N": 32,
        "K": 8,
        "H": 128,
    }
    return Case(**{**fields, **change})


ON_T4, ON_B300 = ({"device": find_card(name).limits} for name in ("T4", "B300"))
FP8_ARRAY = {"page_dtype": jnp.dtype(jnp.float8_e4m3fn), "P": 3 * 2**31 // 2 // (8 * 16 * 128)}


@pytest.mark.parametrize(
    ("requested", "change", "message"),
    [
        ("triton", {"S": 24}, "page size S = 24; allowed: (16, 32, 64, 128)"),
        ("triton", {"H": 72}, "head dim is 72; allowed: multiples of 16"),
        ("triton", {"N": 136}, "17 heads per kv head; allowed: 1 to 16"),
        ("triton", {"query_dtype": jnp.dtype(jnp.float64)}, "dtypes are float64"),
        ("triton", FP8_ARRAY, "one-byte page arrays from 2 to 4 GiB are not addressable"),
        ("llvm", {}, "llvm needs a CPU and the platform is gpu; allowed: triton or xla"),
        ("triton", ON_T4, "card of capability 8.0, and this is Tesla T4 (compute capability 7.5)"),
        ("mosaic_gpu", {}, "no mosaic_gpu kernel for decode"),
        ("mosaic_gpu", {"op": "ragged", **ON_B300}, "needs capability 9.0 and the card is"),
        ("mosaic_gpu", {"op": "ragged", "H": 96}, "head dim is 96; allowed: 64, 128 or 256"),
        ("mosaic_gpu", {"op": "ragged", **FP8_ARRAY}, "allowed: bfloat16 or float16 for both"),
    ],
)
def test_named_implementation_never_falls_through(
    requested: str, change: dict, message: str
) -> None:
    case = gpu_case(**change)
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(requested, case)
    assert choose("auto", case) in ("triton", "xla")


FLOAT64 = {"page_dtype": jnp.dtype(jnp.float64), "query_dtype": jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "kv_write"}, "there is no llvm kernel for kv_write; allowed: xla"),
        ({"S": 512}, "page size S = 512; allowed: 1 to 256"),
        ({"H": 36}, "head dim is 36; allowed: multiples of 8 from 8 to 256"),
        ({"H": 576}, "head dim is 576; allowed: multiples of 8 from 8 to 256"),
        ({"N": 136}, "17 heads per kv head; allowed: 1 to 16"),
        ({"page_dtype": jnp.dtype(jnp.float8_e4m3fn)}, "over float8_e4m3fn pages; allowed: bfl"),
        (FLOAT64, "dtypes are float32 over float64 pages; allowed: bfloat16"),
    ],
)
def test_what_llvm_cannot_do_is_left_to_xla(change: dict, message: str) -> None:
    case = gpu_case(**{"device": CPU, **change})
    with pytest.raises(ValueError, match=re.escape(message)):
        choose("llvm", case)
    assert choose("auto", case) == "xla"


def test_llvm_can_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    case = gpu_case(device=CPU)
    with pytest.raises(ValueError, match="llvm needs the package llvmlite, which is not installed"):
        choose("llvm", case)
    assert choose("auto", case) == "xla"


def test_auto_follows_the_table() -> None:
    assert choose("auto", gpu_case()) == "triton"
    assert choose("auto", gpu_case(op="ragged")) == "mosaic_gpu"
    assert choose("auto", gpu_case(op="ragged", H=256)) == "triton"
    assert choose("auto", gpu_case(op="ragged", device=find_card("A100").limits)) == "triton"
    assert choose("auto", gpu_case(S=24)) == "xla"
    assert choose("auto", gpu_case(**ON_T4)) == "xla"
    assert choose("auto", gpu_case(**ON_B300)) == "triton"
    assert choose("auto", gpu_case(device=CPU)) == "llvm"
    assert choose("auto", gpu_case(device=CPU, op="kv_write")) == "xla"
    assert choose("auto", gpu_case(device=DeviceLimits("tpu", "TPU v5e"))) == "xla"


def test_page_table_check_names_the_entry() -> None:
    table, lengths = np.array([[0, 1], [3, 99]]), np.array([20, 16])
    check_page_table(table, lengths, num_pages=4, page_size=16)
    with pytest.raises(ValueError, match=r"page_table\[1, 1\] is 99; allowed: 0 to P-1 = 3"):
        check_page_table(table, np.array([20, 17]), num_pages=4, page_size=16)
    with pytest.raises(ValueError, match=r"kv_len\[0\] is 33; allowed: 0 to M\*S = 32"):
        check_page_table(table, np.array([33, 0]), num_pages=4, page_size=16)
    with pytest.raises(ValueError, match="row 1 has 4 queries but kv_len 3"):
        check_page_table(table, np.array([1, 3]), 4, 16, query_start=np.array([0, 1, 5]))
