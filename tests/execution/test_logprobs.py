"""Log-probabilities on the device against the oracle's, which sorts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.execution.columns import Columns
from jaxserve.execution.logprobs import (
    BLOCK,
    draw_logprobs,
    logprobs_of,
    position_logprobs,
    top_k,
)
from jaxserve.request import SamplerFeature, SamplingParams
from tests.execution.test_sampling import batch as batch_of
from tests.support.fast_compile import FAST
from tests.support.oracle import score as slow_score

# Sizes are many, and the code that XLA makes of them is not the question.
jit = partial(jax.jit, compiler_options=FAST)
best = jit(top_k, static_argnums=1)
FEATURES = [
    SamplerFeature.PROMPT_LOGPROBS | SamplerFeature.PROMPT_ALTERNATIVES,
    SamplerFeature.LOGPROBS | SamplerFeature.ALTERNATIVES,
]


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(20, 20), (128, 20), (300, 1), (300, 20), (3000, 20), (5, 5)]),
    st.sampled_from([1, 3, 1000]),
)
def test_top_k_is_exact_and_takes_equals_in_their_order(
    seed: int, shape: tuple[int, int], spread: int
) -> None:
    vocabulary, k = shape
    x = np.random.default_rng(seed).integers(-spread, spread, (4, vocabulary)).astype(np.float32)
    values, ids = best(x, k)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    assert np.array_equal(ids, order)
    assert np.array_equal(values, np.take_along_axis(x, order, axis=1))


@pytest.mark.parametrize("vocabulary", [7, 61, 300])
def test_scores_equal_the_oracles(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 4, (50, vocabulary)).astype(np.float32)
    tokens = rng.integers(0, vocabulary, 50).astype(np.int32)
    found = jit(logprobs_of)(logits, tokens)
    for row in range(50):
        want = slow_score(logits[row].astype(np.float64), int(tokens[row]), 20)
        assert found.rank[row] == want.rank
        assert np.asarray(found.top_ids[row]).tolist() == want.top_ids
        np.testing.assert_allclose(found.logprob[row], want.logprob, atol=2e-5)
        np.testing.assert_allclose(found.top_logprobs[row], want.top_logprobs, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_positions_are_scored_where_a_row_asks(num_tokens: int) -> None:
    """Two rows, of which the first has all tokens but one and scores its prompt.

    Both may score their sampled token.
    """
    rng = np.random.default_rng(num_tokens)
    weights = rng.normal(0, 1, (8, 61)).astype(np.float32)
    hidden = jnp.asarray(rng.normal(0, 1, (num_tokens, 8)).astype(np.float32))
    targets = rng.integers(0, 61, num_tokens).astype(np.int32)
    targets[rng.random(num_tokens) < 0.3] = -1
    targets[-1] = -1
    first = max(num_tokens - 2, 0)
    batch = replace(
        batch_of([SamplingParams()] * 2, [0, 0], 0),
        tokens=targets,
        positions=targets,
        features=np.array(FEATURES, np.int32),
        sample_index=jnp.array([first, num_tokens - 1], np.int32),
        targets=targets,
        row_of_token=np.array([0] * (num_tokens - 1) + [1], np.int32),
    )
    token_ids = jnp.array([3, 4])
    logits = jnp.zeros((2, 61), jnp.float32)
    positions = jit(
        lambda draws: position_logprobs(
            *(lambda x: x @ weights, hidden, logits, token_ids, draws, batch),
            columns=Columns(logits.shape[1]),
        )
    )
    for drawing in (False, True):
        found = positions(np.array([True, drawing]))
        wanted = targets.copy()
        if drawing:
            wanted[-1] = 4
        every = logprobs_of(hidden @ weights, jnp.maximum(wanted, 0))
        for one, other in zip(found, every, strict=True):
            np.testing.assert_allclose(one[wanted >= 0], other[wanted >= 0], atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 33, 4096])
def test_values_of_a_row_do_not_depend_on_the_rows_beside_it(num_rows: int) -> None:
    """All rows of a step against blocks of their own, compiled as an engine compiles them.

    Of 4,096 logarithms at once XLA rounds some differently.
    """
    rng = np.random.default_rng(num_rows)
    logits = rng.normal(0, 4, (num_rows, 300)).astype(np.float32)
    tokens = jnp.asarray(rng.integers(0, 300, num_rows).astype(np.int32))
    score, columns = jax.jit(logprobs_of), Columns(logits.shape[1])
    draw = jax.jit(lambda logits, batch: draw_logprobs(logits, tokens, batch, columns))
    found = draw(logits, batch_of([SamplingParams(logprobs=2)] * num_rows, [0] * num_rows, 0))
    for first in range(0, num_rows, BLOCK):
        rows = slice(first, first + BLOCK)
        for one, other in zip(found, score(logits[rows], tokens[rows]), strict=True):
            assert np.array_equal(one[rows], other)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_alternatives_are_computed_for_requests_alone(num_rows: int) -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 4, (num_rows, 300)), jnp.float32)
    tokens = jnp.arange(num_rows, dtype=jnp.int32)
    draw = jit(lambda batch: draw_logprobs(logits, tokens, batch, Columns(300)))

    def drawn(logprobs: int | None) -> list[np.ndarray]:
        rows = [SamplingParams(logprobs=logprobs)] + [SamplingParams()] * (num_rows - 1)
        return list(map(np.asarray, draw(batch_of(rows, [0] * num_rows, 0))))

    every, own, none = drawn(1), drawn(0), drawn(None)
    for column in (0, 1):
        assert np.array_equal(every[column], own[column]) and every[column].all()
        assert not none[column].any()
    assert every[2].any() and every[3].any()
    assert not any(part[column].any() for part in (own, none) for column in (2, 3))
