"""Plain runner of a model over paged KV, with the logits after every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models import Decoder, PagedStep
from jaxserve.models.mixers import Kept
from pallas_kernels import StateRows
from tests.support.fast_compile import FAST


@dataclass
class PagedRunner:
    """Runner of a model's steps over one cache of scattered pages. It keeps each row's tokens.

    Row r's pages are every R-th of a random order of all pages but page 0, which stays full of NaN,
    as steps may not read it. If layers keep states, a row's states are saved after `border` of its
    tokens, for a row that shares them. `whole` compiles each step as one program. `implementation`
    is that of its kernels.
    """

    model: Decoder
    num_rows: int = 1
    page_size: int = 4
    max_tokens: int = 192
    whole: bool = True
    implementation: str = "xla"
    border: int = 0
    tokens: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        self.tokens = [[] for _ in range(self.num_rows)]
        pages_per_row = -(-self.max_tokens // self.page_size)
        num_pages = pages_per_row * self.num_rows + 1
        order = np.random.default_rng(0).permutation(np.arange(1, num_pages))
        self._own_pages = order.reshape(pages_per_row, self.num_rows).T.astype(np.int32)
        self.page_table = self._own_pages.copy()
        dtype = self.model.norm.dtype

        def pages(index: int) -> jax.Array:
            sized = config.for_layer(index)
            heads = sized.num_key_value_heads if config.latent is None else 1
            array = np.zeros((num_pages, heads, self.page_size, sized.head_dim), dtype)
            array[0] = np.nan
            return jnp.array(array)

        self._sources = config.layers.sources or range(config.num_hidden_layers)
        self._owners = set(filter(config.has_pages, self._sources))
        exact = np.promote_types(dtype, np.float32) if dtype != "bfloat16" else np.float32
        arrays = 2 if config.latent is None else 1
        self.kept = [
            Kept(
                tuple(pages(index) for _ in range(arrays)) if index in self._owners else (),
                tuple(
                    jnp.full((2 * self.num_rows, *part.shape), np.nan, exact)
                    for part in config.states_of(index)
                ),
            )
            for index in range(config.num_hidden_layers)
        ]
        self._restored: dict[int, int] = {}
        graphdef, state = nnx.split(self.model)
        leaves, treedef = jax.tree.flatten(state)

        def forward(leaves, tokens, step, kept):
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            groups = _OwnPages(self._sources, kept) if config.layers.sources else None
            kept, _, hidden = model.advance(tokens, step, kept, groups)
            return model.logits(hidden), kept if groups is None else groups.kept

        # Some products of 16-bit numbers need the fusions that are quick to leave out.
        narrow = self.model.norm.dtype.itemsize < 4
        options = {"xla_backend_optimization_level": 0} if narrow else FAST
        self._forward = jax.jit(forward, compiler_options=options) if self.whole else forward
        self._leaves = leaves

    def run(self, chunks: Sequence[Sequence[int]], pad_to: int = 0) -> list[np.ndarray]:
        """Run one step over a chunk of each row. Return the logits after each token of each.

        All chunks of one token make a decode-only step. `pad_to` appends padding tokens.
        """
        starts = [len(row) for row in self.tokens]
        counts = [len(chunk) for chunk in chunks]
        for row, chunk in zip(self.tokens, chunks, strict=True):
            row.extend(chunk)
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        )
        rows = np.repeat(np.arange(self.num_rows), counts)
        pages = self.page_table[rows, positions // self.page_size]
        slots = pages * self.page_size + positions % self.page_size
        pad = max(pad_to - len(positions), 0)
        flat = np.concatenate([np.asarray(chunk, int) for chunk in chunks])
        step = PagedStep(
            positions=_padded(positions, pad, 0),
            slot_mapping=_padded(slots, pad, -1),
            page_table=jnp.asarray(self.page_table),
            query_start=jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
            kv_len=jnp.asarray([len(row) for row in self.tokens], jnp.int32),
            decode_only=pad == 0 and set(counts) == {1},
            implementation=self.implementation,
            state_rows=self._state_rows(starts, counts),
        )
        self.last = self._leaves, _padded(flat, pad, 0), step, self.kept
        logits, self.kept = self._forward(*self.last)
        return np.split(np.asarray(logits)[: len(flat)], np.cumsum(counts)[:-1])

    def _state_rows(self, starts: list[int], counts: list[int]) -> StateRows | None:
        if self.model.config.recurrent is None:
            return None
        rows = range(self.num_rows)
        sources = [
            self._restored.pop(row, row) if start else -1 for row, start in enumerate(starts)
        ]
        borders = [self.border - start for start in starts]
        borders = [
            border if 0 < border <= count else 0
            for border, count in zip(borders, counts, strict=True)
        ]
        saved = [self.num_rows + row for row in rows]
        arrays = np.cumsum([0, *counts]), sources, list(rows), borders, saved
        return StateRows(*(jnp.asarray(array, jnp.int32) for array in arrays))

    def share(self, row: int, other: int, count: int) -> None:
        """Let a row begin anew with the first `count` tokens of another, whole pages of them."""
        pages = count // self.page_size
        assert pages * self.page_size == count <= len(self.tokens[other])
        self.page_table[row, :pages] = self.page_table[other, :pages]
        self.tokens[row] = self.tokens[other][:count]
        assert self.model.config.recurrent is None or count == self.border
        self._restored[row] = self.num_rows + other

    def begin_anew(self) -> None:
        """Let all rows begin with no token, in their own pages and states of their last tokens."""
        self.tokens, self.page_table = [[] for _ in self.tokens], self._own_pages.copy()

    def program(self) -> str:
        """Return the program of the last step, as text."""
        if isinstance(self._forward, jax.stages.Wrapped):
            return str(self._forward.trace(*self.last).jaxpr)
        return str(jax.make_jaxpr(self._forward)(*self.last))

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        chunks: int = 1,
        padded: bool = False,
    ) -> list[np.ndarray]:
        """Append each row's `count` most likely tokens. Return the logits after each token.

        Prompts are read in as many steps as `chunks`, all of one padded shape. Steps of one token
        for each row have that shape too where they are to be `padded`, and need no other program.
        """
        parts = [np.array_split(np.asarray(prompt), chunks) for prompt in prompts]
        pad_to = sum(len(part[0]) for part in parts) + (chunks > 1)
        steps = [
            self.run([part[chunk].tolist() for part in parts], pad_to) for chunk in range(chunks)
        ]
        for _ in range(count):
            following = [[int(row[-1].argmax())] for row in steps[-1]]
            steps.append(self.run(following, pad_to if padded else 0))
        return [np.concatenate(row) for row in zip(*steps, strict=True)]


class _OwnPages:
    """Cache pages of which some layers read those of others."""

    def __init__(self, sources: Sequence[int], kept: Sequence[Kept]) -> None:
        self._sources, self.kept = sources, list(kept)

    def of_layer(self, layer: int, step: PagedStep) -> tuple[Any, PagedStep]:
        return self.kept[self._sources[layer]].pages, step

    def put(self, layer: int, pages: Any) -> None:
        source = self._sources[layer]
        self.kept[source] = self.kept[source]._replace(pages=pages)


def _padded(values: np.ndarray, pad: int, fill: int) -> jax.Array:
    return jnp.asarray(np.concatenate([values, np.full(pad, fill)]), jnp.int32)
