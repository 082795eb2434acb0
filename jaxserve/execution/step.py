# pyright: reportUnknownMemberType=false
"""model_step: the step of the model and the sampler, compiled once per bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.execution.batch import StepBatch, known_tokens, slot_mapping, state_rows
from jaxserve.execution.columns import Columns
from jaxserve.execution.logprobs import DeviceLogprobs, draw_logprobs, position_logprobs
from jaxserve.execution.page_table import places_of_parts, put_pages, tables_of_groups
from jaxserve.execution.sampler_state import SamplerState, record
from jaxserve.execution.sampling import sample
from jaxserve.execution.state import (
    STATES,
    DeviceState,
    StepOutput,
    kept_by_layers,
    with_states,
)
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.config.page_kinds import PageLayout
from jaxserve.models.paged import GroupCells, PagedStep, PageGroups
from jaxserve.models.placed_weight import with_implementation, with_num_rows
from jaxserve.scheduling.slot_table import NO_TOKEN

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

    # The number of finished steps, the active rows, the state, sampled tokens, log-probabilities.
    Launch = tuple[
        Int32[Array, ""],
        Bool[Array, " R"],
        DeviceState,
        Int32[Array, "steps R"],
        DeviceLogprobs | None,
    ]


def model_step(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    leaves: list[Array],
    state: DeviceState,
    batch: StepBatch[Array],
    *,
    layout: PageLayout | None = None,
    **options: Any,
) -> tuple[DeviceState, StepOutput]:
    """Compute a step's tokens, write their K and V, and sample the next token of each row.

    Prefill, chunked prefill and decode are the same call with rows of different length.

    Args:
        graphdef: the model without its arrays, from `nnx.split`.
        treedef: the structure of the arrays, from `jax.tree.flatten`.
        leaves: the model's arrays. They are flat, because flattening a module takes milliseconds
            per call.
        state: the device state, donated.
        batch: the inputs of the step.
        layout: static, the layout of the cache pages if there are several kinds, else None.
        options: static. `decode_only`: every row has one token. `greedy`: every row takes its most
            likely token (see `is_greedy`), unless `choose_tokens` follows. `keeps_logits`: the
            output contains the inputs of `choose_tokens` and `score_positions`. `implementation`:
            the choice of attention and product kernels.

    Returns:
        The new device state, and the sampled tokens with the requested log-probabilities.
    """
    state, page_table = with_new_pages(state, batch, layout)
    options |= {"page_table": page_table, "layout": layout}
    return _take_step(graphdef, treedef, leaves, state, batch, **options)


def with_new_pages(
    state: DeviceState, batch: StepBatch[Array], layout: PageLayout | None = None
) -> tuple[DeviceState, Int32[Array, "R W"]]:
    """Write a launch's new pages into the page table of the device state.

    The result is the new state, and for each row of the launch its row of the page table.
    """
    places, pages = batch.page_places, batch.page_ids
    if layout is not None:
        places, pages = places_of_parts(places, layout, state.page_table.shape[1]), pages.ravel()
    table = put_pages(state.page_table, places, pages)
    return replace(state, page_table=table), table.at[batch.slots].get(mode="clip")


def _paged_step(
    config: ModelConfig,
    layout: PageLayout | None,
    state: DeviceState,
    batch: StepBatch[Array],
    page_table: Int32[Array, "R W"],
    decode_only: bool,
    implementation: str,
) -> tuple[PagedStep, PageGroups | None]:
    """Return a step as the layers see it, and their cache pages if groups of layers share them."""
    page_size = state.kv[0][0].shape[2] * config.split.context if state.kv else 1
    null_slot = state.last_token.shape[0] - 1
    groups = None
    if layout is None:
        cells = GroupCells(page_table, slot_mapping(batch, page_table, page_size))
    else:
        block = page_size * layout.splits(0)
        cells_of_groups = [
            GroupCells(table, slot_mapping(batch, table, block // splits))
            for table, splits in tables_of_groups(page_table, layout)
        ]
        cells = cells_of_groups[0]
        groups = PageGroups(layout, state.kv, cells_of_groups, config.split.devices)
    step = PagedStep(
        positions=batch.positions,
        slot_mapping=cells.slot_mapping,
        page_table=cells.page_table,
        query_start=batch.query_start,
        kv_len=batch.kv_len,
        decode_only=decode_only,
        implementation=implementation,
        state_rows=state_rows(batch, null_slot) if STATES in state.others else None,
    )
    return step, groups


def _take_step(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    leaves: list[Array],
    state: DeviceState,
    batch: StepBatch[Array],
    *,
    page_table: Int32[Array, "R W"],
    decode_only: bool,
    greedy: bool,
    implementation: str,
    keeps_logits: bool = False,
    layout: PageLayout | None = None,
) -> tuple[DeviceState, StepOutput]:
    # Tokens and rows of the plan come before padding.
    num_tokens = batch.query_start[-1]
    parameters = with_implementation(jax.tree.unflatten(treedef, leaves), implementation)
    model = nnx.merge(graphdef, with_num_rows(parameters, num_tokens))
    null_slot = state.last_token.shape[0] - 1
    step, groups = _paged_step(
        model.config, layout, state, batch, page_table, decode_only, implementation
    )
    tokens = known_tokens(batch, state.last_token)
    kept, rows, hidden = model.advance(tokens, step, kept_by_layers(model.config, state), groups)
    last = hidden if decode_only else hidden.at[batch.sample_index].get(mode="clip")
    # kv_len cannot be used: a row that has ended can precede active rows.
    num_rows = (batch.query_start[:-1] < num_tokens).sum(dtype=jnp.int32)
    logits = model.logits(last, num_rows)
    with jax.named_scope("sample"):
        columns = Columns.of(model.config)
        token_ids = sample(logits, batch, state.sampler, greedy, step.others, columns)
        # In a greedy step no row counts its tokens. The index of a row that failed to sample must
        # still be in the vocabulary.
        indices = token_ids if greedy else jnp.maximum(token_ids, 0)
        sampler = state.sampler if greedy else record(state.sampler, batch, indices)
    last_token = _with_draws(state.last_token, batch.sample_slots, token_ids)
    logprobs = None
    if not greedy:
        with jax.named_scope("scores"):
            if decode_only:
                logprobs = draw_logprobs(logits, indices, batch, columns)
            else:
                draws = batch.sample_slots < null_slot
                scored = (model.logits, hidden, logits, indices, draws, batch)
                logprobs = position_logprobs(*scored, columns)
    counted = None if rows is None or state.expert_rows is None else state.expert_rows + rows
    state = replace(
        state,
        kv=[layer.pages for layer in kept if layer.pages] if groups is None else groups.pages,
        others=with_states(state.others, kept),
        last_token=last_token,
        sampler=sampler,
        expert_rows=counted,
    )
    output = StepOutput(token_ids=token_ids, logprobs=logprobs, expert_rows=counted)
    return state, replace(output, logits=logits, hidden=hidden) if keeps_logits else output


def choose_tokens(
    last_token: Int32[Array, " slots_plus_1"],
    sampler: SamplerState,
    logits: Float[Array, "R V"],
    batch: StepBatch[Array],
    columns: Columns,
) -> tuple[Int32[Array, " slots_plus_1"], SamplerState, StepOutput]:
    """Sample the next token of each row from the logits of a launch without a sampler.

    The result is the new `last_token`, the new `sampler`, and the sampled tokens.

    Args:
        last_token: the newest token of each slot, donated.
        sampler: the sampler state, donated.
        logits: the logits of each row's last token.
        batch: the inputs of the step, of which only the rows are read.
        columns: static, the division of the logits over devices.
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
    """Compute for each token of a step the log-probability of the next token (`position_logprobs`).

    Args:
        graphdef, treedef, leaves: the model, see `model_step`.
        output: the output of the step, with hidden states, logits and sampled tokens.
        null_slot: static, the number of the null slot.
        batch: the inputs of the step.
        implementation: static, the choice of kernels.
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
    """Compute the logits [count, V] after successive tokens of a step, which the host then scores.

    Args:
        graphdef, treedef, leaves: the model, see `model_step`.
        hidden: the hidden states of the step.
        start: index of the first token. It is reduced if fewer than `count` tokens follow.
        num_tokens: the number of rows of `hidden` without padding.
        count: static, the number of tokens.
        implementation: static, the choice of kernels.
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
    # On a GPU XLA compiles a scatter of a single entry to two kernel launches.
    return jnp.where(jnp.arange(last_token.shape[0]) == slots, token_ids, last_token)


