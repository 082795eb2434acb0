"""Attention over positions that are dealt to several devices, merged, against the specification."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    AttentionOptions,
    PartPositions,
    attention_of_part,
    merge_parts,
    reference,
)
from tests.support.fast_compile import FAST
from tests.support.paged_cases import FP8, PagedCall, assert_close, paged_call, with_keywords

ROWS = [(3, 150), (1, 37), (0, 0), (20, 33), (1, 1), (9, 9)]


def attend(arrays, first, sinks, *, stride: int, **options) -> jax.Array:
    """Deal the positions of every page to `stride` devices, attend on each, and merge."""
    q, *pages, table, starts, lengths = arrays
    parts = []
    for device in range(stride):
        own = [part[:, :, device::stride] for part in pages]
        given = {
            name: value[:, :, device::stride] if getattr(value, "ndim", 0) == 3 else value
            for name, value in options.items()
        }
        positions = PartPositions(first + device, stride)
        described = AttentionOptions(**given)
        parts.append(
            attention_of_part(q, own[0], own[1], table, starts, lengths, positions, described)
        )
    return merge_parts(jnp.stack(parts), sinks)


STATIC = ("stride", "scale", "window", "soft_cap")
COMPILED = jax.jit(attend, static_argnames=STATIC)
COMPILED_QUICKLY = jax.jit(attend, static_argnames=STATIC, compiler_options=FAST)


def merged(call: PagedCall, stride: int, compiled: Any = COMPILED) -> jax.Array:
    options = dict(call.options)
    sinks = options.pop("sinks")
    return compiled(call.ragged, np.int32(0), sinks, stride=stride, **options)


@pytest.mark.parametrize(
    ("stride", "setup"),
    [
        (2, {"window": 5, "sinks": True}),
        (4, {"soft_cap": 2.0, "scale": 0.7, "heads": 6, "shared": True}),
        (2, {"page_dtype": FP8, "scales": True}),
        (2, {"page_dtype": jnp.int8, "page_size": 4}),
    ],
)
def test_parts_make_the_whole(stride: int, setup: dict) -> None:
    call = paged_call(ROWS, padding=2, head_dim=16, **setup)
    static = {name: call.options[name] for name in STATIC[1:]}
    arrays = {name: value for name, value in call.options.items() if name not in static}
    specification = with_keywords(reference.ragged_paged_attention)
    want = jax.jit(partial(specification, **static), compiler_options=FAST)(*call.ragged, **arrays)
    assert_close(merged(call, stride, COMPILED_QUICKLY), want, jnp.float32)


def test_a_query_has_one_result_whatever_is_beside_it() -> None:
    """The last of 20 queries in a chunk, and the same alone, with and without other rows."""
    call = paged_call(ROWS, head_dim=16)
    together, last = merged(call, 2), 3 + 1 + 20 - 1
    for rows in ([3], [1, 3, 5]):
        picked = np.array(rows)
        ends = np.asarray(call.query_start)[picked + 1] - 1
        alone = PagedCall(
            jnp.asarray(np.asarray(call.q)[ends]),
            call.k_pages,
            call.v_pages,
            jnp.asarray(np.asarray(call.page_table)[picked]),
            jnp.asarray(np.arange(len(rows) + 1, dtype=np.int32)),
            jnp.asarray(np.asarray(call.kv_len)[picked]),
            call.options,
        )
        found = merged(alone, 2)[rows.index(3)]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(together[last]))


def test_a_row_that_is_not_finite_leaves_others_alone() -> None:
    call = paged_call(ROWS, head_dim=16)
    want = np.asarray(merged(call, 2))
    values = np.array(call.v_pages)
    values[np.asarray(call.page_table)[3, 0]] = np.nan
    call.v_pages = jnp.asarray(values)
    found = np.asarray(merged(call, 2))
    np.testing.assert_array_equal(found[:4], want[:4])
    np.testing.assert_array_equal(found[24:], want[24:])
    assert np.isnan(found[4:24]).all()
