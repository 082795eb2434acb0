"""Calls of the attention kernels and of `kv_write` with inputs that show mistakes.

Everything that no query sees is NaN: unused pages, the unwritten end of a row's last page, pages
that a window has left behind, queries of padding. Scores grow along a row in every other kv head
and fall in the others, so that running maxima rise late, or only at first. Values at the ends of
pages and at the edges of a window stand out, so that one position too many or too few is seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import pallas_kernels
from pallas_kernels import reference
from pallas_kernels.arguments import AttentionArrays, AttentionOptions
from tests.machine_code.case import Capability, Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.plain_attention import attention
from tests.support.fast_compile import EXACT

DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "fp8": ml_dtypes.float8_e4m3fn,
}
# How much rounding of results and of the softmax's weights explains, by the queries' dtype.
TOLERANCES = {
    "bf16": Tolerance(relative=2**-8, of_row=1.5 * 2**-8),
    "f16": Tolerance(relative=2**-11, of_row=1.5 * 2**-11),
    "f32": Tolerance(relative=0.0, of_row=2e-6),
}
NOBODYS_PAGES = 3


def evaluate(specification: Callable[..., Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute a specification's results in one program, which operations alone would each be."""
    compiled = jax.jit(specification, compiler_options=EXACT)
    return [np.asarray(array) for array in jax.tree.leaves(compiled(*arrays))]


LOUD = 6.0
"""Factor of the values at edges."""

KERNEL_MODULES = {
    "decode": "pallas_kernels.gpu.triton_decode",
    "ragged": "pallas_kernels.gpu.triton_ragged",
    "mosaic": "pallas_kernels.gpu.hopper_ragged",
    "kv_write": "pallas_kernels.gpu.triton_kv_write",
}


