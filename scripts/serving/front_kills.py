"""Replicas behind a router that end by SIGKILL under load, and the end of each request."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

from scripts.lib.server_process import Server, read_metric
from scripts.serving.front_checks import send_at_once
from scripts.serving.front_process import KEY, MODEL, REPLICA, Front

REQUESTS, AT_ONCE, TOKENS = 200, 16, 48
REACHED_S = 120.0
_PROMPTS = [f"Reverse: {'-'.join(word)}" for word in "stone horse lamp grey book tree".split()]
_FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
_EXTRA = {"ignore_eos": True}


def reference(replica: Server) -> list[str]:
    """Return the answer of one replica alone to each prompt."""
    with OpenAI(base_url=replica.url + "/v1", api_key=KEY, timeout=120) as api:
        return [
            api.completions.create(**_FIELDS, prompt=prompt, extra_body=_EXTRA).choices[0].text
            for prompt in _PROMPTS
        ]


def described(error: Exception) -> str:
    """Return the kind of an error, and the status or the code of one that was answered."""
    found = [getattr(error, name, None) for name in ("status_code", "code")]
    words = [str(value) for value in found if value]
    return " ".join([type(error).__name__, *words])


async def _unary(api: AsyncOpenAI, prompt: str, want: str) -> str:
    try:
        answer = await api.completions.create(**_FIELDS, prompt=prompt, extra_body=_EXTRA)
    except openai.OpenAIError as error:
        return f"unary: {described(error)}"
    return "unary: exact" if answer.choices[0].text == want else "unary: WRONG"


async def _stream(api: AsyncOpenAI, prompt: str, want: str) -> str:
    text, reason = "", None
    try:
        stream = await api.completions.create(
            **_FIELDS, prompt=prompt, stream=True, extra_body=_EXTRA
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
    except Exception as error:  # the client also raises the exceptions of its transport
        when = "after its first bytes" if text else "before its first byte"
        exact = "" if want.startswith(text) else ", WRONG before"
        return f"stream: {described(error)} {when}{exact}"
    if reason is None:
        return "stream: CUT SHORT without an error"
    return "stream: exact" if text == want else "stream: WRONG"


async def run_load(front: Front, want: Sequence[str], retries: int, kill: Server | None) -> Counter:
    """Send all requests, half of them streams. Count their ends by name.

    Args:
        want: of `reference`.
        retries: how often the client repeats a request by itself.
        kill: a replica to end by SIGKILL in the midst of it.
    """
    ends: Counter = Counter()
    places = asyncio.Semaphore(AT_ONCE)
    moment = random.randrange(REQUESTS // 4, REQUESTS // 2)

    async def send(number: int) -> None:
        async with places:
            if number == moment and kill is not None:
                kill.process.kill()
            call = _stream if number % 2 else _unary
            which = number % len(_PROMPTS)
            ends[await call(api, _PROMPTS[which], want[which])] += 1

    async with AsyncOpenAI(
        base_url=front.url + "/v1", api_key=KEY, max_retries=retries, timeout=120
    ) as api:
        await asyncio.gather(*map(send, range(REQUESTS)))
    return ends


def replace(front: Front, dead: Server) -> tuple[float, float]:
    """Start a replica where another was.

    Returns:
        Seconds of its start, and from then to the first request that the router sent it.

    Raises:
        RuntimeError: no request reached it in `REACHED_S`.
    """
    port = int(dead.url.rpartition(":")[2])
    dead.__exit__(None, None, None)
    started = time.monotonic()
    new = Server(*REPLICA, port=port)
    new.__enter__()
    front.replicas[front.replicas.index(dead)] = new
    ready = time.monotonic()
    while not read_metric(new.url, "prompt_tokens_total"):
        if time.monotonic() > ready + REACHED_S:
            raise RuntimeError(f"no request reached a replica that is back: {front.log()[-2000:]}")
        send_at_once(front)
    return ready - started, time.monotonic() - ready


def kill_often(front: Front, times: int, retries: int) -> dict[str, Any]:
    """Kill one of the replicas under load, many times, and replace it each time.

    The replicas of `front` are others afterwards, which the caller must stop.
    """
    want = reference(front.replicas[0])
    ends: Counter = Counter()
    starts, reached = [], []
    for number in range(times):
        victim = front.replicas[number % len(front.replicas)]
        ends += asyncio.run(run_load(front, want, retries, victim))
        start, first = replace(front, victim)
        starts.append(round(start, 1))
        reached.append(round(first, 1))
        print(f"kill {number + 1} of {times}: {dict(ends)}", flush=True)
    return {
        "kills": times,
        "requests": times * REQUESTS,
        "client_retries": retries,
        "ends": dict(sorted(ends.items())),
        "started_s": starts,
        "first_request_s": reached,
    }
