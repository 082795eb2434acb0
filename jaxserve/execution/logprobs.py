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
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

# Number of positions whose logits, or log-probabilities, are computed at once. On CPU XLA rounds a
# logarithm differently in larger arrays.
BLOCK = 32
_LOGPROBS = int(SamplerFeature.LOGPROBS)
_ALTERNATIVES = int(SamplerFeature.ALTERNATIVES)
_PROMPT_ALTERNATIVES = int(SamplerFeature.PROMPT_ALTERNATIVES)
_ONE_LEVEL = 2048
_VECTOR = 16


class DeviceLogprobs(NamedTuple):
    """Log-probabilities and ranks of N tokens and of K alternatives each, as JAX arrays.

    A launch of several steps has a first axis of steps. The alternatives are zeros unless a row
    requests some.
    """

    logprob: Float[Array, "*steps N"]
    rank: Int32[Array, "*steps N"]
    top_ids: Int32[Array, "*steps N K"]
    top_logprobs: Float[Array, "*steps N K"]


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


def logprobs_of(
    logits: Float[Array, "N V"],
    tokens: Int32[Array, " N"],
    has_alternatives: Bool[Array, ""] | bool = True,
) -> DeviceLogprobs:
    """Compute the log-probability and rank of one token per row, and the most likely tokens.

    Args:
        logits: whole rows of logits, -inf for excluded tokens.
        tokens: one token id per row.
        has_alternatives: whether the most likely tokens are searched, which takes longer than all
            other values.

    Returns:
        For each row the values of its token, and the MAX_LOGPROBS most likely tokens as
        alternatives, or zeros.
    """
    none = no_logprobs(len(logits), logits.shape[1], logits.dtype)
    total = logits.max(axis=1) + _log(row_sums(logits, "exps"))
    is_token = jnp.arange(logits.shape[1]) == tokens[:, None]
    logit = jnp.where(is_token, logits, 0).sum(axis=1, keepdims=True)
    rank = 1 + (logits > logit).sum(axis=1, dtype=jnp.int32)
    ids, values = cond(
        jnp.asarray(has_alternatives),
        lambda: _alternatives(logits, total),
        lambda: (none.top_ids, none.top_logprobs),
    )
    return DeviceLogprobs(logit[:, 0] - total, rank, ids, values)


def _alternatives(
    logits: Float[Array, "N V"], total: Float[Array, " N"]
) -> tuple[Int32[Array, "N K"], Float[Array, "N K"]]:
    values, ids = top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return ids, values - total[:, None]


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

    If no row requests log-probabilities, the result is zeros. The alternatives are zeros if no row
    requests some.

    Args:
        logits: logits from which the tokens were sampled, before edits.
        token_ids: the sampled token of each row.
        batch: the inputs of the step, whose `features` contain the requests.
        columns: the division of the logits over devices.
    """
    num_rows = logits.shape[0]
    none = no_logprobs(num_rows, columns.vocab_size, logits.dtype)
    is_requested = jnp.any(batch.features & _LOGPROBS != 0)
    score = _scores(jnp.any(batch.features & _ALTERNATIVES != 0))
    # A GPU takes one launch for all rows. Its products round differently in each shape anyway.
    size = num_rows if target_device().is_gpu else min(BLOCK, num_rows)

    def block(start: Array, _: DeviceLogprobs) -> DeviceLogprobs:
        part, tokens = (lax.dynamic_slice_in_dim(x, start, size) for x in (logits, token_ids))
        return columns.by_rows(score, part, tokens)

    def scored() -> DeviceLogprobs:
        if size == num_rows:
            return columns.by_rows(score, logits, token_ids)
        return _in_blocks(num_rows, size, block, none)

    return cond(is_requested, scored, lambda: none)


def _scores(
    has_alternatives: Bool[Array, ""],
) -> Callable[[Float[Array, "r V"], Int32[Array, " r"]], DeviceLogprobs]:
    return lambda logits, tokens: logprobs_of(logits, tokens, has_alternatives)


def _in_blocks(
    count: int,
    size: int,
    block: Callable[[Array, DeviceLogprobs], DeviceLogprobs],
    none: DeviceLogprobs,
) -> DeviceLogprobs:
    """Compute the log-probabilities of `count` tokens, `size` at a time.

    Args:
        count: the number of tokens.
        size: the number of tokens of a block, at most `count`. The last block starts earlier if
            necessary, for reading and for writing.
        block: a function of the first token of a block, and of the values of its tokens so far. It
            returns the new values of its tokens.
        none: the initial values of all tokens.
    """

    def step(index: Array, logprobs: DeviceLogprobs) -> DeviceLogprobs:
        start = jnp.minimum(index * size, count - size)

        def read(column: Array) -> Array:
            return lax.dynamic_slice_in_dim(column, start, size)

        def write(column: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(column, part, start, 0)

        return jax.tree.map(write, logprobs, block(start, jax.tree.map(read, logprobs)))

    return fori_loop(0, -(-count // size), step, none)


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
    is_requested = (draws & (batch.features & _LOGPROBS != 0)).at[row].get(mode="clip")
    is_last = batch.sample_index.at[row].get(mode="clip") == jnp.arange(num_tokens)
    drawn = token_ids.at[row].get(mode="clip")
    targets = jnp.where(is_requested & is_last, drawn, batch.targets)
    none = no_logprobs(num_tokens, columns.vocab_size, logits.dtype)
    score = _scores(jnp.any(batch.features & (_ALTERNATIVES | _PROMPT_ALTERNATIVES) != 0))

    def block(start: Array, before: DeviceLogprobs) -> DeviceLogprobs:
        here = lax.dynamic_slice_in_dim(targets, start, size)

        def scored() -> DeviceLogprobs:
            part = project(lax.dynamic_slice_in_dim(hidden, start, size))
            return columns.by_rows(score, part, here)

        return cond(jnp.any(here >= 0), scored, lambda: before)

    return cond(
        jnp.any(targets >= 0),
        lambda: _in_blocks(num_tokens, size, block, none),
        lambda: none,
    )
