"""Log-probabilities of tokens, computed where they are asked for and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.sampling import LANES, in_groups
from jaxserve.request import MAX_LOGPROBS, SamplerFeature
from jaxserve.scheduling.logprobs import TokenLogprobs
from pallas_kernels import row_sums

Array = Any

_BLOCK = 32
_ONE_LEVEL = 2048
_VECTOR = 16


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k greatest values of each row and their columns, best first, lower column first if equal.

    Exact, in two levels: the k greatest lie in the k groups of greatest maximum. Those are taken
    in the order of their columns, so that equals keep theirs. Few columns need one level, which
    compiles in a tenth of the time.
    """
    if x.shape[1] <= _ONE_LEVEL:
        values, ids = lax.top_k(x, k)
        return values, ids.astype(jnp.int32)
    groups = in_groups(x, -jnp.inf)
    num_groups = min(k, groups.shape[1])
    chosen = jnp.sort(lax.top_k(groups.max(axis=-1), num_groups)[1], axis=-1)
    rows = jnp.arange(len(x))[:, None]
    few = groups.at[rows, chosen].get(mode="clip").reshape(len(x), -1)
    values, where = lax.top_k(few, k)
    group = chosen.at[rows, where // LANES].get(mode="clip")
    return values, (group * LANES + where % LANES).astype(jnp.int32)


def score(logits: Array, tokens: Array) -> TokenLogprobs:
    """Scores of one token a row under its logits [N, V], i32[N]."""
    total = logits.max(axis=1) + _log(row_sums(logits, "exps"))
    is_own = jnp.arange(logits.shape[1]) == tokens[:, None]
    own = jnp.where(is_own, logits, 0).sum(axis=1, keepdims=True)
    rank = 1 + (logits > own).sum(axis=1, dtype=jnp.int32)
    values, ids = top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return TokenLogprobs(own[:, 0] - total, rank, ids, values - total[:, None])


def _log(x: Array) -> Array:
    """Natural logarithms [R], in whole vectors: XLA on CPU rounds those of a rest otherwise."""
    whole = lax.optimization_barrier(jnp.pad(x, (0, -len(x) % _VECTOR), constant_values=1))
    return lax.optimization_barrier(jnp.log(whole))[: len(x)]


def no_scores(count: int, vocab_size: int, dtype: Any) -> TokenLogprobs:
    """Zeros, where nobody asked."""
    width = min(MAX_LOGPROBS, vocab_size)
    return TokenLogprobs(
        jnp.zeros(count, dtype),
        jnp.zeros(count, jnp.int32),
        jnp.zeros((count, width), jnp.int32),
        jnp.zeros((count, width), dtype),
    )


def draw_logprobs(logits: Array, token_ids: Array, batch: Any) -> TokenLogprobs:
    """Scores of a decode step's draws, for all rows where one asks."""
    none = no_scores(logits.shape[0], logits.shape[1], logits.dtype)
    asked = jnp.any(batch.features & int(SamplerFeature.LOGPROBS) != 0)
    return lax.cond(asked, lambda: score(logits, token_ids), lambda: none)


def position_logprobs(
    project: Callable[[Array], Array],
    hidden: Array,
    logits: Array,
    token_ids: Array,
    draws: Array,
    batch: Any,
) -> TokenLogprobs:
    """Scores [T] of what follows each token of a step, where a row asks for it.

    After a prompt's token that is the prompt's next (`batch.targets`), and after a row's last
    what was drawn. Logits are computed anew, 32 positions at a time, where any of them is asked
    for: memory does not grow with a chunk's length. What nobody asked for means nothing.

    Args:
        project: hidden states [N, D] to logits [N, V].
        hidden: [T, D].
        logits: [R, V], of each row's last token; only their shape and type count.
        token_ids: i32[R], the draws.
        draws: bool[R], which rows draw.
        batch: see StepBatch.
    """
    num_tokens, size = len(hidden), min(_BLOCK, len(hidden))
    row = batch.row_of_token
    scored = (draws & (batch.features & int(SamplerFeature.LOGPROBS) != 0)).at[row].get(mode="clip")
    is_last = batch.sample_index.at[row].get(mode="clip") == jnp.arange(num_tokens)
    drawn = token_ids.at[row].get(mode="clip")
    targets = jnp.where(scored & is_last, drawn, batch.targets)
    none = no_scores(num_tokens, logits.shape[1], logits.dtype)

    def block(index: Array, logprobs: TokenLogprobs) -> TokenLogprobs:
        # The last block begins where it still fits, and so does what it writes.
        start = index * size
        here = lax.dynamic_slice_in_dim(targets, start, size)

        def found() -> TokenLogprobs:
            new = score(project(lax.dynamic_slice_in_dim(hidden, start, size)), here)
            return jax.tree.map(
                lambda old, part: lax.dynamic_update_slice_in_dim(old, part, start, 0),
                logprobs,
                new,
            )

        return lax.cond(jnp.any(here >= 0), found, lambda: logprobs)

    return lax.cond(
        jnp.any(targets >= 0),
        lambda: lax.fori_loop(0, -(-num_tokens // size), block, none),
        lambda: none,
    )
