"""Streams with a slow reader are paused and resumed without losing or changing a token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxserve import AsyncLLM, SamplingParams
from jaxserve.engine.delta import Delta
from jaxserve.engine.stream import Stream
from jaxserve.start.loaded import Loaded

SAMPLED = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=24, ignore_eos=True)
PROMPTS = ["one", "two two", "three three three"]


@pytest.fixture
def llm(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    # One step at a time, for streams that last.
    engine = AsyncLLM(replace(loaded, config=replace(loaded.config, num_scheduler_steps=1)))
    yield engine
    engine.close()


def tokens_of(deltas: list, into: dict | None = None) -> dict[tuple[str, int], list[int]]:
    tokens = {} if into is None else into
    for delta in deltas:
        tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return tokens


async def read(stream: Stream, every: float = 0.0) -> list[list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    while True:
        finished = stream.is_finished
        tokens_of(await stream.take(), tokens)
        if finished or (stream.is_finished and not stream.num_unread):
            return [tokens[one.request_id, n] for one in stream.requests for n in range(2)]
        await asyncio.sleep(every)


async def until_paused(stream: Stream) -> None:
    async with asyncio.timeout(30):
        while not stream.is_paused:
            await asyncio.sleep(0.001)


def run(llm: AsyncLLM, max_unread: int | None, every: float = 0.0) -> list[list[int]]:
    async def main() -> list[list[int]]:
        requests = [llm.requests.make(prompt, SAMPLED) for prompt in PROMPTS]
        stream = llm.open(requests, max_unread)
        result = await read(stream, every)
        await llm.check()
        assert (await llm.stats()).pages_in_use == 0
        return result

    return asyncio.run(main())


@pytest.mark.parametrize("max_unread", [1, 5, 40])
def test_a_slow_reader_gets_the_same_tokens(llm: AsyncLLM, max_unread: int) -> None:
    fast = run(llm, None)
    assert [len(tokens) for tokens in fast] == [24] * 6
    assert run(llm, max_unread, every=0.005) == fast
    assert run(llm, max_unread) == fast


def test_a_paused_stream_holds_no_pages_and_draws_nothing(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.open([llm.requests.make("one", SAMPLED)], max_unread=4)
        await until_paused(stream)
        stats = await llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
        drawn = stats.generation_tokens
        other = llm.open([llm.requests.make("two", SAMPLED)])
        assert [len(tokens) for tokens in await read(other)] == [24, 24]
        assert (await llm.stats()).generation_tokens == drawn + 48
        await llm.check()
        assert [len(tokens) for tokens in await read(stream)] == [24, 24]

    asyncio.run(main())


def test_a_paused_stream_can_be_closed(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.open([llm.requests.make("one", SAMPLED)], max_unread=1)
        await until_paused(stream)
        stream.close()
        await llm.check()
        stats = await llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)

    asyncio.run(main())
    assert [len(tokens) for tokens in run(llm, None)] == [24] * 6


def test_pausing_in_any_state_is_harmless(llm: AsyncLLM) -> None:
    """Waiting, in prefill, in decode, paused already, ended: at every point of a run."""
    expected = run(llm, None)

    async def main(pauses: int) -> list[list[int]]:
        requests = [llm.requests.make(prompt, SAMPLED) for prompt in PROMPTS]
        stream = llm.open(requests)
        names = [request.request_id for request in requests]
        for number in range(pauses):
            llm._thread.pause(names[number % 3 :])
            if number % 2:
                await asyncio.sleep(0.0005 * (number % 5))
            llm._thread.pause(names)
            llm._thread.resume(names)
            llm._thread.resume(names)
        result = await read(stream)
        await llm.check()
        return result

    for pauses in (1, 4, 20):
        assert asyncio.run(main(pauses)) == expected


def test_a_stream_ends_with_the_error_it_was_given(llm: AsyncLLM) -> None:
    async def main() -> None:
        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        stream = llm.open([llm.requests.make("one", endless)])
        asyncio.get_running_loop().call_later(0.01, stream.fail, TimeoutError("late"))
        with pytest.raises(TimeoutError, match="late"):
            await asyncio.gather(*[read(stream)])
        stream.close()

    asyncio.run(main())


def test_only_what_waits_is_ended_for_waiting(llm: AsyncLLM) -> None:
    async def main() -> None:
        long = SamplingParams(max_tokens=40, ignore_eos=True, n=4)
        running = llm.open([llm.requests.make("one", long)])
        first = await running.take()
        waiting = llm.open([llm.requests.make("two", long)])
        for stream in (running, waiting):
            llm._thread.abort_waiting(stream.requests[0].request_id, "too long")
        deltas = await waiting.take()
        assert {(delta.finish_reason, delta.error) for delta in deltas} == {("abort", "too long")}
        tokens = tokens_of(first)
        while not running.is_finished or running.num_unread:
            tokens_of(await running.take(), tokens)
        assert [len(one) for one in tokens.values()] == [40] * 4

    asyncio.run(main())


def test_an_engine_that_stands_still_is_noticed(llm: AsyncLLM) -> None:
    async def main() -> None:
        assert llm._thread.standstill() == 0.0
        stream = llm.open([llm.requests.make("one", SAMPLED)])
        await stream.take()
        over = threading.Event()
        blocked = asyncio.get_running_loop().run_in_executor(None, llm._thread.call, over.wait)
        while llm._thread.standstill() <= 0.1:
            await asyncio.sleep(0.001)
        over.set()
        await blocked
        await read(stream)
        while llm._thread.standstill():
            await asyncio.sleep(0.001)

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_tokens_that_wait_together_are_one_delta(
    llm: AsyncLLM, n: int, logprobs: int | None
) -> None:
    """The last token of a completion stays separate, and so does every token with scores."""
    sampling = SamplingParams(
        temperature=1, seed=5, max_tokens=6, ignore_eos=True, n=n, logprobs=logprobs
    )

    async def main() -> None:
        read, waits = (llm.open([llm.requests.make("one", sampling)]) for _ in range(2))
        apart: list[Delta] = []
        while not (read.is_finished and not read.num_unread):
            apart += await read.take()
        while not waits.is_finished:
            await asyncio.sleep(0.001)
        joined = await waits.take()
        for index in range(n):
            one, other = ([d for d in deltas if d.index == index] for deltas in (apart, joined))
            assert "".join(d.text for d in one) == "".join(d.text for d in other)
            assert [t for d in one for t in d.token_ids] == [t for d in other for t in d.token_ids]
            assert [d.finish_reason is None for d in other] == [True] * (len(other) - 1) + [False]
            if logprobs is not None:
                assert len(other) == 6
            elif n == 1:
                assert [len(d.token_ids) for d in other] == [5, 1]

    asyncio.run(main())
