"""rope_kv_write: every implementation gives the reference's queries and pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NormOptions, QkvOptions, reference, rope_kv_write
from tests.support.fast_compile import EXACT, FAST

FP8 = jnp.float8_e4m3fn
SIZE, PAGES = 16, 4


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of call: its optional parts and its sizes."""

    dtype: Any = jnp.bfloat16
    page_dtype: Any = None
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 32
    pairs: int | None = 16  # None: no rotation
    interleaved: bool = False
    parts: int = 0
    bias: bool = False
    norm: str | None = None  # "head", "own", "all"
    offset: float = 0.0
    rounds_last: bool = False
    scaled: bool = False


KINDS = (
    Kind(),
    Kind(kv_heads=1, group=1, head_dim=16, pairs=8),
    Kind(parts=4, bias=True),
    Kind(parts=1, norm="head", head_dim=80, pairs=40),
    Kind(norm="own", pairs=8, interleaved=True, group=3),
    Kind(norm="head", offset=1.0, rounds_last=True, head_dim=48, pairs=24, kv_heads=1),
    Kind(pairs=None, group=7, parts=2),
    Kind(pairs=None, norm="head", head_dim=112, group=5),
    Kind(interleaved=True, head_dim=64, pairs=24, page_dtype=FP8, scaled=True),
    Kind(page_dtype=FP8, parts=2, norm="head"),
    Kind(dtype=jnp.float32, norm="own", parts=2, bias=True, group=16, head_dim=16, pairs=5),
    Kind(dtype=jnp.float32, page_dtype=jnp.bfloat16, head_dim=256, pairs=128, group=2),
    Kind(norm="all", kv_heads=3, parts=2),
    Kind(dtype=jnp.float16, norm="head", kv_heads=3, head_dim=96, pairs=48),
)


