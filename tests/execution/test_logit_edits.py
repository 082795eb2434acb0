"""Penalties, bias and exclusions against the oracle's, on rows that were loaded and drawn to."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.execution import sampler_state as state_of
from jaxserve.execution.logit_edits import edit_logits
from jaxserve.execution.sampling import sample
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable
from tests.execution.test_sampling import batch
from tests.support.oracle import edited_logits, kept_tokens
from tests.support.workloads import random_edits

VOCAB = 300
SLOTS = 3
LONGEST = 2500

load_slot = jax.jit(state_of.load_slot, donate_argnums=0)
record = jax.jit(state_of.record)
edit = jax.jit(edit_logits)


class Table:
    """A slot table and the device's state of it, filled as the runner fills them."""

    def __init__(self) -> None:
        self.slots = SlotTable(SLOTS, LONGEST, 16)
        self.state = state_of.make_sampler_state(SLOTS, VOCAB)
        # Rows are never clean.
        self.state = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(3), self.state)

    def admit(self, params: SamplingParams, prompt: list[int], output: list[int]) -> int:
        words = tuple(tuple(map(int, word.split())) for word in params.bad_words or ())
        request = Request(
            "r", np.array(prompt, np.int32), params, 0, (), LONGEST, bad_words_token_ids=words
        )
        known = np.array([*prompt, *output], np.int32)
        slot = self.slots.acquire(Sequence(request, 0, known))
        if self.slots.needs_load[slot]:
            for load in state_of.slot_loads(self.slots, slot, VOCAB):
                self.state = load_slot(self.state, load)
        return slot

    def batch(self, slots: list[int], params: list[SamplingParams]) -> Any:
        rows = batch(params, list(range(len(slots))), 5)
        where = np.array(slots, np.int32)
        changes = {
            "slots": where,
            "sample_slots": where,
            "penalties": self.slots.penalties[where],
            "features": self.slots.features[where],
            "min_length": np.zeros(len(slots), np.int32),
        }
        for name, value in changes.items():
            object.__setattr__(rows, name, value)
        return rows


def words_of(params: SamplingParams) -> list[list[int]]:
    return [[int(token) for token in word.split()] for word in params.bad_words or ()]


@pytest.mark.parametrize("seed", range(40))
def test_edits_equal_the_oracles(seed: int) -> None:
    rng = random.Random(seed)
    table = Table()
    asked, prompts, outputs, slots = [], [], [], []
    for _ in range(SLOTS):
        params = SamplingParams(**random_edits(rng, VOCAB))
        few = [*(params.logit_bias or {}), *(params.allowed_token_ids or ()), 7, 8]
        few += [token for word in words_of(params) for token in word]
        length = rng.choice([1, 5, 1023, 1024, 1030, 2300])
        prompts.append([rng.choice([*few, rng.randrange(VOCAB)]) for _ in range(length)])
        outputs.append([rng.choice(few) for _ in range(rng.choice([0, 1, 30]))])
        slots.append(table.admit(params, prompts[-1], outputs[-1]))
        asked.append(params)
    rows = table.batch(slots, asked)
    for _ in range(3):  # the tokens in flight, which the host does not know
        drawn = [rng.choice(outputs[row] + [5]) for row in range(SLOTS)]
        table.state = record(table.state, rows, np.array(drawn, np.int32))
        for row, token in enumerate(drawn):
            outputs[row].append(token)
    logits = np.random.default_rng(seed).normal(0, 2, (SLOTS, VOCAB)).astype(np.float32)
    found = np.asarray(edit(logits, rows, table.state))
    for row, params in enumerate(asked):
        want = edited_logits(
            logits[row].astype(np.float64), params, prompts[row], outputs[row], (), words_of(params)
        )
        np.testing.assert_allclose(found[row], want, rtol=1e-5, atol=1e-5)
        if not params.features:
            assert np.array_equal(found[row], logits[row])


