# pyright: reportUnknownMemberType=false
"""model_step: the one program, compiled once for each bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.execution.batch import StepBatch
from jaxserve.execution.columns import Columns
from jaxserve.execution.logprobs import DeviceLogprobs, draw_logprobs, position_logprobs
from jaxserve.execution.page_table import put_pages
from jaxserve.execution.sampler_state import SamplerState, record
from jaxserve.execution.sampling import sample
from jaxserve.execution.state import DeviceState, StepOutput
from jaxserve.models import Decoder
from jaxserve.models.paged import PagedStep
from jaxserve.models.panels import with_num_rows
from jaxserve.models.quantized import with_implementation
from jaxserve.scheduling.slot_table import NO_TOKEN

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

    # How many steps are done, the rows that take part, the state, and what has been drawn.
    Launch = tuple[
        Int32[Array, ""],
        Bool[Array, " R"],
        DeviceState,
        Int32[Array, "steps R"],
        DeviceLogprobs | None,
    ]


def slot_mapping(
    batch: StepBatch[Array], page_table: Int32[Array, "R M"], page_size: int
) -> Int32[Array, " T"]:
    """Return the cell of the cache for each token's K and V; -1 for padding."""
    column = batch.positions // page_size
    page = page_table.at[batch.row_of_token, column].get(mode="clip")
    cell = page * page_size + batch.positions % page_size
    real = jnp.arange(batch.tokens.shape[0]) < batch.query_start[-1]
    # A row that has ended within the launch takes no part any more.
    real &= batch.kv_len.at[batch.row_of_token].get(mode="clip") > 0
    return jnp.where(real, cell, -1)


def known_tokens(
    batch: StepBatch[Array], last_token: Int32[Array, " slots_plus_1"]
) -> Int32[Array, " T"]:
    """Return the step's tokens, those that only the device knows among them."""
    owner = batch.slots.at[batch.row_of_token].get(mode="clip")
    # A row that could draw nothing may be in flight once more; what it computes is dropped.
    drawn = jnp.maximum(last_token.at[owner].get(mode="clip"), 0)
    return jnp.where(batch.tokens >= 0, batch.tokens, drawn)


def model_step(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    leaves: list[Array],
    state: DeviceState,
    batch: StepBatch[Array],
    **options: Any,
) -> tuple[DeviceState, StepOutput]:
    """Compute a step's tokens, write their K and V, and draw the next token of each row.

    Prefill, chunked prefill and decode are the same call with rows of different length.

    Args:
        graphdef, treedef: the model without its arrays, as `nnx.split` and `tree.flatten` left it.
        leaves: its arrays. Flat, because flattening a module costs milliseconds a call.
        state: donated.
        decode_only: static; every row has one token.
        greedy: static; every row takes its most likely token (see `is_greedy`), unless
            `choose_tokens` follows.
        keeps_logits: static; the output has what `choose_tokens` and `score_positions` take.
        implementation: static; which attention and which products run.
    """
    state, page_table = with_new_pages(state, batch)
    return _take_step(graphdef, treedef, leaves, state, batch, page_table=page_table, **options)


def with_new_pages(
    state: DeviceState, batch: StepBatch[Array]
) -> tuple[DeviceState, Int32[Array, "R M"]]:
    """Put a launch's new pages into the page table; return it with the rows of the launch."""
    table = put_pages(state.page_table, batch.page_places, batch.page_ids)
    return replace(state, page_table=table), table.at[batch.slots].get(mode="clip")


