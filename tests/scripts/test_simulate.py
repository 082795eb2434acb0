"""The simulator: its clock by hand, complete schedules, and hit rates equal to the pool's."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.execution.buckets import BucketSet
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.plan import LaunchPlan
from scripts.bench.prefix import hit_rates, ideal_hits
from scripts.bench.prefix_states import report_state_hits, state_hit_rates
from scripts.simulate import command as simulate
from scripts.simulate.command import read_setting
from scripts.simulate.fits import (
    LEAST_OF_RANGE,
    SHAPES,
    Assumed,
    Line,
    Measured,
    Samples,
    attention_work,
    line,
    quantiles,
    spread,
)
from scripts.simulate.jobs import Job, make_jobs
from scripts.simulate.loop import Record, Setting, Simulation, summarize
from scripts.simulate.validate import (
    COMPARED,
    MOST_TIMES,
    Pair,
    Undisturbed,
    compare,
    cut,
    pooled,
    stolen,
)

SAMPLING = SamplingParams(max_tokens=None, ignore_eos=True)
SETTING = Setting(4, 16, 65, 64, enable_prefix_caching=False)
US = 1e-6


class Fixed:
    """A clock with launches of 1 s, 0.1 s of host time before and 0.2 s after, or shares of it."""

    def __init__(self, unit: float = 1.0, share: float = 0.0, called: float = 0.0) -> None:
        self.unit, self.share, self.called = unit, share, called

    def request(self, prompt: int, idle: float, luck: float) -> float:
        return 0.0

    def device(self, plan: LaunchPlan, buckets: BucketSet, idle: float, luck: float) -> float:
        return self.unit

    def before(self, plan: LaunchPlan, idle: float, luck: float) -> float:
        return 0.1 * self.unit

    def call(self, plan: LaunchPlan, idle: float, luck: float) -> float:
        return self.called

    def after(self, plan: LaunchPlan, luck: float) -> float:
        return 0.2 * self.unit

    def waiting(self, idle: float) -> float:
        return self.share


def job(prompt: int, output: int, arrival: float = 0.0, token: int = 5) -> Job:
    tokens = np.full(prompt, token, np.int32)
    return Job(Request(f"{arrival}", tokens, SAMPLING, 0, (), prompt + output), arrival, output)


def test_the_clock_by_hand_overlapped() -> None:
    """Step n+1 is submitted at 0.1 s past the last commit and waits for the device."""
    [record] = Simulation(SETTING, Fixed()).run([job(8, 3, 2.0)]).records
    # Submitted at 2.1, 2.2 (in the queue) and, after the first was read at 3.1 and committed at
    # 3.3, at 3.4. The device runs without a gap from 2.1 on.
    assert record.token_times == pytest.approx([3.3, 4.3, 5.3])
    assert record.ttft == pytest.approx(1.3) and record.tpot == pytest.approx(1.0)


def test_the_clock_by_hand_where_calls_wait_for_what_they_submit() -> None:
    """Each launch finds the device free: they end at 3.1, 4.2 and 5.5, before anything is read."""
    [record] = Simulation(SETTING, Fixed(share=1.0)).run([job(8, 3, 2.0)]).records
    assert record.token_times == pytest.approx([4.4, 5.7, 5.9])


def test_the_clock_by_hand_in_turns() -> None:
    setting = Setting(4, 16, 65, 64, enable_prefix_caching=False, async_scheduling=False)
    [record] = Simulation(setting, Fixed()).run([job(8, 3, 2.0)]).records
    assert record.token_times == pytest.approx([3.3, 4.6, 5.9])


def test_the_call_that_submits_a_launch_comes_before_it_and_counts_for_the_pace() -> None:
    """A step of 2 ms leaves room for four of them, unless its call takes 20."""
    [record] = Simulation(SETTING, Fixed(called=0.5)).run([job(8, 1)]).records
    assert record.token_times == pytest.approx([1.8])
    setting = replace(SETTING, max_steps=4, async_scheduling=False)
    for called, most in ((0.0, 4), (0.02, 1)):
        [record] = Simulation(setting, Fixed(0.002, called=called)).run([job(8, 9)]).records
        assert max(Counter(record.token_times).values()) == most


class WaitsBehind(Fixed):
    """Calls wait for launches that find the device free, all but the first."""

    def waiting(self, idle: float) -> float:
        return float(idle == 0.0)


def test_a_device_that_becomes_free_during_a_call_is_not_waited_for() -> None:
    [record] = Simulation(SETTING, WaitsBehind(called=2.0)).run([job(8, 2, 1.0)]).records
    # Called at 1.1 and 3.2, submitted at 3.1 and 5.2. The first runs until 4.1, the second until
    # 6.2.
    assert record.token_times == pytest.approx([5.4, 6.4])


def test_a_launch_of_several_steps_brings_its_tokens_at_once() -> None:
    setting = replace(SETTING, num_scheduler_steps=4, max_steps=4)
    [record] = Simulation(setting, Fixed()).run([job(8, 6)]).records
    # The prompt's step, then a launch of 4, and one of the 1 that is left, 1 s each.
    assert record.token_times == pytest.approx([1.3, *[2.3] * 4, 3.3])


def test_launches_grow_as_far_as_nobody_notices() -> None:
    setting = replace(SETTING, max_steps=4)
    for seconds, most in ((1.0, 1), (0.002, 4)):
        [record] = Simulation(setting, Fixed(seconds)).run([job(8, 30)]).records
        assert max(Counter(record.token_times).values()) == most


def test_a_prompt_above_the_budget_takes_several_steps() -> None:
    [record] = Simulation(SETTING, Fixed()).run([job(40, 1)]).records
    assert record.token_times == pytest.approx([3.3])


def test_idle_time_is_skipped_and_counts_as_no_use() -> None:
    outcome = Simulation(SETTING, Fixed()).run([job(8, 1), job(8, 1, 1000.0)])
    assert [r.token_times[0] - r.arrival for r in outcome.records] == pytest.approx([1.3, 1.3])
    assert outcome.usage.seconds == pytest.approx(2.6)
    summary = outcome.summary()
    assert summary["duration_s"] == pytest.approx(1001.3)
    assert summary["device_busy_pct"] == pytest.approx(100 * 2 / 1001.3)
    assert summary["rows_mean"] < 0.01 and summary["page_use_mean_pct"] < 0.01


def test_users_ask_again_once_they_are_answered() -> None:
    outcome = Simulation(SETTING, Fixed()).run([job(8, 2) for _ in range(6)], users=2)
    ends = sorted(record.token_times[-1] for record in outcome.records)
    starts = sorted(record.arrival for record in outcome.records)
    assert starts[:2] == [0.0, 0.05] and starts[2:] == pytest.approx(ends[:4])


@pytest.mark.parametrize("pages", [24, 400])
def test_every_token_of_a_trace_is_served_in_order(pages: int) -> None:
    """Includes runs with few pages, so that sequences are preempted."""
    jobs = make_jobs("azure-conv", 60, scale=16, rate=50, max_model_len=64)
    setting = Setting(8, 16, pages, 64, block_size=4)
    simulation = Simulation(setting, Fixed())
    outcome = simulation.run(jobs)
    assert [len(r.token_times) for r in outcome.records] == [one.output for one in jobs]
    assert all(np.all(np.diff(r.token_times) > 0) for r in outcome.records)
    assert all(r.token_times[0] > r.arrival for r in outcome.records)
    assert (outcome.preemptions > 0) == (pages == 24)
    simulation.scheduler.check()
    again = Simulation(setting, Fixed()).run(jobs)
    assert [r.token_times for r in again.records] == [r.token_times for r in outcome.records]


def test_measured_tables_price_buckets_cells_and_pairs() -> None:
    buckets = BucketSet(4, 64, (4,), (64,))
    base = {"decode 4": Line(90.0, 5.0), "64 tokens, 4 rows": Line(490.0, 10.0)}
    cell, pair = {"decode 4": 50.0, "64 tokens, 4 rows": 50.0}, dict.fromkeys(base, 0.0)
    pair["64 tokens, 4 rows"] = 1000.0
    more = {"decode 4": Line(50.0, 5.0), "64 tokens, 4 rows": Line(0.0, 0.0)}
    lines = {"before": Line(10.0, 1.0), "after": Line(20.0, 2.0)}
    times = Measured(base, cell, pair, more, lines)
    decode = plan_of([99, 299], [1, 1])
    assert times.device(decode, buckets, 0, 0.5) == pytest.approx(120 * US)
    assert times.before(decode, 0, 0.5) == pytest.approx(12 * US)
    assert times.after(decode, 0.5) == pytest.approx(24 * US)
    launch = replace(decode, row_steps=np.array([3, 2], np.int32), num_steps=3)
    assert times.device(launch, buckets, 0, 0.5) == pytest.approx((120 + 2 * 80) * US)
    alone = plan_of([99], [1])
    assert times.device(alone, buckets, 0, 0.5) == pytest.approx((95 + 5) * US)
    assert times.after(launch, 0.5) == pytest.approx(30 * US)
    mixed = plan_of([99, 240], [1, 40])
    assert times.after(mixed, 0.5) == pytest.approx(24 * US)
    told = replace(times, lines=lines | {"after, tokens": Line(70.0, 0.0)})
    assert told.after(mixed, 0.5) == pytest.approx(70 * US)
    assert told.after(launch, 0.5) == pytest.approx(30 * US)
    # The longer row has two tiles of 32 queries: one ends at 272, so both need two chunks of 256.
    assert attention_work(mixed) == (100, 4 * 32 * 256)
    expected = 900 + 5 + 4 * 32 * 256 / 1000
    assert times.device(mixed, buckets, 0, 0.5) == pytest.approx(expected * US)


def test_a_pause_is_paid_for_as_it_was_measured() -> None:
    """Queueing, preparing and running the first launch take other lines after one."""
    took = {"decode 4, up to 1 steps": 1e5, "decode 4": 1e5, "16 tokens, 4 rows": 2e5}
    buckets = {name: Line(micros, 0.0) for name, micros in took.items()}
    none, nothing = dict.fromkeys(buckets, 0.0), dict.fromkeys(buckets, Line(0.0, 0.0))
    lines = {
        "tokens": Line(0.0, 1.0),
        "tokens, woken": Line(5e4, 1.5),
        "before": Line(500.0, 0.0),
        "before, woken": Line(3e4, 0.0),
        "request": Line(0.0, 0.0),
        "request, woken": Line(0.0, 1e3),
        "after": Line(2e3, 0.0),
    }
    setting = replace(SETTING, decode_sizes=(4,), token_sizes=(16,))
    times = Measured(buckets, none, none, nothing, lines)
    records = Simulation(setting, times).run([job(8, 2, 0.0), job(8, 2, 9.0)]).records
    # The first finds an idle device, and the decode step behind it was queued in time.
    assert [r.token_times[0] - r.arrival for r in records] == pytest.approx(
        [0.0005 + 0.2 + 0.002, 0.008 + 0.03 + 0.05 + 0.3 + 0.002]
    )
    assert [r.tpot for r in records] == pytest.approx([0.1, 0.1])


def test_what_was_met_only_after_pauses_takes_what_it_took_there() -> None:
    """At a low load hardly any request comes while the engine works."""
    lines = {"request, woken": Line(7.0, 0.0)}
    times = Measured({}, {}, {}, {}, lines)
    assert times.request(5, 0.0, 0.5) == times.request(5, 1.0, 0.5) == pytest.approx(7 * US)
    times = replace(times, lines=lines | {"request": Line(3.0, 0.0)})
    assert times.request(5, 0.0, 0.5) == pytest.approx(3 * US)
    assert replace(times, lines={}).request(5, 1.0, 0.5) == 0.0


def test_a_bucket_met_only_after_pauses_is_not_taken_for_smaller_ones() -> None:
    """The overhead of small launches says little about large ones."""
    name = "16 tokens, 4 rows"
    base, none = {name: Line(10.0, 0.0)}, {name: 0.0}
    lines = {"tokens": Line(0.0, 9.0), f"{name}, woken": Line(0.0, 2.0)}
    times = Measured(base, none, none, {name: Line(0.0, 0.0)}, lines)
    buckets, plan = BucketSet(4, 16, (4,), (16,)), plan_of([0], [8])
    assert times.device(plan, buckets, 0.0, 0.5) == pytest.approx(20 * US)
    assert times.device(plan, buckets, 1.0, 0.5) == pytest.approx(20 * US)
    times = replace(times, lines={"tokens": Line(0.0, 9.0)})
    assert times.device(plan, buckets, 0.0, 0.5) == pytest.approx(90 * US)


def test_what_was_hardly_met_nearby_is_taken_from_everywhere() -> None:
    near, everywhere = Samples(), Samples()
    for _ in range(LEAST_OF_RANGE):
        near.add("decode", 1, 10e-6)
        everywhere.add("decode", 1, 30e-6)
        everywhere.add("512 tokens", 1, 30e-6)
        everywhere.add("256 tokens", 1, 30e-6)
    for _ in range(LEAST_OF_RANGE - 1):
        near.add("512 tokens", 1, 10e-6)
    near.take_rare(everywhere)
    lines = near.lines()
    found = {name: one.micros(1, 0.5) for name, one in lines.items()}
    assert found == pytest.approx({"decode": 10, "512 tokens": 30, "256 tokens": 30})


def laid(amounts: list[int], micros: list[int]) -> Line:
    x, y = np.array(amounts, float), np.array(micros, float)
    return spread(x, y, y, *line(x, y))


def test_lines_fit_what_was_measured_and_keep_its_spread() -> None:
    found = laid([1, 2, 3, 4], [12, 14, 16, 18])
    assert (found.fixed, found.each) == (pytest.approx(10), pytest.approx(2))
    assert found.micros(5, 0.5) == pytest.approx(20)
    falling = laid([1, 2, 3], [3, 2, 1])
    assert falling.fixed > 0 and falling.each == 0
    through_zero = laid([10, 20, 30], [1, 19, 41])
    assert through_zero.fixed == 0 and through_zero.each > 0
    wide = laid([1] * 100, [10] * 50 + [30] * 50)
    assert wide.micros(1, 0.0) == pytest.approx(10) and wide.micros(1, 1.0) == pytest.approx(30)
    # Long steps have smaller relative delays: each range has quantiles of its own.
    late = laid([10] * 80 + [100] * 80, ([10] * 60 + [30] * 20) + [100] * 80)
    assert late.micros(10, 0.99) == pytest.approx(30)
    assert late.micros(100, 0.99) == pytest.approx(100)


def test_what_was_not_seen_to_end_took_what_explains_all_that_is_known() -> None:
    """A launch takes 10 us alone, otherwise 20 or 60 us; the host looks at 15, 30 and 80."""
    samples = Samples()
    for _ in range(40):
        samples.add("decode", 10, 30e-6, least=15e-6)  # 20
        samples.add("decode", 10, 80e-6, least=30e-6)  # 60
        samples.add("decode", 10, 20e-6)  # waited for
        samples.add("decode", 10, 60e-6)
        samples.add("decode", 10, 80e-6, least=0.0)  # either
        samples.add("before", 1, 7e-6)
    samples.add("tokens", 10, 20e-6)  # once is not often
    for seconds in (10e-6, 20e-6, 20e-6, 20e-6, 90e-6):
        samples.add("request", 1, seconds)  # five times: all of them, and their mean
    lines = samples.lines()
    assert lines.keys() == {"decode", "before", "request"}
    mean = np.mean([lines["request"].micros(1, luck) for luck in np.arange(0.005, 1, 0.01)])
    assert mean == pytest.approx(32, rel=0.02)
    found = [lines["decode"].micros(10, luck) for luck in (0.1, 0.4, 0.6, 0.9)]
    assert found == pytest.approx([20, 20, 60, 60], rel=0.02)
    assert lines["before"].micros(1, 0.5) == pytest.approx(7)


def test_what_the_host_waited_for_is_not_taken_for_all() -> None:
    """The host looks at any time, and then waits: short steps are seen less often."""
    rng = np.random.default_rng(0)
    took, look = rng.uniform(20, 100, 2000), rng.uniform(10, 100, 2000)
    seen = took > look
    found = quantiles(np.where(seen, took, 0.0), np.where(seen, took, look))
    places = (np.arange(len(found)) + 0.5) / len(found)
    assert found == pytest.approx(np.quantile(took, places), rel=0.15)
    # The steps that were seen alone would give another result.
    assert np.median(took[seen]) > 70 and np.median(found) == pytest.approx(60, rel=0.05)


def plan_of(starts: list[int], counts: list[int]) -> LaunchPlan:
    full = np.ones(len(starts), np.int32)
    return LaunchPlan(
        np.arange(len(starts), dtype=np.int32),
        np.array(starts, np.int32),
        np.array(counts, np.int32),
        full > 0,
        full.astype(np.int64),
    )


def test_assumed_steps_are_the_floors_at_full_efficiency() -> None:
    """3.52 ms for one row of 1,024 tokens of an 8B model, 11.48 for 256, on 4.3 TB/s."""
    times = Assumed(SHAPES["8b"], memory_share=1.0, compute_share=1.0)
    for rows, floor in ((1, 3.52e-3), (32, 4.49e-3), (256, 11.48e-3)):
        plan = plan_of([1023] * rows, [1] * rows)
        assert times.device(plan, BucketSet(256, 8192), 0, 0.5) == pytest.approx(floor, rel=0.01)
    assert "not measured" in times.about["device"]


def test_metrics_are_named_and_computed_as_vllms() -> None:
    records = [Record(0.0, 3, 0, [0.5, 0.6, 0.8]), Record(1.0, 3, 0, [1.1])]
    found = summarize(records, {"ttft": 200.0, "tpot": 100.0})
    assert found["mean_ttft_ms"] == pytest.approx(300) and found["p50_tpot_ms"] == pytest.approx(
        150
    )
    assert found["mean_itl_ms"] == pytest.approx(150) and found["output_throughput"] == 4 / 1.1
    # The first misses both bounds. The second has one token, and so no time between tokens.
    assert found["good_pct"] == 50 and found["goodput"] == 1 / 1.1


def test_jobs_follow_their_trace_at_any_rate() -> None:
    jobs = make_jobs("azure-code", 3000, scale=4, rate=7.0, max_model_len=4096)
    assert len(jobs) == 3000 and jobs[0].arrival == 0.0
    assert jobs[-1].arrival == pytest.approx(2999 / 7.0)
    assert all(a.arrival <= b.arrival for a, b in itertools.pairwise(jobs))
    drawn = make_jobs("azure-code", 2000, rate=7.0, max_model_len=4096, arrivals="poisson")
    assert drawn[-1].arrival == pytest.approx(2000 / 7.0, rel=0.1)
    shared = make_jobs("mooncake", 200, scale=8, max_model_len=4096)
    keys = {tuple(one.request.prompt_token_ids[:64].tolist()) for one in shared}
    assert 1 < len(keys) < 200


def test_hit_rates_are_within_a_point_of_an_ideal_lru() -> None:
    for row in hit_rates(150, 16.0, [2000, 9000], slots=[1]):
        assert row["ideal_pct"] > 1 and abs(row["points_below"]) <= 1.0, row


def test_snapshots_never_find_more_than_their_pages() -> None:
    jobs = make_jobs("mooncake", 150, max_model_len=131_072, vocabulary=2**31 - 1)
    (row,) = state_hit_rates(jobs, [20_000], [1], [3_000], 16, 131_072)
    assert row["snapshots"] == 106 and row["plan_cpu_us"] > 0
    rates = [row[f"{name}_pct"] for name in ("ours", "every", "thousand", "thousand_once")]
    assert max(rates) <= row["none_pct"] and row["ours_pct"] >= max(rates[1:3])
    assert row["ours_pct"] > 0
    lost = row | {"ours_pct": row["thousand_pct"] - 0.1}
    assert report_state_hits([row]) and not report_state_hits([row, lost])


def test_an_ideal_lru_by_hand() -> None:
    """Three pages of 4 tokens; a second use of a prompt finds its pages unless evicted."""
    same, other = job(9, 1, token=5), job(9, 1, token=6)
    assert ideal_hits([same, same], 3, 4, 64) == (18, 8)
    assert ideal_hits([same, other, same], 3, 4, 64) == (27, 4)
    assert ideal_hits([same, other, same], 2, 4, 64) == (27, 0)
    assert ideal_hits([job(8, 1), job(8, 1)], 9, 4, 64) == (16, 4)


def test_the_first_slo_holds_with_the_steps_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 users of an 8B model on an H200: 500 ms to the first token, 50 tokens a second."""
    path = tmp_path / "found.json"
    words = "run --users 100 --requests 600 --set max_num_seqs=100 max_num_batched_tokens=512"
    words = f"{words} --slo ttft:500 tpot:20 --json {path}"
    monkeypatch.setattr(sys, "argv", ["scripts/simulate", *words.split()])
    assert simulate.main() == 0
    found = json.loads(path.read_text())
    assert found["p99_ttft_ms"] < 500 and found["p99_tpot_ms"] <= 20 and found["good_pct"] > 99