def test_a_row_without_a_token_left_is_not_ok() -> None:
    table = Table()
    params = SamplingParams(temperature=0, allowed_token_ids=[9], bad_words=["9 9"])
    slots = [
        table.admit(params, [1], []),
        table.admit(params, [1], [9]),
        table.admit(params, [9], [9]),
    ]
    rows = table.batch(slots, [params] * SLOTS)
    logits = np.zeros((SLOTS, VOCAB), np.float32)
    assert jax.jit(sample)(logits, rows, table.state).tolist() == [9, NO_TOKEN, NO_TOKEN]
    # In a row that only computes its prompt, excluded tokens do not matter.
    object.__setattr__(rows, "sample_slots", np.full(SLOTS, SLOTS, np.int32))
    assert (jax.jit(sample)(logits, rows, table.state) != NO_TOKEN).all()


def test_draws_under_penalties_and_truncation_have_the_right_distribution() -> None:
    """A chi-square test of 20,000 draws whose logits every kind of edit has changed."""
    vocabulary, draws = VOCAB, 20_000
    params = SamplingParams(
        temperature=1.3,
        top_k=60,
        top_p=0.95,
        min_p=0.001,
        presence_penalty=0.8,
        frequency_penalty=-0.4,
        repetition_penalty=1.4,
        logit_bias={3: 2.5, 4: -3.0},
        bad_words=["5", "11 6"],
    )
    prompt, output = [1, 2, 3, 3], [2, 7, 7, 7, 11]
    table = Table()
    slot = table.admit(params, prompt, output)
    logits = np.random.default_rng(1).normal(0, 1, vocabulary).astype(np.float32)
    want = kept_tokens(
        edited_logits(logits.astype(np.float64), params, prompt, output, (), words_of(params)),
        params,
    )
    assert want[5] == want[6] == 0 and want[7] > 0
    want *= draws / want.sum()
    rows = batch([params] * draws, list(range(draws)), np.arange(draws) % 977)
    table_rows = table.batch([slot] * draws, [params] * draws)
    for name in ("slots", "sample_slots", "penalties", "min_length"):
        object.__setattr__(rows, name, getattr(table_rows, name))
    tokens = jax.jit(partial(sample))(
        np.broadcast_to(logits, (draws, vocabulary)), rows, table.state
    )
    assert np.all(tokens != NO_TOKEN)
    counts = np.bincount(np.asarray(tokens), minlength=vocabulary)
    assert np.all(counts[want == 0] == 0)
    kept = want > 0
    chi_square = (np.square(counts[kept] - want[kept]) / want[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 100.0])
@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_a_logit_beyond_float32_is_neither_excluded_nor_endless(
    penalty: float, temperature: float
) -> None:
    """A penalized logit that overflows stays the greatest or least number, and is drawn as such."""
    table = Table()
    params = SamplingParams(
        repetition_penalty=penalty, temperature=temperature, allowed_token_ids=[5, 6]
    )
    slots = [table.admit(params, [5], []) for _ in range(SLOTS)]
    rows = table.batch(slots, [params] * SLOTS)
    logits = np.zeros((SLOTS, VOCAB), np.float32)
    # One that grows, one that shrinks, and one that grows where all others are less.
    logits[:, 5], logits[:, 6] = [1e38, -1e38, -3e38], [1e30, -1e30, -3.3e38]
    found = np.asarray(edit(logits, rows, table.state))
    assert np.isfinite(found[:, [5, 6]]).all() and (found[:, 7] == -np.inf).all()
    tokens = jax.jit(sample)(logits, rows, table.state)
    assert np.all(tokens != NO_TOKEN)
    want = edited_logits(logits[0].astype(np.float64), params, [5], [])
    assert int(tokens[0]) == (6 if want[6] > want[5] else 5)
    assert set(np.asarray(tokens).tolist()) <= {5, 6}
