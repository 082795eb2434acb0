"""Plain runner of a model over paged KV, with the logits after every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models import Decoder, PagedStep
from tests.support.fast_compile import FAST


@dataclass
class PagedRunner:
    """Runner of a model's steps over one cache of scattered pages. It keeps each row's tokens.

    Row r's pages are every R-th of a random order of all pages but page 0, which stays full of NaN,
    as steps may not read it. `whole` compiles each step as one program. `implementation` is that
    of its kernels.
    """

    model: Decoder
    num_rows: int = 1
    page_size: int = 4
    max_tokens: int = 192
    whole: bool = True
    implementation: str = "xla"
    tokens: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        self.tokens = [[] for _ in range(self.num_rows)]
        pages_per_row = -(-self.max_tokens // self.page_size)
        num_pages = pages_per_row * self.num_rows + 1
        order = np.random.default_rng(0).permutation(np.arange(1, num_pages))
        self.page_table = order.reshape(pages_per_row, self.num_rows).T.astype(np.int32)
        shape = (num_pages, config.num_key_value_heads, self.page_size, config.head_dim)
        pages = np.zeros(shape, self.model.norm.scale.dtype)
        pages[0] = np.nan
        self.kv = [(jnp.array(pages), jnp.array(pages)) for _ in range(config.num_hidden_layers)]
        graphdef, state = nnx.split(self.model)
        leaves, treedef = jax.tree.flatten(state)

        def forward(leaves, tokens, step, kv):
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            hidden, kv = model(tokens, step, kv)
            return model.logits(hidden), kv

        # Some products of 16-bit numbers need the fusions that are quick to leave out.
        narrow = self.model.norm.scale.dtype.itemsize < 4
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
        )
        self.last = self._leaves, _padded(flat, pad, 0), step, self.kv
        logits, self.kv = self._forward(*self.last)
        return np.split(np.asarray(logits)[: len(flat)], np.cumsum(counts)[:-1])

    def share(self, row: int, other: int, count: int) -> None:
        """Let a row begin anew with the first `count` tokens of another, whole pages of them."""
        pages = count // self.page_size
        assert pages * self.page_size == count <= len(self.tokens[other])
        self.page_table[row, :pages] = self.page_table[other, :pages]
        self.tokens[row] = self.tokens[other][:count]

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


def _padded(values: np.ndarray, pad: int, fill: int) -> jax.Array:
    return jnp.asarray(np.concatenate([values, np.full(pad, fill)]), jnp.int32)
