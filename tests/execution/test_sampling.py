"""The sampler against a float64 oracle that sorts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.scipy.stats import chi2

from jaxserve.execution import sampling as device
from jaxserve.execution.batch import StepBatch
from jaxserve.execution.random import uniform as row_uniform
from jaxserve.execution.sampler_state import make_sampler_state
from jaxserve.request import SamplingParams
from jaxserve.scheduling.slot_table import NO_TOKEN
from pallas_kernels.devices import DeviceLimits
from tests.support.oracle import kept_tokens, uniform

ROWS = 6

numbers = jax.jit(row_uniform)


def batch(settings: list[SamplingParams], seeds: list[int], position: Any) -> StepBatch:
    """Return a StepBatch with the fields that the sampler reads."""
    rows = len(settings)
    none = np.zeros(rows, np.int32)

    def column(name: str, dtype: Any) -> np.ndarray:
        return np.array([getattr(one, name) for one in settings], dtype)

    return StepBatch(
        **dict.fromkeys(("tokens", "positions", "row_of_token", "query_start"), none),
        **dict.fromkeys(("slots", "sample_index", "sample_slots"), none),
        **dict.fromkeys(("page_places", "page_ids"), none),
        kv_len=np.broadcast_to(np.asarray(position, np.int32), rows),
        temperature=column("temperature", np.float32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        top_k=column("top_k", np.int32),
        seed=np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32),
        min_length=column("min_tokens", np.int32),
        stop_token_ids=np.full((rows, 4), -1, np.int32),
        penalties=np.tile(np.array([1, 0, 0], np.float32), (rows, 1)),
        features=np.array([one.features for one in settings], np.int32),
        targets=none,
        stop_length=none,
        num_steps=np.array(1, np.int32),
    )


def as_for(platform: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for this machine, with the branches of another platform."""

    def call(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "target_device", lambda: DeviceLimits(platform, platform))
            if platform != "cpu":
                patch.setattr(device, "has_draw", lambda _: False)
            return function(*arguments)

    return jax.jit(call)


def draw(logits: Any, batch: StepBatch) -> Any:
    """Draw tokens of requests without edits of logits."""
    return device.sample(logits, batch, make_sampler_state(1, logits.shape[1]))


PLATFORMS = ("cpu", "gpu")
SAMPLE = {platform: as_for(platform, draw) for platform in PLATFORMS}
THRESHOLD = {platform: as_for(platform, device._threshold) for platform in PLATFORMS}
sample = SAMPLE["cpu"]


def check_thresholds(find: Callable[..., Any], dtype: type) -> None:
    """Check that thresholds are exact, for masses that are whole numbers and keys of every size."""
    rng, greatest = np.random.default_rng(3), np.iinfo(dtype).max
    for upper in (2, 32, greatest // 2, greatest):
        keys = rng.integers(0, upper, (64, 200), dtype)
        keys[:, :3] = [0, 1, greatest]
        mass = rng.integers(0, 5, keys.shape).astype(np.float32 if dtype is np.uint32 else float)
        target = np.ceil(rng.uniform(0, 1, 64) * mass.sum(axis=1)).astype(mass.dtype)
        with jax.enable_x64(dtype is np.uint64):
            found = np.asarray(find(keys, mass, target))
        reached = np.where(keys >= found[:, None], mass, 0).sum(axis=1)
        beyond = np.where(keys > found[:, None], mass, 0).sum(axis=1)
        assert np.all((beyond < target) & (target <= reached))
        assert found.dtype == dtype and np.all((keys == found[:, None]).any(axis=1))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_threshold_is_the_greatest_key_with_enough_at_or_above_it(
    platform: str, dtype: type
) -> None:
    check_thresholds(THRESHOLD[platform], dtype)


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([5, 128, 300]))
def test_argmax_is_numpys(seed: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (ROWS, vocabulary)).astype(np.float32)  # many equals
    assert np.array_equal(device.argmax(jnp.asarray(logits)), logits.argmax(axis=1))


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 5.0]),
    st.sampled_from([0, 1, 2, 17, 200, 10**6]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from(PLATFORMS),
)
def test_draws_come_from_the_oracles_set(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, platform: str
) -> None:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = rng.normal(0, 3, (1, 200)).astype(np.float32)
    rows = np.repeat(logits, ROWS, axis=0)
    asked = batch([params] * ROWS, list(range(ROWS)), np.arange(ROWS))
    tokens = SAMPLE[platform](rows, asked)
    assert np.all(tokens != NO_TOKEN)
    kept = kept_tokens(logits[0].astype(np.float64), params)
    # A set that ends within rounding of top_p may hold one token more or less.
    edge = kept_tokens(
        logits[0].astype(np.float64),
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=min(1.0, top_p * 1.0001), min_p=min_p
        ),
    )
    assert np.all((kept[tokens] > 0) | (edge[tokens] > 0))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_mixed_settings_equal_each_alone(platform: str) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (ROWS, 300)).astype(np.float32)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=0.5, top_k=50, top_p=0.9, min_p=0.01),
    ]
    seeds = [2**64 - 1, 1, 2**40, 0, 9, 7]
    together = SAMPLE[platform](logits, batch(params, seeds, 11))
    for row in range(ROWS):
        again = [params[row]] * ROWS
        alone = SAMPLE[platform](
            np.repeat(logits[row : row + 1], ROWS, 0), batch(again, [seeds[row]] * 6, 11)
        )
        assert np.all(alone == together[row])


