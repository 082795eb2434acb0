"""Calls of the kernels on arrays of gigabytes, where offsets of 32 bits end.

Arrays are there in pieces only: at both ends, and where numbers of elements or of bytes pass a
power of two. A read elsewhere is a fault, because the bytes were never written.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import reference
from pallas_kernels.gpu.triton_quantized_matmul import default_tile
from scripts.machine_code.compiled_program import Argument, Launch, Pieces, Slice
from tests.machine_code.attention_cases import DTYPES, KERNEL_MODULES, TOLERANCES
from tests.machine_code.case import Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.product_cases import (
    draw_weight,
    grouped_product,
    product_tolerance,
    whole_weight,
)

GIB = 2**30
KV_HEADS, PAGE_SIZE, HEAD_DIM, GROUP = 8, 16, 128, 2
PAGE = KV_HEADS * PAGE_SIZE * HEAD_DIM
"""Elements of a page."""


def marks(count: int, size: int, itemsize: int) -> np.ndarray:
    """Return which of so many parts of `size` elements lie at the ends and about powers of two."""
    limits = [2**power for power in (30, 31, 32, 33)]
    passed = [limit // (size * unit) for limit in limits for unit in (1, itemsize)]
    found = {0, count // 2, count - 2, count - 1}
    found |= {part + step for part in passed for step in (-1, 0, 1)}
    return np.array(sorted(part for part in found if 0 <= part < count))


@dataclasses.dataclass(frozen=True)
class BigAttentionCase(Case):
    """Call of an attention kernel, or of `kv_write`, on large page arrays.

    Attributes:
        name: unique among all cases.
        family: "decode", "ragged" or "kv_write".
        dtype, page_dtype: as in `AttentionCase`.
        gib: GiB of each page array.
        seed: of all numbers.
    """

    name: str
    family: str
    dtype: str
    page_dtype: str
    gib: float
    seed: int = 0

    @property
    def kernel_module(self) -> str:
        return KERNEL_MODULES[self.family]

    @property
    def dtypes(self) -> str:
        return f"{self.dtype} over {self.page_dtype or self.dtype}"

    @property
    def tolerances(self) -> list[Tolerance]:
        return [Tolerance.exact() if self.family == "kv_write" else TOLERANCES[self.dtype]]

    @property
    def donated(self) -> tuple[int, ...]:
        return (2, 3) if self.family == "kv_write" else ()

    @property
    def is_scaled(self) -> bool:
        return self.page_dtype == "fp8"

    @property
    def numpy_page_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.page_dtype or self.dtype])

    @property
    def num_pages(self) -> int:
        return int(self.gib * GIB) // (PAGE * self.numpy_page_dtype.itemsize)

    @property
    def pages(self) -> np.ndarray:
        """Ids of the pages that are there."""
        return marks(self.num_pages, PAGE, self.numpy_page_dtype.itemsize)

    def small_arguments(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Make the arguments with only the pages that are there, and the scales."""
        rng, count = np.random.default_rng(self.seed), len(self.pages)
        page_shape = (count, KV_HEADS, PAGE_SIZE, HEAD_DIM)
        keys, values = (
            rng.standard_normal(page_shape).astype(self.numpy_page_dtype) for _ in range(2)
        )
        scales = [rng.uniform(0.5, 1.5, KV_HEADS).astype(np.float32) for _ in range(2)]
        scales = scales if self.is_scaled else []
        if self.family == "kv_write":
            shape = (count, KV_HEADS, HEAD_DIM)
            new = [rng.standard_normal(shape).astype(DTYPES[self.dtype]) for _ in range(2)]
            slots = np.arange(count) * PAGE_SIZE + rng.integers(0, PAGE_SIZE, count)
            return [*new, keys, values, slots.astype(np.int32)], scales
        order = rng.permutation(count)
        table = np.stack([order, np.roll(order, 1), order[::-1]]).astype(np.int32)
        full = count * PAGE_SIZE
        lengths = np.array([full - 3, PAGE_SIZE, full // 2 + 1], np.int32)
        counts = np.array([1, 1, 1] if self.family == "decode" else [20, 1, 7], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        q = rng.standard_normal((starts[-1], KV_HEADS * GROUP, HEAD_DIM))
        middle = [] if self.family == "decode" else [starts]
        return [q.astype(DTYPES[self.dtype]), keys, values, table, *middle, lengths], scales

    def arguments(self) -> Sequence[Argument]:
        """Make the arguments of the compiled program."""
        arrays, scales = self.small_arguments()
        found: list[Argument] = [*arrays, *scales]
        first = 2 if self.family == "kv_write" else 1
        size = PAGE * self.numpy_page_dtype.itemsize
        for number in (first, first + 1):
            pieces: Pieces = [
                (int(page) * size, arrays[number][n]) for n, page in enumerate(self.pages)
            ]
            found[number] = pieces
        if self.family == "kv_write":
            page, offset = np.divmod(arrays[4], PAGE_SIZE)
            found[4] = (self.pages[page] * PAGE_SIZE + offset).astype(np.int32)
        else:
            found[3] = self.pages[arrays[3]].astype(np.int32)
        return found

    def shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each argument."""
        arrays, scales = self.small_arguments()
        first = 2 if self.family == "kv_write" else 1
        found = [(array.shape, array.dtype) for array in (*arrays, *scales)]
        for number in (first, first + 1):
            (_, *rest), dtype = found[number]
            found[number] = ((self.num_pages, *rest), dtype)
        return found

    def _run(self, module: Any, arrays: Sequence[Any], **options: Any) -> Any:
        count = len(arrays) - 2 * self.is_scaled
        scales = zip(("k_scale", "v_scale"), arrays[count:], strict=False)
        name = {"decode": "paged_decode_attention", "ragged": "ragged_paged_attention"}
        run = getattr(module, name.get(self.family, "kv_write"))
        return run(*arrays[:count], **dict(scales), **options)

    def call(self, *arrays: jax.Array) -> Any:
        """Call the kernel."""
        return self._run(pallas_kernels, arrays, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Compute the specified results on the pages that are there."""
        arrays, scales = self.small_arguments()
        placed = list(map(jnp.asarray, (*arrays, *scales)))
        if self.family == "kv_write":
            return [np.asarray(pages) for pages in self._run(reference, placed)]
        placed[0] = placed[0].astype(jnp.float32)
        return [np.asarray(self._run(pallas_kernels, placed, implementation="xla"))]

    def results(self, run: Any) -> list[np.ndarray]:
        """Take the pages that are there from the result of `kv_write`."""
        if self.family != "kv_write":
            return run.results()
        dtype, shape = self.numpy_page_dtype, (KV_HEADS, PAGE_SIZE, HEAD_DIM)
        size, found = PAGE * dtype.itemsize, []
        for array in run.executable.program.results:
            allocation, offset, _ = array.place
            places = [Slice(allocation, offset + int(page) * size, size) for page in self.pages]
            pages = [run.read(place).view(dtype).reshape(shape) for place in places]
            found.append(np.stack(pages))
        return found


@dataclasses.dataclass(frozen=True)
class BigGroupedCase(Case):
    """Call of a grouped product on many matrices, few of which have rows.

    Attributes:
        name: unique among all cases.
        form: of quantized matrices, or "" for bfloat16.
        gib: GiB of the matrices, or of their codes.
        seed: of all numbers.
    """

    name: str
    form: str
    gib: float
    seed: int = 0

    dtypes: ClassVar[str] = "bf16"
    INPUTS: ClassVar[int] = 512
    OUTPUTS: ClassVar[int] = 2048

    @property
    def family(self) -> str:
        return "quantized_grouped" if self.form else "grouped"

    @property
    def kernel_module(self) -> str:
        return f"pallas_kernels.gpu.triton_{self.family}_matmul"

    @property
    def tolerances(self) -> list[Tolerance]:
        return [product_tolerance("bf16", False, "bf16")]

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix."""
        size = self.INPUTS * self.OUTPUTS
        return {"": 2 * size, "int4": size // 2}.get(self.form, size)

    @property
    def num_groups(self) -> int:
        return int(self.gib * GIB) // self.matrix_bytes

    def _sizes(self) -> np.ndarray:
        itemsize = 1 if self.form else 2
        sizes = np.zeros(self.num_groups, np.int32)
        sizes[marks(self.num_groups, self.matrix_bytes // itemsize, itemsize)] = 2
        return sizes

    def _weights(self) -> tuple[np.ndarray, ...]:
        """Draw the matrices that have rows: floats, or codes and scales."""
        rng, count = np.random.default_rng(self.seed), int((self._sizes() > 0).sum())
        shape = (count, self.INPUTS, self.OUTPUTS)
        if self.form:
            return draw_weight(rng, self.form, shape, 0, "f32")
        return (rng.standard_normal(shape).astype(DTYPES["bf16"]),)

    def _rows(self) -> np.ndarray:
        rows = int(self._sizes().sum()) + 1
        x = np.random.default_rng(self.seed + 1).standard_normal((rows, self.INPUTS))
        return x.astype(DTYPES["bf16"])

    def arguments(self) -> Sequence[Argument]:
        """Make the arguments of the compiled program."""
        sizes = self._sizes()
        owners = np.flatnonzero(sizes)
        found: list[Argument] = [self._rows()]
        for array in self._weights():
            found.append([(int(e) * array[0].nbytes, array[n]) for n, e in enumerate(owners)])
        return [*found, sizes]

    def shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each argument."""
        rows, sizes = self._rows(), self._sizes()
        weights = [((self.num_groups, *w.shape[1:]), w.dtype) for w in self._weights()]
        return [(rows.shape, rows.dtype), *weights, (sizes.shape, sizes.dtype)]

    def call(self, *arrays: Any) -> jax.Array:
        """Call the kernel."""
        if not self.form:
            return pallas_kernels.grouped_matmul(*arrays, implementation="triton")
        x, values, scales, sizes = arrays
        return pallas_kernels.quantized_grouped_matmul(
            x, values, scales, None, sizes, form=self.form, implementation="triton"
        )

    def expected(self) -> list[np.ndarray]:
        """Compute the product with the matrices that are there."""
        sizes, weights = self._sizes(), self._weights()
        if self.form:
            values, scales = weights
            matrices = [
                whole_weight(values[e], scales[e], [], self.form) for e in range(len(values))
            ]
        else:
            matrices = list(weights[0].astype(np.float64))
        return [grouped_product(self._rows(), np.stack(matrices), sizes[sizes > 0])]


@dataclasses.dataclass(frozen=True)
class BigQuantizedCase(Case):
    """Call of `quantized_matmul` on many codes, of which some blocks of outputs are computed.

    Attributes:
        name: unique among all cases.
        form: of the weight.
        gib: GiB of its codes.
        seed: of all numbers.
    """

    name: str
    form: str
    gib: float
    seed: int = 0

    family: ClassVar[str] = "quantized"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_quantized_matmul"
    dtypes: ClassVar[str] = "bf16"
    TOKENS: ClassVar[int] = 4
    ROWS: ClassVar[int] = 4096

    @property
    def tolerances(self) -> list[Tolerance]:
        return [product_tolerance("bf16", False, "f32")]

    @property
    def outputs(self) -> int:
        return int(self.gib * GIB) // self.ROWS

    @property
    def tile(self) -> int:
        """Outputs of a block."""
        return default_tile(self.TOKENS, jnp.dtype(jnp.bfloat16)).outputs

    def blocks(self, launch: Launch) -> list[int] | None:
        """Return which blocks of the product run: the first, a middle one and the last."""
        if launch.kernel != "quantized_matmul":
            return None
        last = -(-self.outputs // self.tile) - 1
        return [0, last // 2, last]

    @property
    def columns(self) -> np.ndarray:
        """Outputs that are computed."""
        last = -(-self.outputs // self.tile) - 1
        ranges = [np.arange(self.tile) + block * self.tile for block in (0, last // 2, last)]
        columns = np.concatenate(ranges)
        return columns[columns < self.outputs]

    def small_arguments(self) -> list[np.ndarray]:
        """Make the arguments with only the outputs that are computed."""
        rng = np.random.default_rng(self.seed)
        inputs = self.ROWS * (2 if self.form == "int4" else 1)
        x = rng.standard_normal((self.TOKENS, inputs)).astype(DTYPES["bf16"])
        shape = (inputs, len(self.columns))
        return [x, *draw_weight(rng, self.form, shape, 0, "f32")]

    def arguments(self) -> Sequence[Argument]:
        """Make the arguments of the compiled program."""
        x, values, scales = self.small_arguments()
        return [x, self._spread(values), self._spread(scales)]

    def _spread(self, array: np.ndarray) -> Pieces:
        """Put columns where they belong."""
        starts = [0, *(np.flatnonzero(np.diff(self.columns) > 1) + 1), len(self.columns)]
        pieces: Pieces = []
        for start, stop in itertools.pairwise(starts):
            for row, numbers in enumerate(array[:, start:stop]):
                offset = (row * self.outputs + int(self.columns[start])) * array.itemsize
                pieces.append((offset, numbers))
        return pieces

    def shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each argument."""
        x, *weights = self.small_arguments()
        wide = [((array.shape[0], self.outputs), array.dtype) for array in weights]
        return [(x.shape, x.dtype), *wide]

    def call(self, *arrays: Any) -> jax.Array:
        """Call the kernel."""
        return pallas_kernels.quantized_matmul(*arrays, form=self.form, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Compute the outputs that are computed."""
        x, values, scales = self.small_arguments()
        return [x.astype(np.float64) @ whole_weight(values, scales, [], self.form)]

    def results(self, run: Any) -> list[np.ndarray]:
        """Take the outputs that are computed."""
        [array] = run.executable.program.results
        allocation, offset, _ = array.place
        size, found = array.numpy_dtype.itemsize, []
        for row in range(self.TOKENS):
            first = offset + row * self.outputs * size
            places = [Slice(allocation, first + int(c) * size, size) for c in self.columns]
            found.append(np.concatenate([run.read(place) for place in places]))
        return [np.stack(found).view(array.numpy_dtype)]


def big_cases() -> list[Case]:
    """List calls on arrays on both sides of 2, 4 and 8 GiB, but where they are refused."""
    found: list[Case] = []
    for family in ("kv_write", "decode", "ragged"):
        for label, dtype, page_dtype, sizes in (
            ("bf16", "bf16", "", (1.9, 3.9, 4.1, 9)),
            ("fp8", "bf16", "fp8", (1.9, 4.1, 9)),
            ("f32", "f32", "", (3.9, 9)),
        ):
            for gib in sizes:
                name = f"big-{family}-{label}-{gib}-gib"
                found.append(BigAttentionCase(name, family, dtype, page_dtype, gib))
    found += [BigGroupedCase(f"big-grouped-bf16-{gib}-gib", "", gib) for gib in (3.9, 4.1, 9)]
    for form, gib in (("int8", 1.9), ("int8", 4.1), ("int4", 1.9), ("int4", 4.1)):
        found.append(BigGroupedCase(f"big-quantized_grouped-{form}-{gib}-gib", form, gib))
    for form, gib in (("int8", 1.9), ("int8", 4.1), ("int8", 9), ("int4", 4.1), ("fp8", 4.1)):
        found.append(BigQuantizedCase(f"big-quantized-{form}-{gib}-gib", form, gib))
    return found