def _take_step(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    leaves: list[Array],
    state: DeviceState,
    batch: StepBatch[Array],
    *,
    page_table: Int32[Array, "R M"],
    decode_only: bool,
    greedy: bool,
    implementation: str,
    keeps_logits: bool = False,
) -> tuple[DeviceState, StepOutput]:
    # Real rows come first in tokens and batch; a block of positions has no more of them.
    num_tokens = batch.query_start[-1]
    parameters = with_implementation(jax.tree.unflatten(treedef, leaves), implementation)
    model = nnx.merge(graphdef, with_num_rows(parameters, num_tokens))
    page_size = state.kv[0][0].shape[2] * model.config.split.context
    step = PagedStep(
        positions=batch.positions,
        slot_mapping=slot_mapping(batch, page_table, page_size),
        page_table=page_table,
        query_start=batch.query_start,
        kv_len=batch.kv_len,
        decode_only=decode_only,
        implementation=implementation,
    )
    hidden, kv, rows = model.counted(known_tokens(batch, state.last_token), step, state.kv)
    last = hidden if decode_only else hidden.at[batch.sample_index].get(mode="clip")
    # Not by kv_len: a row that has ended within a launch lies before others that have not.
    num_rows = (batch.query_start[:-1] < num_tokens).sum(dtype=jnp.int32)
    logits = model.logits(last, num_rows)
    with jax.named_scope("sample"):
        columns = Columns.of(model.config)
        token_ids = sample(logits, batch, state.sampler, greedy, step.others, columns)
        # Where every row is greedy none counts its tokens. A row that drew nothing ends, but what
        # it counts until then must lie in the vocabulary.
        indices = token_ids if greedy else jnp.maximum(token_ids, 0)
        sampler = state.sampler if greedy else record(state.sampler, batch, indices)
    last_token = _with_draws(state.last_token, batch.sample_slots, token_ids)
    logprobs = None
    if not greedy:
        with jax.named_scope("scores"):
            if decode_only:
                logprobs = draw_logprobs(logits, indices, batch, columns)
            else:
                draws = batch.sample_slots < state.last_token.shape[0] - 1
                scored = (model.logits, hidden, logits, indices, draws, batch)
                logprobs = position_logprobs(*scored, columns)
    counted = None if rows is None or state.expert_rows is None else state.expert_rows + rows
    state = replace(state, kv=kv, last_token=last_token, sampler=sampler, expert_rows=counted)
    output = StepOutput(token_ids=token_ids, logprobs=logprobs, expert_rows=counted)
    return state, replace(output, logits=logits, hidden=hidden) if keeps_logits else output


def choose_tokens(
    last_token: Int32[Array, " slots_plus_1"],
    sampler: SamplerState,
    logits: Float[Array, "R V"],
    batch: StepBatch[Array],
    columns: Columns,
) -> tuple[Int32[Array, " slots_plus_1"], SamplerState, StepOutput]:
    """Draw the next token of each row behind a step that took the most likely ones.

    Args:
        last_token, sampler: of the step's state; donated.
        logits: of each row's last token.
        batch: the step's; its rows alone are read.
        columns: static; of the logits.
    """
    token_ids = sample(logits, batch, sampler, columns=columns)
    indices = jnp.maximum(token_ids, 0)
    sampler = record(sampler, batch, indices)
    logprobs = draw_logprobs(logits, indices, batch, columns)
    last_token = _with_draws(last_token, batch.sample_slots, token_ids)
    return last_token, sampler, StepOutput(token_ids=token_ids, logprobs=logprobs)


def score_positions(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    leaves: list[Array],
    output: StepOutput,
    null_slot: int,
    batch: StepBatch[Array],
    *,
    implementation: str,
) -> DeviceLogprobs:
    """Compute the log-probabilities of what follows each token of a step, where requested.

    Args:
        output: of the step, with the tokens drawn behind it.
        null_slot: static.
    """
    parameters = with_implementation(jax.tree.unflatten(treedef, leaves), implementation)
    model = nnx.merge(graphdef, with_num_rows(parameters, batch.query_start[-1]))
    draws = batch.sample_slots < null_slot
    assert output.hidden is not None and output.logits is not None
    indices = jnp.maximum(output.token_ids, 0)
    scored = (model.logits, output.hidden, output.logits, indices, draws, batch)
    return position_logprobs(*scored, Columns.of(model.config))


