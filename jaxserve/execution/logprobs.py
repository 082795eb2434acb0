"""Log-probabilities of tokens, computed where they are asked for and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.sampling import LANES, in_groups
from jaxserve.request import MAX_LOGPROBS, Ask
from jaxserve.scheduling.scores import Scores

Array = Any

_BLOCK = 32


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k greatest values of each row and their columns, best first, lower column first if equal.

    Exact, in two levels: the k greatest lie in the k groups of greatest maximum. Those are taken
    in the order of their columns, so that equals keep theirs.
    """
    groups = in_groups(x, -jnp.inf)
    num_groups = min(k, groups.shape[1])
    chosen = jnp.sort(lax.top_k(groups.max(axis=-1), num_groups)[1], axis=-1)
    few = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(len(x), -1)
    values, where = lax.top_k(few, k)
    group = jnp.take_along_axis(chosen, where // LANES, axis=1)
    return values, (group * LANES + where % LANES).astype(jnp.int32)


def score(logits: Array, tokens: Array) -> Scores:
    """Scores of one token a row under its logits [N, V], i32[N]."""
    total = jax.nn.logsumexp(logits, axis=1)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + (logits > own).sum(axis=1, dtype=jnp.int32)
    values, ids = top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return Scores(own[:, 0] - total, rank, ids, values - total[:, None])


def no_scores(count: int, vocab_size: int, dtype: Any) -> Scores:
    """Zeros, where nobody asked."""
    width = min(MAX_LOGPROBS, vocab_size)
    return Scores(
        jnp.zeros(count, dtype),
        jnp.zeros(count, jnp.int32),
        jnp.zeros((count, width), jnp.int32),
        jnp.zeros((count, width), dtype),
    )


def score_draws(logits: Array, token_ids: Array, batch: Any) -> Scores:
    """Scores of a decode step's draws, for all rows where one asks."""
    none = no_scores(logits.shape[0], logits.shape[1], logits.dtype)
    asked = jnp.any(batch.asks & int(Ask.LOGPROBS) != 0)
    return lax.cond(asked, lambda: score(logits, token_ids), lambda: none)


def score_positions(
    project: Callable[[Array], Array],
    hidden: Array,
    logits: Array,
    token_ids: Array,
    draws: Array,
    batch: Any,
) -> Scores:
    """Scores [T] of what follows each token of a step, where a row asks for it.

    After a prompt's token that is the prompt's next (`batch.targets`), and after a row's last
    what was drawn. Logits are computed anew, 32 positions at a time and only of those asked for:
    memory does not grow with a chunk's length.

    Args:
        project: hidden states [N, D] to logits [N, V].
        hidden: [T, D].
        logits: [R, V], of each row's last token; only their shape and type count.
        token_ids: i32[R], the draws.
        draws: bool[R], which rows draw.
        batch: see StepBatch.
    """
    num_tokens = len(hidden)
    scored = draws & (batch.asks & int(Ask.LOGPROBS) != 0)
    where = jnp.where(scored, batch.sample_index, num_tokens)
    targets = batch.targets.at[where].set(token_ids, mode="drop")
    none = no_scores(num_tokens, logits.shape[1], logits.dtype)

    def blocks() -> Scores:
        wanted = targets >= 0
        padded = -(-num_tokens // _BLOCK) * _BLOCK
        order = jnp.nonzero(wanted, size=padded, fill_value=num_tokens)[0]

        def block(index: Array, scores: Scores) -> Scores:
            at = lax.dynamic_slice(order, (index * _BLOCK,), (_BLOCK,))
            found = score(project(hidden.at[at].get(mode="clip")), targets.at[at].get(mode="clip"))
            return jax.tree.map(lambda old, new: old.at[at].set(new, mode="drop"), scores, found)

        return lax.fori_loop(0, -(-wanted.sum() // _BLOCK), block, none)

    return lax.cond(jnp.any(targets >= 0), blocks, lambda: none)
