# pyright: reportUnknownMemberType=false
"""From logits to tokens: one program for any mix of settings, each row on its own.

A setting that a row does not use has a neutral value. Work that no row of the batch needs (random
draws, truncation) is skipped at run time, not compiled away. A row's draw depends on its logits,
its seed and the position of the token, and on nothing else: neither batch mates nor preemption
nor a restart change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from jaxserve.execution.batch import StepBatch, row_fields
from jaxserve.execution.columns import LANES, Columns, argmax, best, in_groups, is_finite
from jaxserve.execution.logit_edits import edit_logits
from jaxserve.execution.random import uniform
from jaxserve.execution.sampler_state import SamplerState
from jaxserve.execution.typed_jax import cond, fori_loop
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable
from pallas_kernels import DrawSettings, draw, greatest, has_draw, has_greatest
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Int32, UInt


def _ordered_bits(x: Float[Array, "*sizes"]) -> UInt[Array, "*sizes"]:
    """Return floats as unsigned integers of the same order."""
    bits = x.dtype.itemsize * 8
    unsigned, signed = jnp.dtype(f"uint{bits}"), jnp.dtype(f"int{bits}")
    raw = lax.bitcast_convert_type(x, unsigned)
    sign = jnp.array(1, unsigned) << (bits - 1)
    negative = lax.bitcast_convert_type(raw, signed) < 0
    return jnp.where(negative, ~raw, raw | sign)


def _threshold(
    keys: UInt[Array, "R V"], mass: Float[Array, "R V"], target: Float[Array, " R"]
) -> UInt[Array, " R"]:
    """Find each row's greatest key t with mass(keys >= t) >= target; exact, and without a sort.

    Built from its highest bits down, a few in every pass over the vocabulary.
    """
    bits = keys.dtype.itemsize * 8
    # On a GPU one reading of the keys serves 15 trials, and passes lie one after the other: a loop
    # would keep the step from being one graph. XLA on CPU takes five times as long that way.
    is_gpu = target_device().is_gpu
    width = 4 if is_gpu else 1

    def try_digits(step: Int[Array, ""], found: UInt[Array, " R"]) -> UInt[Array, " R"]:
        shift = jnp.asarray(bits - width * (step + 1)).astype(keys.dtype)
        # Behind this all passes are the same kernels, compiled once.
        found, shift = lax.optimization_barrier((found, shift))
        trials = [found | (jnp.array(digit, keys.dtype) << shift) for digit in range(1, 1 << width)]
        masses = tuple(jnp.where(keys >= trial[:, None], mass, 0) for trial in trials)
        zeros = (jnp.zeros((), mass.dtype),) * len(trials)
        sums = lax.reduce(masses, zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))
        digit = sum((reached >= target).astype(keys.dtype) for reached in sums)
        return found | digit << shift

    none = jnp.zeros(keys.shape[0], keys.dtype)
    return fori_loop(0, bits // width, try_digits, none, unroll=is_gpu)


def _truncated(
    probs: Float[Array, "R V"],
    keys: UInt[Array, "R V"],
    likeliest: UInt[Array, " R"],
    top_k: Int32[Array, " R"],
    top_p: Float[Array, " R"],
) -> Float[Array, "R V"]:
    """Zero all but the k most likely tokens of each row (equals of the k-th stay), and then all
    but the smallest set of likely ones whose share of the rest reaches top_p.

    The likeliest stays, whatever top_p is once it is a float32.
    """
    # XLA computes both branches of a condition that holds element-wise work and sums alone, as
    # thresholds are on a GPU, unless one branch is no constant and only returns what it got.
    none = lax.optimization_barrier(jnp.zeros(keys.shape[0], keys.dtype))

    def raised(
        least: UInt[Array, " R"],
        truncates: Bool[Array, " R"],
        measure: Callable[[Array], tuple[Array, Array]],
    ) -> UInt[Array, " R"]:
        """Raise the least key that stays, in rows that truncate; `measure`: mass and target."""

        def narrowed(least: UInt[Array, " R"]) -> UInt[Array, " R"]:
            mass, target = measure(jnp.where(keys >= least[:, None], probs, 0))
            # Never lower: rounding may find no share as large as top_p.
            return jnp.maximum(least, jnp.where(truncates, _threshold(keys, mass, target), 0))

        return cond(jnp.any(truncates), narrowed, lambda least: least, least)

    count, share = jnp.minimum(top_k, probs.shape[1]).astype(probs.dtype), top_p.astype(probs.dtype)
    least = raised(none, top_k > 0, lambda _: (jnp.ones_like(probs), count))
    least = raised(least, top_p < 1, lambda likely: (likely, share * likely.sum(axis=1)))
    return jnp.where(keys >= jnp.minimum(least, likeliest)[:, None], probs, 0)


def _draw(probs: Float[Array, "R V"], uniform: Float[Array, " R"]) -> Int32[Array, " R"]:
    """Find the token at which the cumulative mass passes uniform * total.

    Inverse transform sampling with one number a row, in two levels of sums.
    """
    groups = in_groups(probs, 0.0)
    ends = jnp.cumsum(groups.sum(axis=-1), axis=-1)
    # Below the total even if the product rounds up to it: past it there is no token to draw.
    target = jnp.minimum(uniform * ends[:, -1], jnp.nextafter(ends[:, -1], jnp.zeros_like(uniform)))
    is_before = ends <= target[:, None]
    # No token at all in a row of zeros or NaN: any of the vocabulary will do, it is not used.
    group = jnp.minimum(is_before.sum(axis=-1), groups.shape[1] - 1)
    before = jnp.where(is_before, ends, 0).max(axis=-1)
    inside = groups.at[jnp.arange(len(groups)), group].get(mode="clip")
    passed = jnp.cumsum(inside, axis=-1) <= (target - before)[:, None]
    # Rounding may leave the target at the group's end: then its last possible token is drawn.
    lanes = jnp.arange(LANES)
    last_possible = jnp.where(inside > 0, lanes, 0).max(axis=-1)
    lane = jnp.minimum(passed.sum(axis=-1), last_possible)
    return (group * LANES + lane).astype(jnp.int32)


def plain_draw(
    logits: Float[Array, "R V"],
    highest: Float[Array, " R"],
    greedy: Int32[Array, " R"],
    settings: DrawSettings,
) -> Int32[Array, " R"]:
    """Compute `pallas_kernels.draw` in plain JAX, which is its specification."""
    temperature, min_p, top_k, top_p, seed, position = settings
    warm = temperature > 0
    divisor = jnp.where(warm, temperature, 1).astype(logits.dtype)
    # The difference first: a quotient of large logits and a small temperature may overflow, and
    # would be rounded more coarsely than the differences that decide.
    below = logits - highest[:, None]
    probs = jnp.exp(below / divisor[:, None])
    # The likeliest token stays whatever exp(0) rounds to: a row must have something to draw.
    likely = (probs >= min_p[:, None].astype(probs.dtype)) | (below == 0)
    probs = jnp.where(likely, probs, 0)
    probs = _truncated(probs, _ordered_bits(logits), _ordered_bits(highest), top_k, top_p)
    number = uniform(seed, position).astype(probs.dtype)
    return jnp.where(warm, _draw(probs, number), greedy)


def _sampled(
    logits: Float[Array, "R V"],
    batch: StepBatch[Array],
    greedy: Int32[Array, " R"],
    highest: Float[Array, " R"],
) -> Int32[Array, " R"]:
    """Draw the tokens of all rows, for a step in which at least one row draws.

    Args:
        greedy, highest: each row's likeliest token and its logit.
    """
    settings = DrawSettings(
        batch.temperature, batch.min_p, batch.top_k, batch.top_p, batch.seed, batch.kv_len
    )
    run = draw if has_draw(logits) else plain_draw
    return run(logits, highest, greedy, settings)


def is_greedy(plan: LaunchPlan, slots: SlotTable) -> bool:
    """Return whether each row that draws takes its likeliest token, with no stop token to avoid."""
    rows = plan.slots[plan.samples]
    if slots.temperature[rows].any():
        return False
    return not (plan.lengths[plan.samples] < slots.min_length[rows]).any()


def sample(
    logits: Float[Array, "R V"],
    batch: StepBatch[Array],
    state: SamplerState,
    greedy_only: bool = False,
    implementation: str = "auto",
    columns: Columns | None = None,
) -> Int32[Array, " R"]:
    """Draw each row's next token.

    The order of the settings is vLLM's: what `edit_logits` does, temperature, min_p, top_k, top_p.

    Args:
        logits: float32 or float64.
        batch: the new token's position is `kv_len`.
        state: the sampler's state of the requests.
        greedy_only: static; `is_greedy` holds and no row uses a feature of the sampler.
        implementation: static; which kernels run, if any.
        columns: static; of logits that are divided over devices. None for one device.

    Returns:
        Token ids; NO_TOKEN where the row's logits were not all finite, or left it no token to draw.
    """
    if columns is not None and columns.axis is not None:
        return _sample_divided(logits, batch, state, greedy_only, implementation, columns)
    if greedy_only and has_greatest(logits, implementation):  # whose -1 is NO_TOKEN
        return greatest(logits, implementation=implementation)
    ok = is_finite(logits)
    if greedy_only:
        return jnp.where(ok, argmax(logits), NO_TOKEN)
    edits, draws = _uses(batch)
    # A branch that hands all logits through copies them: skip it when no row edits or draws.
    tokens, value = cond(
        edits | draws,
        lambda: _chosen(logits, batch, state, edits, draws),
        lambda: best(logits),
    )
    return _valid(tokens, value, ok, batch, state)


def _uses(batch: StepBatch[Array]) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """Return whether a row edits its logits, and whether one draws."""
    has_edits = batch.features & int(SamplerFeature.EDITS) != 0
    has_edits |= batch.kv_len < batch.min_length
    return jnp.any(has_edits), jnp.any(batch.temperature > 0)


def _chosen(
    logits: Float[Array, "R V"],
    batch: StepBatch[Array],
    state: SamplerState,
    edits: Bool[Array, ""],
    draws: Bool[Array, ""],
) -> tuple[Int32[Array, " R"], Float[Array, " R"]]:
    """Return each row's token, and the greatest of its logits once they are edited."""
    changed = cond(edits, lambda: edit_logits(logits, batch, state), lambda: logits)
    greedy, value = best(changed)
    drawn = cond(draws, lambda: _sampled(changed, batch, greedy, value), lambda: greedy)
    return drawn, value