def project_positions(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    leaves: list[Array],
    hidden: Float[Array, "T D"],
    start: Int32[Array, ""],
    num_tokens: Int32[Array, ""],
    *,
    count: int,
    implementation: str,
) -> Float[Array, "count V"]:
    """Compute the logits at positions of a step, for what the host scores of prompts.

    Args:
        hidden: of the step; its first `num_tokens` rows are no padding.
        start: first of the positions; the last ones are taken where it lies too far behind.
        count: static; positions.
    """
    parameters = with_implementation(jax.tree.unflatten(treedef, leaves), implementation)
    model = nnx.merge(graphdef, with_num_rows(parameters, num_tokens))
    return model.logits(lax.dynamic_slice_in_dim(hidden, start, count))


def _with_draws(
    last_token: Int32[Array, " slots_plus_1"],
    slots: Int32[Array, " R"],
    token_ids: Int32[Array, " R"],
) -> Int32[Array, " slots_plus_1"]:
    if slots.shape[0] > 1:
        return last_token.at[slots].set(token_ids, mode="drop")
    # XLA makes two launches on a GPU of a scatter of a single entry.
    return jnp.where(jnp.arange(last_token.shape[0]) == slots, token_ids, last_token)


def decode_steps(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    leaves: list[Array],
    state: DeviceState,
    batch: StepBatch[Array],
    *,
    most: int,
    **options: Any,
) -> tuple[DeviceState, StepOutput]:
    """Take several decode steps in one launch, each over the tokens that the one before drew.

    A row takes part until a token ends it, or logits that are not finite; then it writes nothing
    more. The launch ends with its last row. Each step is the one that `model_step` computes alone,
    so that it does not matter how many are taken at a time.

    Args:
        batch: one token a row; `num_steps`, at most `most`, are taken.
        most: static.
        options: as for `model_step`.

    Returns:
        token_ids are [most, R], defined for the steps that a row took part in; scores are
        those of the last step.
    """
    state, page_table = with_new_pages(state, batch)
    step = _traced_once(graphdef, treedef, decode_only=True, **options)
    null_slot = state.last_token.shape[0] - 1
    shapes = jax.eval_shape(step, leaves, state, batch, page_table=page_table)[1]
    none = jnp.full((most, *shapes.token_ids.shape), NO_TOKEN, jnp.int32)
    logprobs = jax.tree.map(_zeros, shapes.logprobs)

    def take(carry: Launch) -> Launch:
        done, active, state, token_ids, _ = carry
        length = batch.kv_len + done
        now = replace(
            batch,
            tokens=jnp.where(done == 0, batch.tokens, NO_TOKEN),
            positions=jnp.where(active, batch.positions + done, 0),
            kv_len=jnp.where(active, length, 0),
            slots=jnp.where(active, batch.slots, null_slot),
            sample_slots=jnp.where(active, batch.sample_slots, null_slot),
        )
        state, output = step(leaves, state, now, page_table=page_table)
        is_stop = (output.token_ids[:, None] == batch.stop_token_ids).any(axis=1)
        is_last = is_stop & (length >= batch.min_length) | (length + 1 >= batch.stop_length)
        active &= (output.token_ids != NO_TOKEN) & ~is_last
        written = token_ids.at[done].set(output.token_ids)
        return done + 1, active, state, written, output.logprobs

    def goes_on(carry: Launch) -> Bool[Array, ""]:
        done, active = carry[:2]
        return (done == 0) | ((done < batch.num_steps) & active.any())

    active = batch.slots != null_slot
    start = (jnp.int32(0), active, state, none, logprobs)
    _, _, state, token_ids, logprobs = lax.while_loop(goes_on, take, start)
    rows = state.expert_rows
    return state, StepOutput(token_ids=token_ids, logprobs=logprobs, expert_rows=rows)


def _traced_once(
    graphdef: nnx.GraphDef[Decoder], treedef: Any, **options: Any
) -> Callable[..., tuple[DeviceState, StepOutput]]:
    """Return `_take_step`, which is there for a loop once it was traced for its shapes."""
    return jax.jit(partial(_take_step, graphdef, treedef, **options), inline=True)


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype)
