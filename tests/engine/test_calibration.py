"""The simulator's measurements: every launch of a real engine is timed, and told apart by kind."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.start.loaded import Loaded
from scripts.bench.prefix import loss, turns_of
from scripts.simulate import fits as sim_fits
from scripts.simulate.fits import WOKEN_SECONDS, Line, Measured
from scripts.simulate.jobs import Job, make_jobs
from scripts.simulate.launches import LaunchLog, add_request
from scripts.simulate.measure import in_the_loop, serve_timed


@pytest.fixture
def alone(loaded: Loaded) -> Measured:
    """Return a table in which every step takes a millisecond."""
    names = [str(bucket) for bucket in loaded.runner.buckets]
    base, none, nothing = Line(1e3, 0.0), dict.fromkeys(names, 0.0), Line(0.0, 0.0)
    each = dict.fromkeys(names, base), none, none, dict.fromkeys(names, nothing)
    return Measured(*each)


def test_each_launch_is_timed_once(loaded: Loaded, alone: Measured) -> None:
    engine, alive = Engine(loaded), len(jax.live_arrays())
    log = LaunchLog(engine)
    tokens: list[int] = []
    for prompt in (40, 3):
        # Long enough for a pause: no step is in flight in between.
        time.sleep(3 * WOKEN_SECONDS)
        add_request(engine, f"{prompt}", [7] * prompt, 6, lambda d: tokens.extend(d.token_ids))
        while engine.has_work:
            engine.step()
    # The tokens that were read are freed within the loop, as they are without a log.
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


def some_jobs() -> list[Job]:
    return make_jobs("azure-conv", 12, scale=64, rate=100.0, max_model_len=32, vocabulary=50)


def test_a_table_of_the_loop_prices_every_part_of_it(
    loaded: Loaded, alone: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_fits, "LEAST_OF_LINE", 1)
    times = in_the_loop(serve_timed(loaded, some_jobs(), alone))
    names = {name.partition(",")[0] for name in times.lines}
    assert names >= {"tokens", "decode", "before", "call", "after", "request"}
    assert all(min(map(min, line.spreads)) > 0 for line in times.lines.values())
    assert times.waited and all(0 <= share <= 1 for share in times.waited.values())
    assert times.base_us == alone.base_us and isinstance(times.lines["after"], Line)
    assert "step" not in vars(loaded.runner) and "submit" not in vars(loaded.runner)


def test_runs_of_the_same_load_give_the_times_that_are_rare_in_one(
    loaded: Loaded, alone: Measured
) -> None:
    runs = [serve_timed(loaded, some_jobs(), alone) for _ in range(6)]
    assert set(in_the_loop(runs[0]).lines) < set(in_the_loop(runs[0], among=runs).lines)


def test_a_load_is_timed_while_it_is_served(loaded: Loaded, alone: Measured) -> None:
    jobs = some_jobs()
    served = serve_timed(loaded, jobs, alone)
    assert [len(one.token_times) for one in served.records] == [job.output for job in jobs]
    assert [one.arrival for one in served.records] == [job.arrival for job in jobs]
    drawn = sum(amount for amount, _, _ in served.samples.found["after"])
    assert drawn == sum(job.output for job in jobs)
    lengths = {len(job.request.prompt_token_ids) for job in jobs}
    found = served.samples.found
    asked = [*found.get("request", []), *found.get("request, woken", [])]
    assert len(asked) == 12 and {length for length, _, _ in asked} == lengths


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
