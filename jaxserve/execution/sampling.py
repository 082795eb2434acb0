# pyright: reportUnknownMemberType=false
"""Sampling: tokens from logits, in one program for any mix of settings.

A setting that a row does not use has a neutral value. Work that no row of the batch needs (random
numbers, truncation) is skipped at run time. The sampled token of a row depends only on its logits,
its seed and the position of the token. Other rows, preemption and restarts do not change it.

On a CPU the kernel `pallas_kernels/cpu/draw.py` replaces `plain_draw`, and `engine/draw_scores.py`
applies the same settings on the host for processed log-probabilities.
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
    # Unsigned integers with the same order as the floats.
    bits = x.dtype.itemsize * 8
    unsigned, signed = jnp.dtype(f"uint{bits}"), jnp.dtype(f"int{bits}")
    raw = lax.bitcast_convert_type(x, unsigned)
    sign = jnp.array(1, unsigned) << (bits - 1)
    negative = lax.bitcast_convert_type(raw, signed) < 0
    return jnp.where(negative, ~raw, raw | sign)


def _threshold(
    keys: UInt[Array, "R V"], mass: Float[Array, "R V"], target: Float[Array, " R"]
) -> UInt[Array, " R"]:
    """Return for each row the greatest key t such that tokens with keys >= t have the target mass.

    Keys are unsigned integers in the order of the logits. The result is exact and needs no sort:
    the bits of t are found from the highest to the lowest, a few in each pass over the vocabulary.
    """
    bits = keys.dtype.itemsize * 8
    # On a GPU one read of the keys serves 15 trials, and the passes are unrolled, because a loop
    # would prevent the step from being one graph. This takes five times as long on CPU.
    is_gpu = target_device().is_gpu
    width = 4 if is_gpu else 1

    def try_digits(step: Int[Array, ""], prefix: UInt[Array, " R"]) -> UInt[Array, " R"]:
        shift = jnp.asarray(bits - width * (step + 1)).astype(keys.dtype)
        # The barrier makes the kernels of all passes equal, so that they are compiled once.
        prefix, shift = lax.optimization_barrier((prefix, shift))
        trials = [
            prefix | (jnp.array(digit, keys.dtype) << shift) for digit in range(1, 1 << width)
        ]
        masses = tuple(jnp.where(keys >= trial[:, None], mass, 0) for trial in trials)
        zeros = (jnp.zeros((), mass.dtype),) * len(trials)
        sums = lax.reduce(masses, zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))
        digit = sum((reached >= target).astype(keys.dtype) for reached in sums)
        return prefix | digit << shift

    none = jnp.zeros(keys.shape[0], keys.dtype)
    return fori_loop(0, bits // width, try_digits, none, unroll=is_gpu)


def _truncated(
    probs: Float[Array, "R V"],
    keys: UInt[Array, "R V"],
    likeliest: UInt[Array, " R"],
    top_k: Int32[Array, " R"],
    top_p: Float[Array, " R"],
) -> Float[Array, "R V"]:
    """Apply top_k and top_p: return the probabilities with zeros for excluded tokens.

    top_k keeps the k most likely tokens of each row and all tokens equal to the k-th. top_p then
    keeps the smallest set of most likely tokens whose share of the remaining mass reaches top_p.
    The most likely token always stays. `keys` are unsigned integers in the order of the logits, and
    `likeliest` is the greatest key of each row.
    """
    # XLA computes both branches of a condition that contains only element-wise work and sums, such
    # as thresholds on a GPU, unless one branch returns its operand and the operand is no constant.
    none = lax.optimization_barrier(jnp.zeros(keys.shape[0], keys.dtype))

    def raised(
        least: UInt[Array, " R"],
        truncates: Bool[Array, " R"],
        measure: Callable[[Array], tuple[Array, Array]],
    ) -> UInt[Array, " R"]:
        """Return `least` after truncation: the key at which the kept tokens reach the target mass.

        `measure` maps the kept probabilities to the mass of each token and each row's target.
        """

        def narrowed(least: UInt[Array, " R"]) -> UInt[Array, " R"]:
            mass, target = measure(jnp.where(keys >= least[:, None], probs, 0))
            # Never lower than before: because of rounding, no share may reach top_p.
            return jnp.maximum(least, jnp.where(truncates, _threshold(keys, mass, target), 0))

        return cond(jnp.any(truncates), narrowed, lambda least: least, least)

    count, share = jnp.minimum(top_k, probs.shape[1]).astype(probs.dtype), top_p.astype(probs.dtype)
    least = raised(none, top_k > 0, lambda _: (jnp.ones_like(probs), count))
    least = raised(least, top_p < 1, lambda likely: (likely, share * likely.sum(axis=1)))
    return jnp.where(keys >= jnp.minimum(least, likeliest)[:, None], probs, 0)


def _draw(probs: Float[Array, "R V"], uniform: Float[Array, " R"]) -> Int32[Array, " R"]:
    """Return for each row the first token whose cumulative mass exceeds uniform * total mass.

    This is inverse transform sampling with one number in [0, 1) per row, in two levels of sums.
    """
    groups = in_groups(probs, 0.0)
    ends = jnp.cumsum(groups.sum(axis=-1), axis=-1)
    # Less than the total even if the product rounds up: there is no token beyond the total.
    target = jnp.minimum(uniform * ends[:, -1], jnp.nextafter(ends[:, -1], jnp.zeros_like(uniform)))
    is_before = ends <= target[:, None]
    # A row of zeros or NaN has no such token. The result of such a row is not used.
    group = jnp.minimum(is_before.sum(axis=-1), groups.shape[1] - 1)
    before = jnp.where(is_before, ends, 0).max(axis=-1)
    inside = groups.at[jnp.arange(len(groups)), group].get(mode="clip")
    passed = jnp.cumsum(inside, axis=-1) <= (target - before)[:, None]
    # Because of rounding the target may be at the group's end: use its last possible token.
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
    """Sample one token per row in plain JAX, with temperature, min_p, top_k and top_p.

    This is the specification of the kernel `pallas_kernels.draw`.

    Args:
        logits: the logits of each row, -inf for excluded tokens.
        highest: each row's greatest logit.
        greedy: each row's most likely token, the result of rows with temperature 0.
        settings: the settings of each row, with its threefry key and the new token's position.
    """
    warm = settings.temperature > 0
    probs = kept_probabilities(logits, highest, settings, warm)
    number = uniform(settings.seed, settings.position).astype(probs.dtype)
    return jnp.where(warm, _draw(probs, number), greedy)


def kept_probabilities(
    logits: Float[Array, "R V"],
    highest: Float[Array, " R"],
    settings: DrawSettings,
    warm: Bool[Array, " R"],
) -> Float[Array, "R V"]:
    """Return the probability of each token relative to the likeliest one, 0 if it is excluded.

    Temperature, min_p, top_k and top_p are applied.

    Args:
        logits: the logits of each row, -inf for excluded tokens.
        highest: each row's greatest logit.
        settings: the settings of each row, of which seed and position are not read.
        warm: whether each row's temperature applies. Otherwise it has the effect of 1.
    """
    temperature, min_p, top_k, top_p, _, _ = settings
    divisor = jnp.where(warm, temperature, 1).astype(logits.dtype)
    # Subtract first: the quotient of a large logit and a small temperature may overflow, and is
    # rounded more coarsely than the difference.
    below = logits - highest[:, None]
    probs = jnp.exp(below / divisor[:, None])
    # The most likely token always stays, independent of the rounding of exp(0).
    likely = (probs >= min_p[:, None].astype(probs.dtype)) | (below == 0)
    probs = jnp.where(likely, probs, 0)
    return _truncated(probs, _ordered_bits(logits), _ordered_bits(highest), top_k, top_p)


def _sampled(
    logits: Float[Array, "R V"],
    batch: StepBatch[Array],
    greedy: Int32[Array, " R"],
    highest: Float[Array, " R"],
) -> Int32[Array, " R"]:
    # At least one row of the step is not greedy. `highest` is the logit of the token `greedy`.
    settings = DrawSettings(
        batch.temperature, batch.min_p, batch.top_k, batch.top_p, batch.seed, batch.kv_len
    )
    run = draw if has_draw(logits) else plain_draw
    return run(logits, highest, greedy, settings)


def is_greedy(plan: LaunchPlan, slots: SlotTable) -> bool:
    """Return whether all sampling rows have temperature 0 and have reached their min_tokens."""
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
    """Return the next token of each row, int32[R].

    The settings are applied in vLLM's order: `edit_logits`, temperature, min_p, top_k, top_p.

    Args:
        logits: the logits in float32 or float64.
        batch: the inputs of the step. The new token's position is `kv_len`.
        state: the sampler's state.
        greedy_only: static, whether `is_greedy` holds and no row uses a feature of the sampler.
        implementation: static, the choice of kernels.
        columns: static, the division of the logits over devices. None for one device.

    Returns:
        Token ids. NO_TOKEN for rows with logits that are not finite, and for sampling rows in which
        all tokens are excluded.
    """
    if columns is not None and columns.axis is not None:
        return _sample_divided(logits, batch, state, greedy_only, implementation, columns)
    if greedy_only and has_greatest(logits, implementation):  # -1 is NO_TOKEN
        return greatest(logits, implementation=implementation)
    ok = is_finite(logits)
    if greedy_only:
        return jnp.where(ok, argmax(logits), NO_TOKEN)
    edits, draws = _uses(batch)
    # A branch that returns all logits copies them, so it is skipped if no row edits or samples.
    tokens, value = cond(
        edits | draws,
        lambda: _chosen(logits, batch, state, edits, draws),
        lambda: best(logits),
    )
    return _valid(tokens, value, ok, batch, state)


def _uses(batch: StepBatch[Array]) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
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
    # Each row's token, and the greatest of its edited logits.
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
    # NO_TOKEN replaces the tokens of rows that are not finite, or have no allowed token.
    # A row inside its prompt does not sample, so it needs no allowed token.
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
    """Return the next token of each row (see `sample`) from logits with sharded columns.

    Devices exchange whole rows of logits only if a row has edits or a temperature above 0.
    """

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
