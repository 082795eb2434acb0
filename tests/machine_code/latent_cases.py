"""Calls of attention over latents with inputs that show mistakes.

Other attention has the same rows and pages. A cell is a key whose first numbers are its value. Its
first columns stand out at the ends of pages, and queries have small numbers there, so that one
position too many or too few is seen in the result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import LatentOptions, latent_attention, reference
from pallas_kernels.latent_arguments import as_attention
from tests.machine_code.attention_cases import DTYPES, LOUD, AttentionCase, evaluate
from tests.machine_code.case import Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.plain_attention import attention

EDGE_COLUMNS = 16
"""Columns of a cell that stand out at the ends of pages."""
QUIET = 0.2
"""Factor of queries in these columns."""


@dataclasses.dataclass(frozen=True)
class LatentAttentionCase(AttentionCase):
    """Call of attention over latents. `head_dim` is C, and `group` the number of heads.

    Attributes:
        rank: numbers of a value.
        one_query: whether the call states that rows have one query each.
    """

    kv_heads: int = 1
    rank: int = 32
    one_query: bool = False

    @property
    def kernel_module(self) -> str:
        return "pallas_kernels.gpu.triton_latent"

    @property
    def tolerances(self) -> list[Tolerance]:
        """Tolerances. A score is the sum of more products than in other attention."""
        return [Tolerance(0.0, 4e-6)] if self.dtype == "f32" else super().tolerances

    @property
    def is_decode(self) -> bool:
        return self.one_query

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        q, cells, _, *rest = super().arguments()
        quiet = q.astype(np.float32)
        quiet[..., :EDGE_COLUMNS] *= QUIET
        rest = rest[:-1] if self.page_dtype == "fp8" else rest
        return [quiet.astype(DTYPES[self.dtype]), cells, *rest]

    def _cells(
        self,
        rng: np.random.Generator,
        owner: np.ndarray,
        position: np.ndarray,
        is_seen: np.ndarray,
        name: str,
    ) -> np.ndarray:
        """Draw the cells of all pages: [P,1,S,C]."""
        cells = super()._cells(rng, owner, position, is_seen, "k")
        size = self.page_size
        edges = (position % size == 0) | (position % size == size - 1)
        edges |= position == np.take(self.lengths, owner) - 1
        cells[..., :EDGE_COLUMNS] *= np.where(edges, LOUD, 1.0)[:, None, :, None]
        return cells

    def operands(
        self, arrays: tuple[Any, ...]
    ) -> tuple[tuple[Any, Any, Any, Any, Any], LatentOptions]:
        """Return the arrays of the operation from the program's arguments, and its options."""
        arrays, scale = (arrays[:-1], arrays[-1]) if self.page_dtype == "fp8" else (arrays, None)
        q, cells, table, *starts, lengths = arrays
        start = starts[0] if starts else jnp.arange(len(self.lengths) + 1, dtype=jnp.int32)
        factor = self.scale or self.head_dim**-0.5
        return (q, cells, table, start, lengths), LatentOptions(self.rank, factor, scale)

    def call(self, *arrays: jax.Array) -> jax.Array:
        """Call the kernel."""
        main, options = self.operands(arrays)
        return latent_attention(*main, options, one_query=self.one_query, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Compute the specified results, in float64."""
        (q, cells, *rest), options = self.operands(tuple(self.arguments()))
        scale = None if options.cache_scale is None else np.asarray(options.cache_scale)
        table, starts, lengths = (np.asarray(array) for array in rest)
        whole = attention(
            q,
            cells,
            cells,
            table,
            starts,
            lengths,
            scale=options.scale,
            k_scale=scale,
            v_scale=scale,
        )
        return [whole[..., : self.rank]]

    def reference(self) -> np.ndarray:
        """Compute the same by the package's specification, in float32."""

        def plain(*arrays: jax.Array) -> jax.Array:
            (q, *rest), options = self.operands(arrays)
            wide = as_attention(q.astype(jnp.float32), *rest)
            return reference.latent_attention(wide, options.attention, self.rank)

        [result] = evaluate(plain, self.arguments())
        return result


DEEPSEEK: dict[str, Any] = {"head_dim": 576, "rank": 512, "group": 16, "table_width": 20}
SMALL: dict[str, Any] = {"head_dim": 48, "rank": 32, "group": 4, "table_width": 20}


def latent_cases() -> list[Case]:
    """List decodes and steps of prompts, in DeepSeek's sizes and in small ones."""
    cases: list[Case] = []

    def decode(name: str, lengths: tuple[int, ...], sizes: dict[str, Any], **fields: Any) -> None:
        fields = sizes | fields
        cases.append(
            LatentAttentionCase(
                f"latent-{name}", "latent", lengths=lengths, one_query=True, **fields
            )
        )

    def step(
        name: str,
        lengths: tuple[int, ...],
        counts: tuple[int, ...],
        sizes: dict[str, Any],
        **fields: Any,
    ) -> None:
        fields = sizes | fields
        cases.append(
            LatentAttentionCase(
                f"latent-{name}", "latent", lengths=lengths, counts=counts, **fields
            )
        )

    edges = (0, 1, 16, 17, 31, 32, 33, 200)
    decode("decode-bf16-512", (0, 1, 32, 33, 150), DEEPSEEK)
    decode("decode-bf16-512-64-heads", (33, 70), DEEPSEEK, group=64)
    decode("decode-f16-512-20-heads", (40, 15), DEEPSEEK, group=20, dtype="f16")
    decode("decode-f32-512", (33, 5), DEEPSEEK, dtype="f32")
    decode("decode-fp8-512", (33, 70), DEEPSEEK, page_dtype="fp8")
    decode("decode-bf16-32", edges, SMALL)
    decode("decode-f32-32", edges, SMALL, dtype="f32")
    decode("decode-f16-over-fp8-80", edges, SMALL, head_dim=80, dtype="f16", page_dtype="fp8")
    # More parts than the merging kernel reads at a time.
    decode("decode-bf16-16-long", (1, 2100, 700), SMALL, head_dim=32, rank=16, table_width=140)
    # More blocks than programs of a tile of heads, so that a program has several, of several rows.
    rows = (5, 130, 0, 64, 100, 17)
    decode("decode-bf16-512-67-heads", (100, 70), DEEPSEEK, group=67)
    decode("decode-bf16-67-heads", rows, SMALL, head_dim=32, rank=16, group=134)
    decode("decode-bf16-96-p64", (1, 64, 65, 200), SMALL, head_dim=160, rank=96, page_size=64)
    long, short = (300, 5, 0, 140, 1, 64, 110), (1, 5, 0, 40, 1, 17, 70)
    step("bf16-32", long, short, SMALL)
    step("bf16-512", (70, 40), (33, 1), DEEPSEEK)
    step("bf16-512-128-heads", (40, 20), (2, 9), DEEPSEEK, group=128)
    step("fp8-512", (40, 33), (30, 2), DEEPSEEK, page_dtype="fp8")
    step("f32-32", (100, 5, 0, 60, 64), (1, 5, 0, 20, 9), SMALL, dtype="f32")
    step(
        "f16-128-p128",
        (130, 40, 150),
        (3, 1, 20),
        SMALL,
        head_dim=128,
        rank=128,
        page_size=128,
        dtype="f16",
    )
    step(
        "f32-over-fp8-64",
        (40, 50),
        (20, 3),
        SMALL,
        head_dim=80,
        rank=64,
        dtype="f32",
        page_dtype="fp8",
    )
    return cases