@dataclasses.dataclass(frozen=True)
class AttentionCase(Case):
    """Call of an attention kernel.

    Attributes:
        name: unique among all cases.
        family: "decode", "ragged" or, for the Hopper kernel, "mosaic".
        lengths: positions of each row.
        counts: queries of each row. Decodes have one each.
        dtype, page_dtype: of queries and of pages, which "" gives the queries' own.
        head_dim, page_size, group, kv_heads: H, S, N / K, K.
        table_width: pages that the table has room for, M.
        window, soft_cap, scale: as in the operations.
        has_sinks: whether heads have sinks.
        is_shared: whether all rows begin with the same full pages, as with a common prefix.
        spread: standard deviation of queries. Scores grow with it.
        padding: tokens of no row at the end.
        seed: of all numbers.
    """

    name: str
    family: str
    lengths: tuple[int, ...]
    counts: tuple[int, ...] = ()
    dtype: str = "bf16"
    page_dtype: str = ""
    head_dim: int = 64
    page_size: int = 16
    group: int = 4
    kv_heads: int = 2
    table_width: int = 40
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    has_sinks: bool = False
    is_shared: bool = False
    spread: float = 1.0
    padding: int = 3
    seed: int = 0

    @property
    def kernel_module(self) -> str:
        """Module in which the kernel is written."""
        return KERNEL_MODULES[self.family]

    @property
    def tolerances(self) -> list[Tolerance]:
        return [TOLERANCES[self.dtype]]

    @property
    def dtypes(self) -> str:
        return f"{self.dtype} over {self.page_dtype or self.dtype}"

    @property
    def is_decode(self) -> bool:
        return self.family == "decode"

    def runs_on(self, capability: Capability) -> bool:
        """Return whether the kernel's machine code for a capability can be executed."""
        return capability == (9, 0) if self.family == "mosaic" else super().runs_on(capability)

    @property
    def queries(self) -> tuple[int, ...]:
        """Queries of each row."""
        return self.counts or (1,) * len(self.lengths)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def array_options(self) -> tuple[str, ...]:
        """Names of the options that are arrays, in the order of `arguments`."""
        scales = ("k_scale", "v_scale") if self.page_dtype == "fp8" else ()
        return (*scales, *(("sinks",) if self.has_sinks else ()))

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng = np.random.default_rng(self.seed)
        table, owner, position = self._pages(rng)
        first_seen = self._first_seen()
        is_seen = (owner >= 0) & (position < np.take(self.lengths, owner))
        is_seen &= position >= np.take(first_seen, owner)
        dtype = DTYPES[self.page_dtype or self.dtype]
        keys, values = (self._cells(rng, owner, position, is_seen, name) for name in ("k", "v"))
        options = []
        if self.page_dtype == "fp8":
            options += [rng.uniform(0.5, 1.5, self.kv_heads).astype(np.float32) for _ in range(2)]
        if self.has_sinks:
            options.append(rng.standard_normal(self.heads).astype(np.float32))
        starts = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        tokens = len(self.lengths) if self.is_decode else int(starts[-1]) + self.padding
        q = self.spread * rng.standard_normal((tokens, self.heads, self.head_dim))
        if self.is_decode:
            q[np.array(self.lengths) == 0] = np.nan
        else:
            q[starts[-1] :] = np.nan
        lengths = np.array(self.lengths, np.int32)
        return [
            q.astype(DTYPES[self.dtype]),
            keys.astype(dtype),
            values.astype(dtype),
            table,
            *([] if self.is_decode else [starts]),
            lengths,
            *options,
        ]

    def _pages(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hand out pages in random order.

        Returns:
            i32[R,M], the table, whose other entries are unused pages. Then, of every cell [P,S], a
            row that it belongs to, or -1, and its position there.
        """
        size, width = self.page_size, self.table_width
        needed = [-(-length // size) for length in self.lengths]
        common = min(length // size for length in self.lengths) if self.is_shared else 0
        num_pages = sum(needed) - common * (len(needed) - 1) + NOBODYS_PAGES
        ids = rng.permutation(num_pages)
        table = rng.choice(ids[-NOBODYS_PAGES:], (len(needed), width)).astype(np.int32)
        owner, position = np.full((num_pages, size), -1), np.zeros((num_pages, size), int)
        first_seen, given = self._first_seen(), common
        for row, count in enumerate(needed):
            for entry in range(count):
                page = ids[entry] if entry < common else ids[given]
                given += entry >= common
                if (entry + 1) * size <= first_seen[row]:  # left behind, and given back
                    continue
                table[row, entry] = page
                owner[page], position[page] = row, entry * size + np.arange(size)
        return table, owner, position

    def _first_seen(self) -> np.ndarray:
        """Return the first position of each row that at least one of its queries sees."""
        lengths, queries = np.array(self.lengths), np.array(self.queries)
        if self.window is None:
            return np.zeros_like(lengths)
        return np.maximum(lengths - queries - self.window + 1, 0)

    def _cells(
        self,
        rng: np.random.Generator,
        owner: np.ndarray,
        position: np.ndarray,
        is_seen: np.ndarray,
        name: str,
    ) -> np.ndarray:
        """Draw keys ("k") or values ("v") of all pages: [P,K,S,H]."""
        pages, size = owner.shape
        cells = rng.standard_normal((pages, self.kv_heads, size, self.head_dim))
        lengths = np.take(self.lengths, owner)
        if name == "k":
            done = position / np.maximum(lengths - 1, 1)
            growth = np.stack([done if k % 2 == 0 else 1 - done for k in range(self.kv_heads)], 1)
            cells *= (0.3 + 1.5 * np.clip(growth, 0, 1))[..., None]
        else:
            edges = (position % size == 0) | (position % size == size - 1)
            if self.window is not None:
                begin = lengths - self.window
                edges |= (position == begin) | (position == begin - 1)
            edges |= position == lengths - 1
            cells *= np.where(edges, LOUD, 1.0)[:, None, :, None]
        return np.where(is_seen[:, None, :, None], cells, np.nan)

    def _options(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split arguments into the arguments before the options, and the options by name."""
        count = len(arrays) - len(self.array_options)
        options = dict(zip(self.array_options, arrays[count:], strict=True))
        static = {"window": self.window, "soft_cap": self.soft_cap, "scale": self.scale}
        return arrays[:count], options | static

    def call(self, *arrays: jax.Array) -> jax.Array:
        """Call the kernel."""
        main, options = self._options(arrays)
        run = pallas_kernels.ragged_paged_attention
        if self.is_decode:
            run = pallas_kernels.paged_decode_attention
        name = "mosaic_gpu" if self.family == "mosaic" else "triton"
        return run(*main, AttentionOptions(**options), implementation=name)

    def expected(self) -> list[np.ndarray]:
        """Compute the specified results, in float64."""
        (q, keys, values, table, *rest), options = self._options(tuple(self.arguments()))
        if self.is_decode:
            rest = [np.arange(len(self.lengths) + 1), *rest]
        return [attention(q, keys, values, table, *rest, **options)]

    def reference(self) -> np.ndarray:
        """Compute the same by the package's specification, in float32."""
        run: Callable[..., jax.Array] = reference.ragged_paged_attention
        if self.is_decode:
            run = reference.paged_decode_attention

        def plain(*arrays: jax.Array) -> jax.Array:
            (q, *rest), options = self._options(arrays)
            wide = AttentionArrays.of(q.astype(jnp.float32), *rest)
            return run(wide, AttentionOptions(**options))

        [result] = evaluate(plain, self.arguments())
        return result


@dataclasses.dataclass(frozen=True)
class KvWriteCase(Case):
    """Call of `kv_write`: slots at both ends, out of range on both sides, and far out of it.

    Attributes:
        name: unique among all cases.
        dtype, page_dtype: of keys and values, and of pages.
        head_dim, page_size, kv_heads: H, S, K.
        is_scaled: whether keys and values have scales.
        num_pages: P.
        seed: of all numbers.
    """

    name: str
    dtype: str = "bf16"
    page_dtype: str = ""
    head_dim: int = 64
    page_size: int = 16
    kv_heads: int = 2
    is_scaled: bool = False
    num_pages: int = 6
    seed: int = 0

    family: ClassVar[str] = "kv_write"
    kernel_module: ClassVar[str] = KERNEL_MODULES["kv_write"]
    donated = (2, 3)
    tolerances: ClassVar[list[Tolerance]] = [Tolerance.exact()]

    @property
    def dtypes(self) -> str:
        return f"{self.dtype} over {self.page_dtype or self.dtype}"

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program.

        The written values include numbers beyond float8's largest, its subnormals, both zeros,
        infinity and NaN.
        """
        rng = np.random.default_rng(self.seed)
        slots = self.num_pages * self.page_size
        inside = [0, 5, slots - 1, self.page_size, self.page_size - 1, slots // 2 + 1]
        outside = [-1, slots, slots + 7, -slots, -(2**31), 2**31 - 1]
        mapping = rng.permutation([*inside, *outside]).astype(np.int32)
        shape = (len(mapping), self.kv_heads, self.head_dim)
        new = [
            (rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 4, shape)).astype(
                DTYPES[self.dtype]
            )
            for _ in range(2)
        ]
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 448, 464, 480, -1e-3, 2**-10])
        for array in new:
            array[:, 0, : len(special)] = rng.permutation(special)
        pages_shape = (self.num_pages, self.kv_heads, self.page_size, self.head_dim)
        dtype = DTYPES[self.page_dtype or self.dtype]
        pages = [rng.standard_normal(pages_shape).astype(dtype) for _ in range(2)]
        scales = []
        if self.is_scaled:
            scales = [rng.uniform(0.5, 1.5, self.kv_heads).astype(np.float32) for _ in range(2)]
        return [*new, *pages, mapping, *scales]

    def _run(self, run: Callable[..., Any], arrays: tuple[Any, ...], **options: Any) -> Any:
        names = ("k_scale", "v_scale") if self.is_scaled else ()
        return run(*arrays[:5], **dict(zip(names, arrays[5:], strict=True)), **options)

    def call(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Call the kernel."""
        return self._run(pallas_kernels.kv_write, arrays, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Compute the new pages."""
        return evaluate(lambda *arrays: self._run(reference.kv_write, arrays), self.arguments())
