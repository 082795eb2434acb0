"""Calls of `rope_kv_write` with inputs that show mistakes.

Heads are of very different sizes, so that one head's norm or rotation shows in no other. Slots are
in no order, at both ends and out of range on both sides. Pages hold numbers of their own, which
stay where the kernel does not write. Tokens of padding, which parts of a sum have, are NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import NormOptions, QkvOptions, reference
from tests.machine_code.attention_cases import DTYPES, evaluate
from tests.machine_code.case import Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.product_cases import ROUNDING

EPS = 1e-5
PADDING = 1
"""Tokens of padding that parts have."""


@dataclasses.dataclass(frozen=True)
class RopeKvWriteCase(Case):
    """Call of `rope_kv_write`.

    Attributes:
        name: unique among all cases.
        kv_heads, group, head_dim: K, G, H.
        pairs: how many are rotated. None means no rotation.
        parts: of the projection. 0 means an array that is not in parts.
        norm: "head" or "own" scales, "all" for own ones and a norm of all heads, or "" for none.
        offset, rounds_last, interleaved: as in the operation's options.
        has_bias, is_scaled: whether there is a bias, and whether pages have scales.
        dtype, page_dtype: of queries, and of pages.
        page_size: S.
        seed: of all numbers.
    """

    name: str
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    pairs: int | None = 32
    parts: int = 0
    norm: str = ""
    offset: float = 0.0
    rounds_last: bool = False
    interleaved: bool = False
    has_bias: bool = False
    is_scaled: bool = False
    dtype: str = "bf16"
    page_dtype: str = ""
    page_size: int = 16
    seed: int = 0

    family: ClassVar[str] = "rope_kv_write"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_rope_kv_write"

    @property
    def dtypes(self) -> str:
        return f"{self.dtype} over {self.page_dtype or self.dtype}"

    @property
    def names(self) -> list[str]:
        """Names of the arguments, in order."""
        found = ["qkv", "k_pages", "v_pages", "slots"]
        found += [] if self.pairs is None else ["cos", "sin"]
        found += ["query_norm", "key_norm"] if self.norm else []
        found += ["mean_squares"] if self.norm == "all" else []
        found += ["bias"] if self.has_bias else []
        return found + (["k_scale", "v_scale"] if self.is_scaled else [])

    @property
    def donated(self) -> tuple[int, ...]:  # type: ignore[override]
        return (1, 2)

    @property
    def tolerances(self) -> list[Tolerance]:
        """Queries and keys are rounded once or twice before the last time. Values are exact."""
        rounding = ROUNDING[self.dtype]
        query = Tolerance(2 * rounding + 2e-6, 2 * rounding + 2e-6)
        stored = rounding if self.page_dtype != "fp8" else 2**-4
        return [query, Tolerance(2 * stored + 2e-6, 2 * rounding + 2e-6), Tolerance.exact()]

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program, in the order of `names`."""
        rng, dtype = np.random.default_rng(self.seed), DTYPES[self.dtype]
        heads, group, width = self.kv_heads, self.group, self.head_dim
        pages = 4
        slots = pages * self.page_size
        inside = [0, slots - 1, self.page_size, self.page_size - 1]
        mapping = rng.permutation([*inside, -1, slots, 2**31 - 1]).astype(np.int32)
        shape = (len(mapping), heads, group + 2, width)

        def draw(*before: int) -> np.ndarray:
            sizes = 10.0 ** rng.integers(-1, 2, (*shape[:-1], 1))
            return rng.standard_normal((*before, *shape)) * sizes

        if self.parts:
            missing = np.full((self.parts, PADDING, *shape[1:]), np.nan)
            qkv = np.concatenate([draw(self.parts), missing], axis=1).astype(np.float32)
        else:
            qkv = draw().astype(dtype)
        pages_shape = (pages, heads, self.page_size, width)
        page_dtype = DTYPES[self.page_dtype or self.dtype]
        given: dict[str, np.ndarray] = {"qkv": qkv, "slots": mapping}
        for name in ("k_pages", "v_pages"):
            given[name] = rng.standard_normal(pages_shape).astype(page_dtype)
        if self.pairs is not None:
            angles = rng.uniform(0, 99, (len(mapping), self.pairs))
            given |= {"cos": np.cos(angles), "sin": np.sin(angles)}
        own = (heads, group), (heads,)
        for name, before in zip(("query_norm", "key_norm"), own, strict=True):
            before = () if self.norm == "head" else before
            given[name] = rng.uniform(0.5, 2, (*before, width)).astype(dtype)
        given["mean_squares"] = rng.uniform(0.5, 9, (len(mapping), 2))
        given["bias"] = rng.standard_normal(shape[1:]).astype(dtype)
        for name in ("k_scale", "v_scale"):
            given[name] = rng.uniform(0.5, 1.5, heads)
        arrays = [given[name] for name in self.names]
        return [a.astype(np.float32) if a.dtype == np.float64 else a for a in arrays]

    def _operands(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        given = dict(zip(self.names, arrays, strict=True))
        cos_sin = None if self.pairs is None else (given.pop("cos"), given.pop("sin"))
        first = [given.pop(name) for name in ("qkv", "k_pages", "v_pages", "slots")]
        norm = NormOptions(EPS, self.offset, self.rounds_last)
        options = QkvOptions(norm=norm, interleaved=self.interleaved, **given)
        return (first[0], cos_sin, *first[1:], options)

    def call(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Call the kernel."""
        return pallas_kernels.rope_kv_write(
            *self._operands(arrays), dtype=DTYPES[self.dtype], implementation="triton"
        )

    def expected(self) -> list[np.ndarray]:
        """Compute queries and the new pages."""
        arrays = self.arguments()
        if self.parts:  # which are added one after the other, in float32
            total = arrays[0][0]
            for part in arrays[0][1:]:
                total = total + part
            arrays[0] = total[None]
        dtype = jnp.dtype(DTYPES[self.dtype])
        return evaluate(
            lambda *given: reference.rope_kv_write(*self._operands(given), dtype), arrays
        )


@dataclasses.dataclass(frozen=True)
class SmallHeadsCase(RopeKvWriteCase):
    """Call of `rope_kv_write` whose heads are so small that a norm's eps counts."""

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments, with means of squares about eps."""
        small = {"qkv": 1e-2, "bias": 1e-3, "mean_squares": 1e-5}
        given = zip(self.names, super().arguments(), strict=True)
        return [(array * small.get(name, 1)).astype(array.dtype) for name, array in given]


def rope_kv_write_cases() -> list[Case]:
    """List calls with and without every option, and heads of every size."""
    found: list[Case] = []

    def more(name: str, **fields: Any) -> None:
        found.append(RopeKvWriteCase(f"rope_kv_write-{name}", **fields))

    for dtype in ("bf16", "f16", "f32"):
        more(f"{dtype}-h64", dtype=dtype)
        more(f"{dtype}-h128-norm-parts", dtype=dtype, head_dim=128, pairs=64, norm="head", parts=4)
    more("fp8-h64-parts-bias", page_dtype="fp8", parts=2, has_bias=True)
    more("fp8-h80-norm-scales", page_dtype="fp8", head_dim=80, pairs=40, norm="own", is_scaled=True)
    more("f32-to-fp8-h64", dtype="f32", page_dtype="fp8")
    more("f32-to-bf16-h48", dtype="f32", page_dtype="bf16", head_dim=48, pairs=24)
    more("bf16-h96-interleaved", head_dim=96, pairs=20, interleaved=True, group=3)
    more("bf16-h64-interleaved-own", norm="own", interleaved=True, page_size=32)
    more("bf16-h64-alone", pairs=None, group=1, kv_heads=5, parts=1, has_bias=True)
    more("bf16-h112-alone-norm", pairs=None, head_dim=112, group=7, norm="head")
    gemma = {"offset": 1.0, "rounds_last": True, "norm": "head"}
    more("bf16-h256-offset", head_dim=256, pairs=128, kv_heads=1, **gemma)
    more("f32-h16-offset-g16", head_dim=16, pairs=8, group=16, dtype="f32", parts=8, **gemma)
    more("bf16-h64-all-parts", norm="all", parts=2, kv_heads=3)
    more("bf16-h128-p128", head_dim=128, pairs=64, page_size=128, parts=8)
    return found