def _states_of_step(
    states: Int32[Array, "3 R"] | None, done: Int32[Array, ""]
) -> Int32[Array, "3 R"] | None:
    # Only the first step of a launch starts from a snapshot.
    return None if states is None else states.at[0].set(jnp.where(done == 0, states[0], -1))


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
    """Run several decode steps in one launch, each with the tokens that the previous step sampled.

    A row is active until a token ends it or its logits are not finite. Inactive rows write no cell
    of the KV cache, and the launch ends when no row is active. Each step is equal to a
    `model_step`, so the number of steps per launch does not change results.

    Args:
        graphdef, treedef, leaves, state, options: see `model_step`.
        batch: the inputs of the first step, one token per row. most: static, the most steps.

    Returns:
        The new state and the output. `token_ids` is [most, R], defined for the steps in which a row
        was active. The arrays of `logprobs` have the same first axes.
    """
    layout = options.get("layout")
    state, page_table = with_new_pages(state, batch, layout)
    step = _traced_once(graphdef, treedef, decode_only=True, **options)
    null_slot = state.last_token.shape[0] - 1
    shapes = jax.eval_shape(step, leaves, state, batch, page_table=page_table)[1]
    none = jnp.full((most, *shapes.token_ids.shape), NO_TOKEN, jnp.int32)
    logprobs = jax.tree.map(partial(_zeros, most), shapes.logprobs)

    def take(carry: Launch) -> Launch:
        done, active, state, token_ids, logprobs = carry
        length = batch.kv_len + done
        now = replace(
            batch,
            tokens=jnp.where(done == 0, batch.tokens, NO_TOKEN),
            positions=jnp.where(active, batch.positions + done, 0),
            kv_len=jnp.where(active, length, 0),
            slots=jnp.where(active, batch.slots, null_slot),
            states=_states_of_step(batch.states, done),
            sample_slots=jnp.where(active, batch.sample_slots, null_slot),
        )
        state, output = step(leaves, state, now, page_table=page_table)
        is_stop = (output.token_ids[:, None] == batch.stop_token_ids).any(axis=1)
        is_last = is_stop & (length >= batch.min_length) | (length + 1 >= batch.stop_length)
        active &= (output.token_ids != NO_TOKEN) & ~is_last
        written = token_ids.at[done].set(output.token_ids)
        logprobs = jax.tree.map(partial(_with_step, done), logprobs, output.logprobs)
        return done + 1, active, state, written, logprobs

    def goes_on(carry: Launch) -> Bool[Array, ""]:
        done, active = carry[:2]
        return (done == 0) | ((done < batch.num_steps) & active.any())

    active = batch.slots != null_slot
    start = (jnp.int32(0), active, state, none, logprobs)
    _, _, state, token_ids, logprobs = lax.while_loop(goes_on, take, start)
    return state, StepOutput(token_ids, logprobs, expert_rows=state.expert_rows)


def _traced_once(
    graphdef: nnx.GraphDef[Decoder], treedef: Any, **options: Any
) -> Callable[..., tuple[DeviceState, StepOutput]]:
    # The loop reuses the trace that was made to find the shapes.

    return jax.jit(partial(_take_step, graphdef, treedef, **options), inline=True)


def _with_step(
    number: Int32[Array, ""], steps: Float[Array, "steps ..."], step: Float[Array, ...]
) -> Array:
    return lax.dynamic_update_slice_in_dim(steps, step[None], number, 0)


def _zeros(steps: int, leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros((steps, *leaf.shape), leaf.dtype)