def test_options_are_read_strictly() -> None:
    changed = read_setting(SETTING, ["max_num_seqs=2", "enable_prefix_caching=1"])
    assert (changed.max_num_seqs, changed.enable_prefix_caching) == (2, True)
    with pytest.raises(ValueError, match="--set takes"):
        read_setting(SETTING, ["max_seqs=2"])


def refused(arguments: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """Return the error about arguments that end a command before its first output."""
    patch.setattr(sys, "argv", ["scripts/simulate", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        simulate.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    return said.err.partition("error: ")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --rate -3", "--rate: '-3' must be a number above 0"),
        ("run --rate 0", "--rate: '0' must be a number above 0"),
        ("run --rate nan", "--rate: 'nan' must be a number above 0"),
        ("run --rate inf", "--rate: 'inf' must be a number above 0, and finite"),
        ("run --rate fast", "--rate: 'fast' must be a number above 0"),
        ("validate --max-num-seqs 0", "--max-num-seqs: '0' must be an integer of at least 1"),
        ("validate --rate 5 0", "--rate: '0' must be a number above 0"),
        ("run --scale 0", "--scale: '0' must be a number above 0"),
        ("run --requests 0", "--requests: '0' must be an integer of at least 1"),
        ("run --requests 1.5", "--requests: '1.5' must be an integer of at least 1"),
        (
            "run --requests 99999999999",
            "--requests: '99999999999' must be an integer of at most 1,",
        ),
        (
            "run --requests 20 --rate 1e-12",
            "--rate 1e-12: the last request would come after 1.9e+13 s",
        ),
        ("run --users 0", "--users: '0' must be an integer of at least 1"),
        ("run --rate 5 --users 3", "--users: not allowed with argument --rate"),
        ("run --requests 3 --users 5", "--users 5: must be at most the 3 requests"),
        ("validate --part 0", "--part: '0' must be an integer of at least 1"),
        ("validate --repeats -1", "--repeats: '-1' must be an integer of at least 1"),
        ("run --json /nonexist/x.json", "--json: '/nonexist/x.json' must be in a folder that ex"),
        ("run --json /", "--json: '/' is a folder; it must be a file to write"),
        ("run --slo latency:5", "--slo: 'latency:5' must be NAME:MS, NAME of ttft, tpot, e2el"),
        ("run --slo ttft:soon", "--slo: 'soon' must be a number above 0"),
        ("run --set max_seqs=2", "--set takes max_num_seqs, max_num_batched_tokens, num_pages"),
        ("run --set max_num_seqs", "--set max_num_seqs=N: '' must be an integer, like"),
        ("run --set max_num_seqs=0", "--set max_num_seqs must be from 1 to 65536, got 0"),
        ("run --set num_pages=1", "--set num_pages must be from 2 to"),
        ("run --set num_pages=512", "--set num_pages (512) must be at least 513"),
        ("run --set max_num_batched_tokens=8", "(8) must be at least max_num_seqs (256)"),
        ("run --set max_model_len=1000000", "--set max_model_len (1000000) must be at most"),
        ("run --set async_scheduling=2", "--set async_scheduling: '2' must be 0 or 1"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_say_what_is_allowed(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert message in refused(arguments, monkeypatch, capsys)


def test_a_model_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said = refused("validate --model /nonexist", monkeypatch, capsys)
    assert said.startswith("model: '/nonexist' is not a folder with a checkpoint")


def test_every_option_says_its_default() -> None:
    [commands] = [a for a in simulate.make_parser()._actions if isinstance(a.choices, dict)]
    assert isinstance(commands.choices, dict) and len(commands.choices) == 2
    for name, command in commands.choices.items():
        for action in command._actions[1:]:
            assert "(default: " in (action.help or ""), (name, action.dest)


def served(*seconds: float) -> list[Record]:
    """Return a run with a record for each of `seconds`, the time between its three tokens."""
    return [Record(0.0, 3, 0, [s, 2 * s, 3 * s]) for s in seconds]


def test_an_error_above_15_percent_is_told(capsys: pytest.CaptureFixture) -> None:
    real, same, far = served(1.0), [served(1.14)], [served(0.84)]
    assert compare([Pair(real, same)])["holds"]
    assert "above 15 %" not in capsys.readouterr().out
    found = compare([Pair(real, far)])
    assert not found["holds"]
    assert found["rows"]["p50_ttft_ms"]["error"] == pytest.approx(-0.16)
    assert "above 15 %" in capsys.readouterr().out


def test_percentiles_are_those_of_the_requests_of_all_runs() -> None:
    """A run that is three times as slow counts with all its requests: half of them."""
    found = pooled([served(*[1.0] * 10), served(*[3.0] * 10)])
    assert (found["p50_ttft_ms"], found["p99_ttft_ms"]) == (2000, 3000)
    # From the first arrival to the last token: 3 and 9 seconds for ten requests.
    assert found["request_throughput"] == pytest.approx(20 / 12)


def test_each_real_run_has_its_own_simulations_and_all_are_held_together() -> None:
    """Single pairs may be far out in either direction when the average is not."""
    slow, fast = served(*[2.0] * 10), served(*[1.0] * 10)
    result = compare([Pair(slow, [fast, fast]), Pair(fast, [slow, slow])])
    assert result["rows"].keys() == set(COMPARED) and result["holds"]
    assert result["rows"]["p50_ttft_ms"]["error"] == 0


@pytest.mark.parametrize(
    ("shares", "kept", "served"),
    [([0.0], 1, 1), ([0.1, 0.005], 2, 2), ([0.1, 0.3, 0.02, *[0.1] * 9], 3, MOST_TIMES)],
)
def test_what_the_host_disturbed_is_served_again(
    shares: list[float], kept: int, served: int
) -> None:
    """Each serving needs 10 s, of which a share goes to other processes.

    The best serving counts.
    """
    clock, calls = [5.0, 100.0], []

    def once() -> int:
        clock[0] += 10 * shares[len(calls)]
        clock[1] += 10
        calls.append(None)
        return len(calls)

    watch = Undisturbed(lambda: (clock[0], clock[1]))
    assert watch.serve(once) == kept
    assert (watch.served, watch.again) == (served, served - 1)


def test_stolen_time_is_read_from_the_system(tmp_path: Path) -> None:
    path = tmp_path / "stat"
    path.write_text("cpu  100 200 300 4000 50 6 7 80 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    hertz = os.sysconf("SC_CLK_TCK")
    assert stolen(path) == (80 / hertz, 693 / hertz)
    assert stolen(tmp_path / "none") == (0.0, 0.0)
    gone, wanted = stolen()
    assert 0 <= gone <= wanted


def test_a_load_is_cut_into_parts_that_begin_at_once() -> None:
    jobs = [job(8, 1, float(n)) for n in range(11)]
    parts = cut(jobs, 4)
    assert [[one.arrival for one in part] for part in parts] == [
        [0.0, 1.0, 2.0],
        [0.0, 1.0, 2.0, 3.0],
        [0.0, 1.0, 2.0, 3.0],
    ]
    assert [one.request for part in parts for one in part] == [one.request for one in jobs]
    assert [len(part) for part in cut(jobs, 40)] == [11]
    assert [len(part) for part in cut(jobs[:9], 4)] == [4, 5]


def test_simulating_imports_no_jax() -> None:
    code = (
        "import sys\n"
        "sys.modules['jax'] = None\n"
        "from scripts.simulate.command import make_parser\n"
        "a = make_parser().parse_args(['run', '--requests', '3', '--users', '2'])\n"
        "raise SystemExit(a.function(a))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ASSUMED" in done.stdout and "ttft" in done.stdout