def _valid(
    tokens: Int32[Array, " R"],
    value: Float[Array, " R"],
    ok: Bool[Array, " R"],
    batch: StepBatch[Array],
    state: SamplerState,
) -> Int32[Array, " R"]:
    """Return the tokens, but NO_TOKEN for rows that are not finite or have nothing to draw."""
    # A row in the middle of its tokens draws nothing, so that it needs no token to draw.
    null_slot = state.history.shape[0] - 1
    ok &= (value > -jnp.inf) | (batch.sample_slots == null_slot)
    return jnp.where(ok, tokens, NO_TOKEN)


def _sample_divided(
    logits: Float[Array, "R V"],
    batch: StepBatch[Array],
    state: SamplerState,
    greedy_only: bool,
    implementation: str,
    columns: Columns,
) -> Int32[Array, " R"]:
    """Draw where each device has a part of every row: whole rows only where a row needs them."""
    tokens, value, ok = columns.greatest(logits, implementation)
    if greedy_only:
        return jnp.where(ok, tokens, NO_TOKEN)
    edits, draws = _uses(batch)

    def choose(rows: Array, fields: dict[str, Array]) -> tuple[Array, Array]:
        return _chosen(rows, replace(batch, **fields), state, edits, draws)

    tokens, value = cond(
        edits | draws,
        lambda: columns.by_rows(choose, logits, row_fields(batch)),
        lambda: (tokens, value),
    )
    return _valid(tokens, value, ok, batch, state)
