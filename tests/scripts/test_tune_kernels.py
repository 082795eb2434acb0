"""The sweep of block sizes: the order of its trials, its end, and the table that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.devices import find_card
from pallas_kernels.gpu import tuning
from scripts.gpu import tune_kernels
from scripts.gpu.tune_kernels import NothingRan, sweep_one

H200 = find_card("NVIDIA H200").limits
KEY = {"op": "decode", "dtype": "bfloat16", "head_dim": 128}


def program(turns: int) -> Callable[[jax.Array], jax.Array]:
    """Return a program that takes longer the more turns it has, and does not compile below 0."""

    def run(x: jax.Array) -> jax.Array:
        if turns < 0:
            raise ValueError
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y), x)

    return jax.jit(run)


X = (jnp.ones((200, 200)),)


def test_the_fastest_that_runs_is_found() -> None:
    found = sweep_one([-1, 60, 2, 40, -2], program, X, 60.0)
    assert (found.best, found.tried) == (2, 5) and found.seconds > 0
    assert found.failed == {"ValueError: without a word": 2}


def test_why_nothing_ran_is_said() -> None:
    with pytest.raises(NothingRan, match="none of 3 candidates ran: 3 times ValueError: without"):
        sweep_one([-1, -2, -3], program, X, 60.0)


def test_what_was_found_until_time_is_over_is_kept() -> None:
    configs = [5, *range(100, 100 + 2 * tune_kernels.WORKERS)]
    found = sweep_one(configs, program, X, 1e-9)
    assert found.tried == tune_kernels.WORKERS < len(configs) and found.best == 5


@pytest.mark.parametrize("op", tune_kernels.OPERATIONS)
def test_the_likeliest_come_first(op: str) -> None:
    case = tune_kernels.case_of(op, "bfloat16", 128, 64, 64, 64)
    configs = tune_kernels.ordered(op, case)
    base = tuning.defaults(tuning.CONFIGS[op], case)
    distances = [len(tune_kernels.changes(config, base)) for config in configs]
    assert configs[0] == base and distances == sorted(distances)
    assert set(configs) == {base, *tune_kernels.candidates(op, case)}


def test_every_bucket_is_an_item_of_its_own() -> None:
    found = list(tune_kernels.targets(("bfloat16", "float8_e4m3fn"), (128, 64, 256)))
    assert len({target.name for target in found}) == len(found) == 51
    first = [target.up_to for target in found if target.name.startswith("decode bfloat16 h128")]
    assert first == [1, 8, 64, None]


def test_buckets_are_merged_one_by_one_and_all_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    for up_to, warps in ((None, 1), (64, 2), (8, 4), (64, 8)):
        entry = {**KEY, "up_to": up_to, "config": {"num_warps": warps}}
        tune_kernels.merge(H200, "2026-01-31", [entry])
    for rows, warps in ((8, 4), (9, 8), (65, 1)):
        case = tune_kernels.case_of("decode", "bfloat16", 128, rows, rows, 64)
        assert tuning.lookup(tuning.DecodeConfig, case).num_warps == warps
    entries = json.loads((tmp_path / "9.0/h200.json").read_text())["entries"]
    assert [entry["up_to"] for entry in entries] == [8, 64, None]
    assert not list(tmp_path.rglob("*.part"))
