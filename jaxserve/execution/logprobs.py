# pyright: reportUnknownMemberType=false
"""Log-probabilities of tokens, computed only if a request needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.execution.batch import StepBatch
from jaxserve.execution.columns import LANES, Columns, in_groups
from jaxserve.execution.typed_jax import cond, fori_loop
from jaxserve.request import MAX_LOGPROBS, SamplerFeature
from pallas_kernels import row_sums

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

BLOCK = 32  # number of positions whose logits are computed at once
_ONE_LEVEL = 2048
_VECTOR = 16


class DeviceLogprobs(NamedTuple):
    """Log-probabilities and ranks of N tokens and of K alternatives each, as JAX arrays."""

    logprob: Float[Array, " N"]
    rank: Int32[Array, " N"]
    top_ids: Int32[Array, "N K"]
    top_logprobs: Float[Array, "N K"]


def top_k(x: Float[Array, "N V"], k: int) -> tuple[Float[Array, "N K"], Int32[Array, "N K"]]:
    """Return each row's k greatest values in descending order, and their columns.

    Of equal values the one with the lower column comes first. The result is exact. The k greatest
    values lie in the k groups of 128 columns with the greatest maxima, which are searched in the
    order of their columns. Rows of up to 2,048 columns are searched directly, which compiles in a
    tenth of the time.
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


def logprobs_of(logits: Float[Array, "N V"], tokens: Int32[Array, " N"]) -> DeviceLogprobs:
    """Compute the log-probability and rank of one token per row, and the most likely tokens.

    Args:
        logits: whole rows of logits, -inf for excluded tokens.
        tokens: one token id per row.

    Returns:
        For each row the values of its token, and the MAX_LOGPROBS most likely tokens as
        alternatives.
    """
    total = logits.max(axis=1) + _log(row_sums(logits, "exps"))
    is_token = jnp.arange(logits.shape[1]) == tokens[:, None]
    logit = jnp.where(is_token, logits, 0).sum(axis=1, keepdims=True)
    rank = 1 + (logits > logit).sum(axis=1, dtype=jnp.int32)
    values, ids = top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return DeviceLogprobs(logit[:, 0] - total, rank, ids, values - total[:, None])


def _log(x: Float[Array, " R"]) -> Float[Array, " R"]:
    # Whole vectors only: XLA on CPU rounds the elements of a partial vector differently.
    whole = lax.optimization_barrier(jnp.pad(x, (0, -len(x) % _VECTOR), constant_values=1))
    return lax.optimization_barrier(jnp.log(whole))[: len(x)]


def no_logprobs(count: int, vocab_size: int, dtype: DTypeLike) -> DeviceLogprobs:
    """Return a DeviceLogprobs of zeros for `count` tokens, for launches without requests."""
    width = min(MAX_LOGPROBS, vocab_size)
    return DeviceLogprobs(
        jnp.zeros(count, dtype),
        jnp.zeros(count, jnp.int32),
        jnp.zeros((count, width), jnp.int32),
        jnp.zeros((count, width), dtype),
    )


def draw_logprobs(
    logits: Float[Array, "R V"],
    token_ids: Int32[Array, " R"],
    batch: StepBatch[Array],
    columns: Columns,
) -> DeviceLogprobs:
    """Return the log-probability of each row's sampled token, if any row requests it.

    If no row requests log-probabilities, the result is zeros.

    Args:
        logits: logits from which the tokens were sampled, before edits.
        token_ids: the sampled token of each row.
        batch: the inputs of the step, whose `features` contain the requests.
        columns: the division of the logits over devices.
    """
    none = no_logprobs(logits.shape[0], columns.vocab_size, logits.dtype)
    is_requested = jnp.any(batch.features & int(SamplerFeature.LOGPROBS) != 0)
    return cond(is_requested, lambda: columns.by_rows(logprobs_of, logits, token_ids), lambda: none)


def position_logprobs(
    project: Callable[[Array], Array],
    hidden: Float[Array, "T D"],
    logits: Float[Array, "R V"],
    token_ids: Int32[Array, " R"],
    draws: Bool[Array, " R"],
    batch: StepBatch[Array],
    columns: Columns,
) -> DeviceLogprobs:
    """Compute the log-probability of the token that follows each token of a step, where requested.

    The last token of a row is followed by the row's sampled token, any other token by the next
    token of its prompt (`batch.targets`). Logits are computed again for blocks of 32 positions with
    a requested one, so memory does not grow with the length of a chunk.

    Args:
        project: maps hidden states [N, D] to logits [N, V].
        hidden: the hidden states of the step.
        logits: the logits of each row's last token, of which only the dtype is used.
        token_ids: the sampled tokens.
        draws: whether each row samples.
        batch: the inputs of the step.
        columns: the division of the logits over devices.

    Returns:
        One entry per token of the step, undefined where no log-probability is requested.
    """
    num_tokens, size = len(hidden), min(BLOCK, len(hidden))
    row = batch.row_of_token
    is_requested = (
        (draws & (batch.features & int(SamplerFeature.LOGPROBS) != 0)).at[row].get(mode="clip")
    )
    is_last = batch.sample_index.at[row].get(mode="clip") == jnp.arange(num_tokens)
    drawn = token_ids.at[row].get(mode="clip")
    targets = jnp.where(is_requested & is_last, drawn, batch.targets)
    none = no_logprobs(num_tokens, columns.vocab_size, logits.dtype)

    def block(index: Array, logprobs: DeviceLogprobs) -> DeviceLogprobs:
        # The last block starts earlier if necessary, for reading and for writing.
        start = index * size
        here = lax.dynamic_slice_in_dim(targets, start, size)

        def put(old: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(old, part, start, 0)

        def scored() -> DeviceLogprobs:
            part = project(lax.dynamic_slice_in_dim(hidden, start, size))
            new = columns.by_rows(logprobs_of, part, here)
            return jax.tree.map(put, logprobs, new)

        return cond(jnp.any(here >= 0), scored, lambda: logprobs)

    return cond(
        jnp.any(targets >= 0),
        lambda: fori_loop(0, -(-num_tokens // size), block, none),
        lambda: none,
    )