def call(kind: Kind, tokens: int, seed: int = 0) -> tuple[list[Any], jnp.dtype]:
    """Return the operands of a call, in which one token is stored nowhere, and its dtype.

    Pages are NaN, so that a write to another place shows, and so are tokens of padding.
    """
    rng = np.random.default_rng(seed)
    heads, group, width = kind.kv_heads, kind.group, kind.head_dim
    dtype, page_dtype = jnp.dtype(kind.dtype), jnp.dtype(kind.page_dtype or kind.dtype)
    shape = (tokens, heads, group + 2, width)
    numbers = rng.standard_normal((*(kind.parts,) * bool(kind.parts), *shape)) * 3
    if kind.parts:
        numbers = np.concatenate([numbers, np.full_like(numbers[:, :1], np.nan)], axis=1)
    qkv = jnp.asarray(numbers, jnp.float32 if kind.parts else dtype)
    cos_sin = None
    if kind.pairs is not None:
        angles = rng.uniform(0, 99, (tokens, kind.pairs))
        cos_sin = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))

    def draw(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 2, shape), dtype)

    norms = {}
    if kind.norm is not None:
        own = kind.norm != "head"
        norms["query_norm"] = draw(heads, group, width) if own else draw(width)
        norms["key_norm"] = draw(heads, width) if own else draw(width)
        if kind.norm == "all":
            norms["mean_squares"] = draw(tokens, 2, dtype=jnp.float32)
        norms["norm"] = NormOptions(1e-5, kind.offset, kind.rounds_last)
    if kind.scaled:
        norms |= {name: draw(heads, dtype=jnp.float32) for name in ("k_scale", "v_scale")}
    bias = draw(heads, group + 2, width) if kind.bias else None
    options = QkvOptions(bias=bias, interleaved=kind.interleaved, **norms)
    pages = jnp.full((PAGES, heads, SIZE, width), jnp.nan, page_dtype)
    slots = np.asarray(rng.permutation(PAGES * SIZE)[:tokens], np.int32)
    slots[tokens // 2] = -1 if tokens % 2 else PAGES * SIZE
    return [qkv, cos_sin, pages, pages, jnp.asarray(slots), options], dtype


def step_of(dtype: Any) -> float:
    """Return the distance of numbers next to each other, as a share of them."""
    return float(jnp.finfo(dtype).eps)


def calls(kinds: Sequence[Kind], tokens: int) -> list[Any]:
    """Return kinds with several tokens, and with one, which every third has in the usual run.

    One token is a grid or a loop of one turn, in which a kind has the same part as in more.
    """
    found = []
    for number, kind in enumerate(kinds):
        for count in (1, tokens):
            marks = [] if count > 1 or number % 3 == 0 else [pytest.mark.long]
            found.append(pytest.param(kind, count, id=f"{number}-{count}", marks=marks))
    return found


@pytest.mark.parametrize(("kind", "tokens"), calls(KINDS, 8))
def test_queries_and_pages(kind: Kind, tokens: int) -> None:
    check(kind, tokens, "triton_interpret")


ON_CPU = [kind for kind in KINDS if kind.dtype != jnp.float16 and kind.page_dtype != FP8]
ON_CPU += [
    Kind(dtype=jnp.float32, scaled=True, head_dim=40, pairs=3, interleaved=True),
    Kind(dtype=jnp.float32, norm="all", rounds_last=True, offset=1.0, pairs=13),
    Kind(scaled=True, norm="own", head_dim=24, pairs=12),
    Kind(page_dtype=jnp.float32, norm="head", head_dim=40, pairs=20),
]


@pytest.mark.parametrize(("kind", "tokens"), calls(ON_CPU, 33))
def test_queries_and_pages_on_cpu(kind: Kind, tokens: int) -> None:
    check(kind, tokens, "llvm")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_on_cpu_is_the_same_to_the_bit_whatever_is_beside_it(dtype: Any) -> None:
    """Any number of threads may share the work, and 63 tokens are enough for several."""
    kind = Kind(dtype=dtype, norm="head", group=6, head_dim=200, pairs=57)
    (qkv, cos_sin, pages, _, slots, options), _ = call(kind, 63)
    many = rope_kv_write(qkv, cos_sin, pages, pages, slots, options, implementation="llvm")
    for token in (0, 17, 62):
        own = slice(token, token + 1)
        angles = tuple(part[own] for part in cos_sin)
        given = qkv[own], angles, pages, pages, slots[own], options
        alone = rope_kv_write(*given, implementation="llvm")
        np.testing.assert_array_equal(np.asarray(alone[0][0]), np.asarray(many[0][token]))
        page, offset = divmod(int(slots[token]), SIZE)
        for mine, theirs in zip(alone[1:3], many[1:3], strict=True):
            pair = [np.asarray(array[page, :, offset]) for array in (mine, theirs)]
            assert np.isfinite(pair[0].astype(np.float32)).all()
            np.testing.assert_array_equal(*pair)


def test_pages_are_written_in_place_on_cpu() -> None:
    kind = Kind(dtype=jnp.float32)
    (qkv, cos_sin, pages, _, slots, options), _ = call(kind, 8)
    run = jax.jit(functools.partial(rope_kv_write, implementation="llvm"), donate_argnums=(2, 3))
    compiled = run.lower(qkv, cos_sin, pages, pages + 0, slots, options).compile()
    assert " copy(" not in compiled.as_text()


def test_the_specification_is_what_runs_where_there_is_no_kernel() -> None:
    check(KINDS[8], 3, "auto")


def check(kind: Kind, tokens: int, implementation: str) -> None:
    """Compare queries and pages with the reference's."""
    operands, dtype = call(kind, tokens, seed=tokens)

    @functools.partial(jax.jit, compiler_options=FAST)
    def run() -> tuple[jax.Array, ...]:
        return rope_kv_write(*operands, dtype=dtype, implementation=implementation)

    @functools.partial(jax.jit, compiler_options=EXACT)
    def specification() -> tuple[jax.Array, ...]:
        return reference.rope_kv_write(*operands, dtype)

    got, want = run(), specification()
    assert not np.asarray(got[3]).any() and got[3].shape == want[3].shape
    for mine, theirs, name in zip(got[:3], want, ("query", "key", "value"), strict=False):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        pair = [np.asarray(array, np.float32) for array in (mine, theirs)]
        assert (np.isnan(pair[0]) == np.isnan(pair[1])).all()  # slots without a write
        if name == "value" and kind.parts < 3 and not kind.scaled:
            np.testing.assert_array_equal(*pair)
        steps = max(step_of(mine.dtype), step_of(dtype))
        largest = np.nanmax(np.abs(pair[1]), initial=0)
        # A sum of two products may cancel, and its error is that of the products.
        np.testing.assert_allclose(*pair, rtol=2 * steps, atol=2 * steps * min(largest, 12))
    assert np.isfinite(np.asarray(got[0], np.float32)).all()


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        qkv = jnp.asarray(rng.standard_normal((3, 2, 3, 16)))
        pages = jnp.zeros((2, 2, 16, 16))
        angles = rng.uniform(0, 9, (3, 8))
        slots = jnp.arange(3, dtype=jnp.int32)
        cos_sin = jnp.cos(angles), jnp.sin(angles)
        query, keys, values, _ = rope_kv_write(qkv, cos_sin, pages, pages, slots)
        turned = (qkv[..., :8] + 1j * qkv[..., 8:]) * np.exp(1j * angles)[:, None, None]
        both = np.concatenate([turned.real, turned.imag], axis=-1)
        np.testing.assert_allclose(query, both[:, :, 0], rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(keys[0, :, :3].swapaxes(0, 1), both[:, :, 1], atol=1e-13)
        np.testing.assert_array_equal(values[0, :, :3].swapaxes(0, 1), qkv[:, :, 2])


def arguments(**change: Any) -> dict[str, Any]:
    """Return a correct call's arguments, with some of them changed."""
    pages = jnp.zeros((2, 2, 16, 16))
    half = jnp.zeros((3, 8))
    call = {"qkv": jnp.zeros((3, 2, 3, 16)), "cos_sin": (half, half), "k_pages": pages}
    call |= {"v_pages": pages, "slot_mapping": jnp.zeros(3, jnp.int32)}
    return call | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((3, 2, 2, 16))}, "qkv has shape .* G at least 1"),
        ({"qkv": jnp.zeros((3, 2, 16))}, "qkv has shape .* expected"),
        ({"qkv": jnp.zeros((4, 2, 3, 16))}, "qkv has shape"),
        ({"qkv": jnp.zeros((2, 2, 2, 3, 16))}, "qkv has shape"),
        ({"qkv": jnp.zeros((2, 3, 2, 3, 16), jnp.bfloat16)}, "qkv has dtype bfloat16"),
        ({"qkv": jnp.zeros((3, 2, 3, 16), jnp.int32)}, "dtype is int32; allowed: bfloat16"),
        ({"qkv": jnp.zeros((3, 4, 3, 16))}, "k has shape"),
        ({"cos_sin": (jnp.zeros((3, 9)),) * 2}, r"cos has shape .* \(3, 1 to 8\)"),
        ({"cos_sin": (jnp.zeros((2, 8)),) * 2}, "cos has shape"),
        ({"cos_sin": (jnp.zeros((3, 8)), jnp.zeros((3, 7)))}, "sin has shape"),
        ({"cos_sin": (jnp.zeros((3, 8), jnp.bfloat16),) * 2}, "cos has dtype bfloat16"),
        ({"slot_mapping": jnp.zeros(3)}, "slot_mapping has dtype float32"),
        ({"options": QkvOptions(bias=jnp.zeros((2, 3, 16)))}, "bias is for a qkv in parts"),
        ({"options": QkvOptions(query_norm=jnp.zeros(16))}, "given together"),
        (
            {"options": QkvOptions(query_norm=jnp.zeros(16), key_norm=jnp.zeros(8))},
            r"key_norm has shape \(8,\); expected \(16,\) or \(2, 16\)",
        ),
        ({"options": QkvOptions(norm=NormOptions(-1.0))}, "eps is -1.0; allowed: 0 or more"),
        ({"options": QkvOptions(k_scale=jnp.ones(2))}, "k_scale and v_scale must be given"),
        (
            {
                "qkv": jnp.zeros((3, 2, 3, 16), jnp.float16),
                "k_pages": jnp.zeros((2, 2, 16, 16), jnp.float16),
                "v_pages": jnp.zeros((2, 2, 16, 16), jnp.float16),
                "implementation": "llvm",
            },
            "dtypes are float16 over float16 pages; allowed: bfloat16 over bfloat16, float32",
        ),
    ],
)
def test_misuse_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_kv_write(**arguments(**change))
