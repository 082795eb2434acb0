"""The oracle itself, against a loop over single numbers in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from tests.support.paged_cases import FP8, assert_close, paged_call


def by_hand(call) -> np.ndarray:
    """Compute softmax attention in float64, one query head and one position at a time."""
    q, k, v, table, starts, lengths = (np.asarray(a) for a in call.wide().ragged)
    options = {n: np.asarray(x) if x is not None else None for n, x in call.options.items()}
    out = np.zeros(q.shape)
    page_size, group = k.shape[2], q.shape[1] // k.shape[1]
    for row in range(len(lengths)):
        for token in range(starts[row], starts[row + 1]):
            at = lengths[row] - starts[row + 1] + token
            low = 0 if options["window"] is None else max(at - int(options["window"]) + 1, 0)
            where = [(table[row, p // page_size], p % page_size) for p in range(low, at + 1)]
            for head in range(q.shape[1] if where else 0):
                h = head // group
                keys = np.array([k[page, h, s] for page, s in where], np.float64)
                values = np.array([v[page, h, s] for page, s in where], np.float64)
                if options["k_scale"] is not None:
                    keys, values = keys * options["k_scale"][h], values * options["v_scale"][h]
                scale = options["scale"] if options["scale"] is not None else q.shape[2] ** -0.5
                logits = keys @ q[token, head].astype(np.float64) * scale
                if options["soft_cap"] is not None:
                    logits = options["soft_cap"] * np.tanh(logits / options["soft_cap"])
                weights = np.exp(logits)
                total = weights.sum()
                if options["sinks"] is not None:
                    total += np.exp(options["sinks"][head])
                out[token, head] = weights @ values / total
    return out


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"window": 5, "sinks": True, "head_dim": 16},
        {"soft_cap": 2.0, "scale": 0.7, "heads": 6},
        {"page_dtype": FP8, "scales": True, "shared": True},
    ],
)
def test_reference_is_attention(setup: dict) -> None:
    call = paged_call([(3, 40), (0, 0), (1, 33), (2, 2)], padding=2, **setup)
    actual = reference.ragged_paged_attention(call.ragged_arrays, call.attention_options)
    assert_close(actual, by_hand(call), jnp.float32)
    assert (np.asarray(actual)[-2:] == 0).all()


def test_decode_is_the_last_position() -> None:
    call = paged_call([(1, 20), (1, 0), (1, 47)])
    actual = reference.paged_decode_attention(call.decode_arrays, call.attention_options)
    assert_close(actual[::2], by_hand(call)[::2], jnp.float32)
    assert (np.asarray(actual)[1] == 0).all()
