"""Load on a fleet through the openai client: answers and streams, compared with references."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai

MODEL = "demo_model"
QUESTIONS = [f"What is {a} + {b}?" for a, b in itertools.product((12, 47, 31), (8, 25, 9, 40))]
# The bundled model makes them in 0.1 and 1 s, so that a kill is in the middle of streams.
TOKENS, STREAM_TOKENS = 48, 400
SECONDS = 120.0
# Exceptions of a client whose answer breaks off.
BROKEN = (openai.OpenAIError, httpx2.HTTPError)


@dataclass
class Outcomes:
    """Ends of requests.

    Attributes:
        answered: whole answers that were right, and streams that ran to their right end.
        broken: streams that ended in an error that the client raised.
        failures: all other ends, each with its reason. The list must be empty.
        seconds: of each whole answer.
    """

    answered: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "answered": dict(self.answered),
            "broken": dict(self.broken),
            "failures": self.failures[:20],
            "num_failures": len(self.failures),
        }


class Load:
    """Greedy requests of the openai client whose answers are known. `url` is without `/v1`."""

    def __init__(self, url: str, max_retries: int) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=max_retries, timeout=SECONDS
        )
        self._whole_texts: dict[str, str] = {}
        self._streamed_texts: dict[str, str] = {}
        self.outcomes = Outcomes()

    async def learn(self) -> None:
        """Take the answers of now as the right ones."""
        for question in QUESTIONS:
            self._whole_texts[question] = await self._whole(question)
            self._streamed_texts[question] = await self._whole(question, STREAM_TOKENS)

    async def close(self) -> None:
        await self._client.close()

    def _fields(self, question: str, tokens: int) -> dict[str, Any]:
        # Answers go on past their end, so that a stream lasts.
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }

    async def _whole(self, question: str, tokens: int = TOKENS) -> str:
        answer = await self._client.chat.completions.create(**self._fields(question, tokens))
        return str(answer.choices[0].message.content)

    async def unary(self, question: str) -> None:
        """Make a request for a whole answer. Any other answer than the right one is a failure."""
        started = time.perf_counter()
        try:
            text = await self._whole(question)
        except BROKEN as error:
            self.outcomes.failures.append(f"unary: {type(error).__name__}: {error}"[:200])
            return
        if text != self._whole_texts[question]:
            self.outcomes.failures.append(f"unary: {text!r}, not {self._whole_texts[question]!r}")
            return
        self.outcomes.seconds.append(time.perf_counter() - started)
        self.outcomes.answered["unary"] += 1

    async def stream(self, question: str) -> None:
        """Make a request for a stream, which may break off, but has no wrong text."""
        text, ended, right = "", False, self._streamed_texts[question]
        try:
            fields = self._fields(question, STREAM_TOKENS)
            async for event in await self._client.chat.completions.create(**fields, stream=True):
                for choice in event.choices:
                    text += choice.delta.content or ""
                    ended |= choice.finish_reason is not None
        except BROKEN as error:
            self.outcomes.broken[type(error).__name__] += 1
            if not right.startswith(text):
                self.outcomes.failures.append(f"stream: {text!r} before its error")
            return
        if not ended or text != right:
            self.outcomes.failures.append(f"stream: {text!r} without an error")
            return
        self.outcomes.answered["stream"] += 1

    async def abort(self, question: str) -> None:
        """Begin a stream, and leave after its first events."""
        try:
            fields = self._fields(question, STREAM_TOKENS)
            stream = await self._client.chat.completions.create(**fields, stream=True)
            async for _ in stream:
                break
            await stream.close()
            self.outcomes.answered["abort"] += 1
        except BROKEN as error:
            self.outcomes.broken[type(error).__name__] += 1

    async def run(
        self,
        count: int,
        at_once: int,
        kinds: str = "uus",
        on_done: Callable[[int], Any] = lambda number: None,
    ) -> None:
        """Make requests, some at once, and wait for all.

        Args:
            kinds: in turn: u for unary, s for a stream, a for an abandoned stream.
            on_done: called with the number of requests that have ended.
        """
        ways = {"u": self.unary, "s": self.stream, "a": self.abort}
        works = itertools.islice(zip(itertools.cycle(kinds), itertools.cycle(QUESTIONS)), count)
        done = 0

        async def worker() -> None:
            nonlocal done
            for kind, question in works:
                await ways[kind](question)
                done += 1
                on_done(done)

        await asyncio.gather(*(worker() for _ in range(at_once)))
