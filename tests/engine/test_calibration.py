"""The simulator's measurements: every launch of a real engine is timed, and told apart by kind."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.start.loaded import Loaded
from scripts.bench.prefix import loss, turns_of
from scripts.simulate import calibrate as sim_calibrate
from scripts.simulate import fits as sim_fits
from scripts.simulate.calibrate import Calibration, LaunchLog
from scripts.simulate.client import add_request, alike
from scripts.simulate.fits import WOKEN_SECONDS, Line, Measured
from scripts.simulate.jobs import make_jobs


@pytest.fixture
def alone(loaded: Loaded) -> Measured:
    """A table in which every step takes a millisecond."""
    names = [str(bucket) for bucket in loaded.runner.buckets]
    base, none, nothing = Line(1e3, 0.0), dict.fromkeys(names, 0.0), Line(0.0, 0.0)
    each = dict.fromkeys(names, base), none, none, dict.fromkeys(names, nothing)
    return Measured({}, {}, *each)


def test_each_launch_is_timed_once(loaded: Loaded, alone: Measured) -> None:
    engine, alive = Engine(loaded), len(jax.live_arrays())
    log = LaunchLog(engine)
    tokens: list[int] = []
    for prompt in (40, 3):
        # Long enough for a pause: nothing is in flight in between.
        time.sleep(3 * WOKEN_SECONDS)
        add_request(engine, f"{prompt}", [7] * prompt, 6, lambda d: tokens.extend(d.token_ids))
        while engine.has_work:
            engine.step()
    # What was read is freed within the loop, as it is without a log.
    assert len(jax.live_arrays()) == alive
    log.close()
    samples = log.samples(alone)
    assert len(tokens) == 12
    counts = {name: len(found) for name, found in samples.found.items()}
    # Prompts of 40 tokens and of 3 take two chunks of at most 32 and one.
    assert counts["tokens, woken"] == 2 and counts.get("tokens", 0) == 1
    assert counts["before, woken"] == counts["call, woken"] == 2
    launches = counts["tokens"] + counts["tokens, woken"] + counts["decode"]
    assert counts["before"] + counts["before, woken"] == counts["after"] == launches
    assert counts["call"] == counts["before"]
    assert (counts["after, tokens"], counts["after, decode"]) == (3, counts["decode"])
    of_buckets = {name.split(", woken")[0] for name in counts} & alone.base_us.keys()
    assert sum(counts[name] + counts.get(f"{name}, woken", 0) for name in of_buckets) == launches
    assert sum(amount for amount, _, _ in samples.found["after"]) == 12
    everything = [one for each in samples.found.values() for one in each]
    assert all(0 <= least <= most for _, least, most in everything)
    assert sum(most > 0 for _, _, most in everything) > 0.9 * len(everything)
    add_request(engine, "later", [7], 2, lambda d: tokens.extend(d.token_ids))
    while engine.has_work:
        engine.step()
    assert {name: len(found) for name, found in samples.found.items()} == counts


def test_a_calibrated_table_prices_every_part_of_the_loop(
    loaded: Loaded, alone: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_calibrate, "MOST_OUTPUT", 8)
    monkeypatch.setattr(sim_fits, "LEAST_OF_LINE", 1)
    calibration = Calibration(loaded, alone)
    times = calibration.times(calibration.serve(0.4))
    assert set(times.lines) >= {
        "tokens, woken",
        "decode",
        "before",
        "call",
        "after",
        "request, woken",
    }
    assert all(min(map(min, line.spreads)) > 0 for line in times.lines.values())
    assert times.waited and all(0 <= share <= 1 for share in times.waited.values())
    assert times.base_us == alone.base_us and isinstance(times.lines["after"], Line)
    assert "submit" not in vars(loaded.runner)


def test_rounds_of_the_same_load_tell_what_the_near_ones_hardly_met(
    loaded: Loaded, alone: Measured
) -> None:
    jobs = make_jobs("azure-conv", 12, scale=64, rate=100.0, max_model_len=32, vocabulary=50)
    calibration = Calibration(loaded, alone)
    rounds = [calibration.serve_like(jobs) for _ in range(6)]
    near, all_ = calibration.times(rounds[0]), calibration.times(rounds[0], among=rounds)
    assert set(near.lines) < set(all_.lines)
    assert calibration.times(*rounds).lines == calibration.times(*rounds, among=rounds).lines


def test_a_load_is_timed_by_others_like_its_requests(loaded: Loaded, alone: Measured) -> None:
    jobs = make_jobs("azure-conv", 12, scale=64, rate=100.0, max_model_len=32, vocabulary=50)
    samples = Calibration(loaded, alone).serve_like(jobs).samples(alone)
    asked = [*samples.found.get("request", []), *samples.found["request, woken"]]
    assert len(asked) == 12
    assert {length for length, _, _ in asked} <= {len(j.request.prompt_token_ids) for j in jobs}
    outputs = [one.output for one in jobs]
    drawn = sum(amount for amount, _, _ in samples.found["after"])
    assert 12 * min(outputs) <= drawn <= 12 * max(outputs)
    assert "step" not in vars(loaded.runner) and "submit" not in vars(loaded.runner)


def test_a_load_is_timed_while_it_is_served(loaded: Loaded, alone: Measured) -> None:
    jobs = make_jobs("azure-conv", 12, scale=64, rate=100.0, max_model_len=32, vocabulary=50)
    records, found = Calibration(loaded, alone).serve_timed(jobs)
    assert [len(one.token_times) for one in records] == [job.output for job in jobs]
    assert [one.arrival for one in records] == [job.arrival for job in jobs]
    samples = found.samples(alone)
    drawn = sum(amount for amount, _, _ in samples.found["after"])
    assert drawn == sum(job.output for job in jobs)


def test_requests_like_others_are_not_the_same() -> None:
    jobs = make_jobs("azure-conv", 60, rate=9.0, max_model_len=64)
    others = alike(jobs, np.random.default_rng(1))
    assert others[0].arrival == 0.0 and others[-1].arrival == pytest.approx(jobs[-1].arrival)
    assert [one.arrival for one in others] != [one.arrival for one in jobs]
    lengths = {(len(one.request.prompt_token_ids), one.output) for one in jobs}
    drawn = [(len(one.request.prompt_token_ids), one.output) for one in others]
    assert set(drawn) <= lengths
    assert drawn != [(len(one.request.prompt_token_ids), one.output) for one in jobs]


@pytest.mark.parametrize("caching", [True, False])
def test_a_serving_is_timed_turn_by_turn(loaded: Loaded, caching: bool) -> None:
    limits = loaded.limits
    lengths = {"max_model_len": limits.max_model_len, "vocabulary": limits.vocab_size}
    jobs = make_jobs("azure-conv", 3, scale=16, **lengths)
    assert all(wall > 0 for wall, _ in turns_of(loaded, jobs, caching))
    if caching:
        with pytest.raises(AssertionError, match="was found"):
            list(turns_of(loaded, jobs[:1] * 5, caching))
    else:
        list(turns_of(loaded, jobs[:1] * 5, caching))


def test_what_a_pair_shows_is_the_share_of_both() -> None:
    off = np.full(200, 1.0)
    on = off * 1.25
    on[:8], off[8:16] = 9.0, 9.0  # something else took the machine
    found = loss(on, off)
    assert found["pct"] == pytest.approx(20)
    assert found["standard_error_pct"] < 1e-9 < abs(found["of_all_pct"] - 20)
    noisy = loss(on * np.random.default_rng(1).uniform(0.9, 1.1, 200), off)
    assert abs(noisy["pct"] - 20) < 4 * noisy["standard_error_pct"] < 4