DISTRIBUTIONS = {
    "free": SamplingParams(),
    "temperature": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(temperature=2.0, top_k=20),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(temperature=1.5, min_p=0.1),
    "all": SamplingParams(temperature=1.2, top_k=25, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("params", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_draws_have_the_right_distribution(params: SamplingParams) -> None:
    """A chi-square test along the seeds, and along the positions of three seeds."""
    vocabulary, draws = 40, 20_000
    logits = np.random.default_rng(1).normal(0, 1, vocabulary)
    want = kept_tokens(logits.astype(np.float32).astype(np.float64), params)
    want *= draws / want.sum()
    kept = want > 0
    rows = np.broadcast_to(logits.astype(np.float32), (draws, vocabulary))
    along_seeds = list(range(draws)), np.arange(draws) % 977
    along_positions = [([seed] * draws, np.arange(draws)) for seed in (0, 7, 2**63 + 5)]
    for seeds, positions in (along_seeds, *along_positions):
        tokens = sample(rows, batch([params] * draws, seeds, positions))
        counts = np.bincount(np.asarray(tokens), minlength=vocabulary)
        assert np.all(counts[~kept] == 0)
        chi_square = (np.square(counts[kept] - want[kept]) / want[kept]).sum()
        # Seeds are fixed: this passes always or never, and one choice of seeds in 400 fails.
        assert chi2.sf(chi_square, kept.sum() - 1) > 1e-4


@settings(max_examples=100)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_random_numbers_are_those_of_jax(seed: int, position: int) -> None:
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    assert float(numbers(words, np.array([position], np.int32))[0]) == uniform(seed, position)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_that_are_not_finite_are_reported(platform: str, fields: dict[str, Any]) -> None:
    logits = np.zeros((ROWS, 300), np.float32)
    logits[1, 7], logits[2, 7], logits[3, 7] = np.nan, np.inf, -np.inf
    logits[4], logits[5] = np.nan, -np.inf
    tokens = SAMPLE[platform](logits, batch([SamplingParams(**fields)] * ROWS, [0] * ROWS, 3))
    assert (np.asarray(tokens) != NO_TOKEN).tolist() == [True] + [False] * 5
    assert 0 <= tokens[0] < 300


def test_draw_never_leaves_the_kept_set() -> None:
    """The largest number below 1 must not fall off the end of the distribution."""
    probs = np.zeros((4, 300), np.float32)
    probs[:, 3] = [1.0, 0.1, 1e-30, 3e7]
    probs[:, 150] = [1.0, 1e-9, 1e-38, 1.0]
    for number in (0.0, 0.5, 1 - 2**-24):
        tokens = device._draw(jnp.asarray(probs), jnp.full(4, number, jnp.float32))
        assert np.all(np.isin(tokens, [3, 150]))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_likeliest_token_stays_however_little_top_p_asks_for(platform: str) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (ROWS, 300)).astype(np.float32)
    asked = batch([SamplingParams(top_p=0.5)] * ROWS, list(range(ROWS)), 3)
    least = np.finfo(np.float32).tiny
    top_p = np.array([0, least / 2**20, least / 2, least, 1e-30, -1], np.float32)
    tokens = SAMPLE[platform](logits, replace(asked, top_p=top_p))
    assert np.array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_small_temperature_overflows_nothing(platform: str) -> None:
    logits = np.random.default_rng(0).uniform(-1, 1, (ROWS, 300)).astype(np.float32)
    logits *= np.array([1e30, 1e33, 1e36, 1.6e38, 3.4e38, 3.4e38], np.float32)[:, None]
    params = [SamplingParams(temperature=1e-4), SamplingParams(temperature=1e-4, top_p=0.5)]
    tokens = SAMPLE[platform](logits, batch(params * (ROWS // 2), [7] * ROWS, 3))
    assert np.array_equal(tokens, logits.argmax(axis=1))
