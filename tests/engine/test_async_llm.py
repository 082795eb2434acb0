"""AsyncLLM: streams, aborts, and consumers that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from jaxserve import AsyncLLM, EngineClosed, InvalidRequest, RequestOutput, SamplingParams
from jaxserve.start.loaded import Loaded

pytestmark = pytest.mark.usefixtures("quick_code")

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)


@pytest.fixture
def llm(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    # One step at a time, for streams that last.
    engine = AsyncLLM(replace(loaded, config=replace(loaded.config, num_scheduler_steps=1)))
    yield engine
    engine.close()


async def collect(stream: AsyncIterator[RequestOutput]) -> tuple[str, list[int], list[str | None]]:
    text, ids, reasons = "", [], []
    async for output in stream:
        for one in output.outputs:
            text += one.text
            ids += one.token_ids
            reasons.append(one.finish_reason)
    return text, ids, reasons


async def settled(llm: AsyncLLM) -> None:
    """Wait until the engine has freed all its resources, within a few steps."""
    for _ in range(50):
        stats = await llm.stats()
        if stats.num_running == stats.num_waiting == stats.pages_in_use == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still held: {stats}")


def test_deltas_add_up_to_the_answer(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=1, seed=5, max_tokens=40, ignore_eos=True)

    async def scene() -> None:
        one, *many = await asyncio.gather(
            *[collect(llm.generate("héllo", params)) for _ in range(6)]
        )
        assert all(other == one or other[:2] == one[:2] for other in many)
        text, ids, reasons = one
        assert len(ids) == 40 and reasons[-1] == "length" and set(reasons[:-1]) <= {None}
        assert text == llm.get_tokenizer().decode(ids)
        await settled(llm)

    asyncio.run(scene())


def test_abort_by_id_ends_the_stream(llm: AsyncLLM) -> None:
    async def scene() -> None:
        reasons = []
        async for output in llm.generate("x", ENDLESS, "mine"):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 3:
                await llm.abort("mine")
                await llm.abort("mine")
                await llm.abort("nobody's")
        assert reasons[-1] == "abort"
        await settled(llm)

    asyncio.run(scene())


def test_requests_without_an_id_get_one_that_nobody_has(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    async def one(request_id: str | None) -> str:
        names = [output.request_id async for output in llm.generate("x", params, request_id)]
        assert len(set(names)) == 1
        return names[0]

    async def scene() -> None:
        asked = [*(f"request-{number}" for number in range(8, 16)), *[None] * 8]
        names = await asyncio.gather(*map(one, asked))
        assert names[:8] == asked[:8] and len(set(names)) == 16
        await settled(llm)

    asyncio.run(scene())


def test_a_prompt_dict_may_say_its_salt(llm: AsyncLLM) -> None:
    async def cached(salt: str) -> int:
        prompt = {"prompt_token_ids": [7] * 40, "cache_salt": salt}
        params = SamplingParams(max_tokens=1)
        return max([output.num_cached_tokens async for output in llm.generate(prompt, params)])

    async def scene() -> None:
        assert [await cached(name) for name in ("alice", "bob", "alice")] == [0, 0, 32]
        with pytest.raises(InvalidRequest, match="multi_modal_data"):
            async for _ in llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}):
                pass

    asyncio.run(scene())


def test_dropped_streams_free_their_pages(llm: AsyncLLM) -> None:
    async def drop(after: int) -> None:
        async with aclosing(llm.generate("drop me", ENDLESS)) as stream:
            for _ in range(after):
                await anext(stream)

    async def scene() -> None:
        await asyncio.gather(*[drop(after) for after in (0, 1, 2, 3, 5, 8, 13)])
        task = asyncio.create_task(collect(llm.generate("cancelled", ENDLESS)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(llm)

    asyncio.run(scene())


def test_one_live_request_per_id(llm: AsyncLLM) -> None:
    async def scene() -> None:
        stream = llm.generate("a", ENDLESS, "same")
        await anext(stream)
        with pytest.raises(InvalidRequest, match="'same' is being served"):
            await anext(llm.generate("b", ENDLESS, "same"))
        await stream.aclose()  # type: ignore[attr-defined]
        short = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len((await collect(llm.generate("b", short, "same")))[1]) == 2
        await settled(llm)

    asyncio.run(scene())


def test_bad_requests_raise_and_harm_nobody(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def scene() -> None:
        want = await collect(llm.generate("canary", params))
        task = asyncio.create_task(collect(llm.generate("canary", params)))
        for bad in ("", [], [-1], [10**9], None, "y" * 300):
            with pytest.raises(InvalidRequest):
                await anext(llm.generate(bad, params))  # type: ignore[arg-type]
        assert (await task)[1] == want[1]
        await settled(llm)

    asyncio.run(scene())


def test_closed_engine_refuses(llm: AsyncLLM) -> None:
    async def scene() -> None:
        task = asyncio.create_task(collect(llm.generate("open", ENDLESS)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.close)
        assert (await task)[2][-1] == "abort"
        with pytest.raises(EngineClosed):
            await anext(llm.generate("late", ENDLESS))

    asyncio.run(scene())


def test_why_a_completion_failed_can_be_read(llm: AsyncLLM) -> None:
    async def scene() -> None:
        [token] = llm.get_tokenizer().encode("q")
        dead_end = SamplingParams(allowed_token_ids=[token], bad_words=["qq"], n=2)
        outputs = [output async for output in llm.generate("x", dead_end)]
        why = "allowed_token_ids, bad_words left no token to draw"
        assert outputs[-1].finished and outputs[-1].error == why
        ends = [one for output in outputs for one in output.outputs if one.finish_reason]
        assert [(one.finish_reason, one.error) for one in ends] == [("error", why)] * 2
        await settled(llm)

    asyncio.run(scene())
