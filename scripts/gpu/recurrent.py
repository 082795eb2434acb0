"""Decodes of layers with a state per sequence: arrays, calls, and their part of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    StateRows,
    causal_conv,
    conv_recurrence,
)
from scripts.gpu import timing as gpu_timing
from scripts.gpu.cases import RecurrentCase, recurrent_cases
from scripts.gpu.kernel_checks import TOLERANCE, slowly, verdict
from scripts.gpu.setting import Item, Setting
from scripts.gpu.step_times import Size, time_step


def options_of(case: RecurrentCase) -> DeltaOptions | Mamba2Options:
    """Return the sizes of the recurrence of a case."""
    kinds = {"delta": DeltaOptions, "channels": ChannelDeltaOptions, "mamba2": Mamba2Options}
    return kinds[case.kind](*case.sizes)


def decode_rows(rows: int, places: int) -> StateRows:
    """Make rows of one token that continue from their own states. The last place is spare.

    Args:
        rows: number of rows.
        places: number of places of the states, at least one more than rows.
    """
    number = np.arange(rows, dtype=np.int32)
    zeros = np.zeros_like(number)
    parts = np.arange(rows + 1, dtype=np.int32), number, number, zeros, zeros
    return StateRows._make(map(jnp.asarray, (*parts, np.int32(places - 1))))


def mixed_rows(rows: int) -> tuple[StateRows, int]:
    """Make rows of one token of all kinds, and the number of places of their states.

    They go on from their own states, start from zeros, start from another place, or are padding.
    Some store their states at a second place. The last place is spare.
    """
    number = np.arange(rows, dtype=np.int32)
    kind, free = number % 4, rows + number
    source = np.choose(kind, [number, np.full_like(number, -1), free, number])
    target = np.where(kind == 3, -1, number)
    border = ((kind == 1) | (kind == 3)).astype(np.int32)
    parts = np.arange(rows + 1, dtype=np.int32), source, target, border, free
    places = 2 * rows + 1
    return StateRows._make(map(jnp.asarray, (*parts, np.int32(places - 1)))), places


def recurrent_arrays(case: RecurrentCase, places: int) -> tuple[tuple[jax.Array, ...], Any]:
    """Return random states of a case, and its other arrays. The states of the last place are 0."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(case.dtype)

    def draw(*shape: int, kind: Any = dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), kind)

    def states(*shape: int) -> jax.Array:
        return draw(places, *shape, kind=jnp.float32).at[-1].set(0)

    channels = case.sizes[0] if case.kind == "conv" else options_of(case).width
    conv = states(case.width - 1, channels)
    x = draw(case.rows, channels)
    weights = ConvWeights(draw(case.width, channels), draw(channels))
    if case.kind == "conv":
        return (conv,), (x, weights)
    options = options_of(case)
    parts = [draw(case.rows, *shape) for shape in options.gates]
    gates = ChannelGates(*parts) if case.kind == "channels" else parts[0]
    state = states(options.heads, options.inputs, options.outputs)
    constants = draw(*options.constants, kind=jnp.float32)
    return (conv, state), (x, weights, gates, constants)


def call_of(case: RecurrentCase, implementation: str, one_token: bool = True) -> Callable[..., Any]:
    """Return a decode as a function of its states, its other arrays and its rows.

    It returns the result and the new states.
    """
    options = {"one_token": one_token, "implementation": implementation}

    def call(states: tuple[jax.Array, ...], arrays: Any, rows: StateRows) -> Any:
        x, weights, *rest = arrays
        if case.kind == "conv":
            y, state = causal_conv(x, states[0], weights.weight, weights.bias, rows, **options)
            return y, (state,)
        gates, constants = rest
        return conv_recurrence(
            x, gates, (states[0], states[1]), weights, constants, rows, options_of(case), **options
        )

    return call


def recurrent_call(case: RecurrentCase, implementation: str) -> tuple[Any, Callable[..., Any]]:
    """Return shapes of the arguments of a decode with 8 places beside its rows, and the call."""
    places = case.rows + 8
    shapes = jax.eval_shape(
        lambda: (*recurrent_arrays(case, places), decode_rows(case.rows, places))
    )
    return shapes, call_of(case, implementation)


SMALL = (
    RecurrentCase("conv", "small", 6, (40,), 3),
    RecurrentCase("delta", "small", 6, (2, 4, 16, 16), 4, "float32"),
    RecurrentCase("channels", "small", 6, (2, 2, 16, 24)),
    RecurrentCase("mamba2", "small", 6, (1, 2, 16, 24)),
)
"""Cases of a rehearsal."""
TIMED = RecurrentCase("delta", "Qwen3.5-0.8B", 64, (16, 16, 128, 128))
LAYERS = 4
"""Layers whose states a timed program changes in turn, so that caches hold no state."""


def check_step(case: RecurrentCase, implementation: str) -> dict[str, Any]:
    """Compare a step with the specification, results and states."""
    rows, places = mixed_rows(case.rows)
    states, arrays = recurrent_arrays(case, places)
    actual = jax.jit(call_of(case, implementation))(states, arrays, rows)
    expected = slowly(call_of(case, "xla"), states, arrays, rows)
    return verdict(actual, expected, TOLERANCE[case.dtype])


def time_kernel(case: RecurrentCase, setting: Setting) -> dict[str, Any]:
    """Time the kernel of a step, and report the share of the bandwidth that its states take."""
    places, call = case.rows + 1, call_of(case, setting.kernel)
    made = [recurrent_arrays(case, places) for _ in range(LAYERS)]
    states, arrays = tuple(part[0] for part in made), made[0][1]
    rows, repeats = decode_rows(case.rows, places), 1 if setting.dry_run else gpu_timing.CHAIN
    last: list[Any] = [states]

    @partial(jax.jit, donate_argnums=0)
    def program(states: Any, arrays: Any, rows: StateRows) -> Any:
        layers = list(states)
        for nth in range(repeats * LAYERS):
            x, *rest = arrays
            y, layers[nth % LAYERS] = call(layers[nth % LAYERS], arrays, rows)
            # The next call follows this one, as in a model.
            arrays = (x + (y.ravel()[0] * 0).astype(x.dtype), *rest)
        return tuple(layers), arrays[0]

    def run() -> jax.Array:
        last[0], result = program(last[0], arrays, rows)
        return result

    spread = gpu_timing.measure(run, (), rounds=2 if setting.dry_run else 5)
    calls = repeats * LAYERS
    seconds = spread["median_s"] / calls
    moved = 2 * sum(array.nbytes for array in states[0]) * case.rows // places
    return {
        "value": round(seconds * 1e6, 2),
        "unit": "us",
        **setting.share(seconds, moved, 0),
        "bytes": moved,
        "TB/s": round(moved / seconds / 1e12, 3),
        "min_us": round(spread["min_s"] / calls * 1e6, 2),
        "max_us": round(spread["max_s"] / calls * 1e6, 2),
    }


def recurrent(setting: Setting) -> Iterator[Item]:
    """Check steps of layers with states, time a kernel, and time whole decodes."""
    dry = setting.dry_run
    for case in SMALL if dry else recurrent_cases():
        yield case.name, lambda c=case: check_step(c, setting.kernel)
    timed = SMALL[1] if dry else TIMED
    yield f"time of {timed.name}", lambda: time_kernel(timed, setting)
    for model in ("tiny hybrid",) if dry else ("Qwen3.5 0.8B", "Nemotron Nano 4B"):
        for rows in (1, 2) if dry else (1, 64):
            size = Size(model, rows, rows, 64 if dry else 1024)
            yield size.label, lambda s=size: time_step(setting, s)
