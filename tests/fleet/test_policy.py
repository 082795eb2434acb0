"""Digests of prefixes, the reports of replicas about them, and the policy of the router."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.fleet.prefixes import (
    BLOCK_BYTES,
    MOST_DIGESTS,
    MOST_OVER_MEAN,
    REPORTS_UNTIL_HELD,
    TOKEN_BYTES,
    PrefixPolicy,
    PrefixRecord,
    chained_digests,
    digests_of,
    reported,
)
from scripts.simulate.jobs import make_jobs
from tests.fleet.simulation import FleetSimulation

SECRET = bytes(32)
BLOCK_TOKENS = BLOCK_BYTES // TOKEN_BYTES


def digests(**fields: Any) -> list[int]:
    return digests_of(json.dumps(fields).encode(), SECRET)


@given(st.binary(max_size=5 * BLOCK_BYTES), st.binary(max_size=5 * BLOCK_BYTES))
def test_digests_are_those_of_common_blocks(first: bytes, second: bytes) -> None:
    common = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    pair = chained_digests(first, SECRET), chained_digests(second, SECRET)
    assert list(map(len, pair)) == [len(first) // BLOCK_BYTES, len(second) // BLOCK_BYTES]
    same = [a == b for a, b in zip(*pair, strict=False)]
    assert same == [n < common // BLOCK_BYTES for n in range(len(same))]


def test_conversations_grow_and_prompts_of_all_kinds_count() -> None:
    turn = {"role": "user", "content": "x" * 3000}
    short, grown = digests(messages=[turn]), digests(messages=[turn, {"role": "assistant"}, turn])
    assert len(short) == 2 and grown[:2] == short and len(grown) == 5
    assert len(digests(prompt="x" * 2048)) == 2
    assert len(digests(prompt=[7] * 2 * BLOCK_TOKENS)) == 2
    assert len(digests(input=[turn])) == 2
    for field, value in (("model", "a"), ("tools", [{"a": 1}]), ("cache_salt", "s")):
        assert digests(messages=[turn], **{field: value})[0] != short[0]
    assert digests_of(b'{"prompt": "' + b"x" * 3000 + b'"}', bytes(31) + b"1") != digests(
        prompt="x" * 3000
    )


def test_bodies_without_a_prompt_have_none() -> None:
    for body in (b"", b"{", b"[1]", b"{}", b'{"prompt": 5}', b"[" * 100_000, b'{"prompt":[99e99]}'):
        assert digests_of(body, SECRET) == []
    assert digests(prompt=[2**40] * 4096) == []


def test_a_record_forgets_as_the_cache_does() -> None:
    record = PrefixRecord(SECRET, 4 * BLOCK_TOKENS)
    record.add_digests([1, 2, 3])
    record.add_digests([1, 7, 8])
    # 3 is the end of the least recently used prefix
    assert reported(record.report()) == {1, 7, 8, 2}
    large = PrefixRecord(SECRET, 10**9)
    large.add_digests(list(range(MOST_DIGESTS + 5)))
    assert reported(large.report()) == frozenset(range(MOST_DIGESTS))


def stats(load: int, *held: int) -> dict[str, Any]:
    record = PrefixRecord(SECRET, 10**6)
    record.add_digests(list(held))
    return {"load": load, "prefixes": record.report()}


def test_the_replica_that_holds_most_is_taken() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(8)
    policy.keep("abc")
    for name, held in (("a", [1]), ("b", [1, 2, 3]), ("c", [1, 2])):
        policy.report(name, stats(0, *held))
    assert policy.rank("abc", [1, 2, 3, 4]) == ["b", "c", "a"]
    assert policy.rank("ac", [1, 2, 3, 4]) == ["c", "a"]
    # The common beginning of all prompts does not mark a prompt.
    policy.report("a", stats(1, 1))
    assert policy.rank("abc", [1, *range(50, 60)])[-1] == "a"


def test_load_has_a_bound() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(4)
    policy.keep("ab")
    policy.report("a", stats(0, 1, 2))
    policy.report("b", stats(0))
    taken = []
    for _ in range(40):
        taken.append(policy.rank("ab", [1, 2])[0])
        policy.send(taken[-1], [1, 2])
    assert taken[:2] == ["a", "a"] and 20 <= taken.count("a") <= 20 * MOST_OVER_MEAN + 1
    policy.report("a", stats(0, 1, 2))  # it has ended all of them
    policy.report("b", stats(9))
    assert policy.rank("ab", [1, 2])[0] == "a"


def test_what_was_sent_counts_until_reports_would_hold_it() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(8)
    policy.keep("ab")
    policy.send("b", [5, 6])
    for number in range(REPORTS_UNTIL_HELD + 1):
        policy.report("a", stats(0, 100 + number))
        policy.report("b", stats(0, 200 + number))
        is_held = number < REPORTS_UNTIL_HELD
        assert (policy.rank("ab", [5, 6])[0] == "b") == is_held, number
    policy.keep("b")
    policy.keep("ab")
    assert policy.rank("ab", [100])[0] == "a" or policy.rank("ab", [100 + number])[0] != "a"


def test_a_simulated_fleet_finds_what_one_engine_finds() -> None:
    """Small rows of the trace, repeated: conversations that come again."""
    jobs = make_jobs("mooncake", 119, scale=32, max_model_len=4096, vocabulary=2**31 - 1)
    jobs = [*jobs, *(job.__class__(job.request, job.arrival + 100, job.output) for job in jobs)]
    tokens = sum(len(job.request.prompt_token_ids) for job in jobs)
    rows = {
        (count, routing): FleetSimulation(count, 2 * tokens, 4000.0, 0.02, routing).run(jobs)
        for count, routing in ((1, "prefix"), (2, "prefix"), (3, "turns"))
    }
    one, fleet = rows[1, "prefix"], rows[2, "prefix"]
    assert one["hit_pct"] > 40 and one["hit_pct"] - fleet["hit_pct"] < 5
    assert fleet["requests_over_mean"] < 1.3
    assert rows[3, "turns"]["hit_pct"] < fleet["hit_pct"] - 5
