"""Call the chat and Responses routes with the Agents SDK, and print the results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

URL, KEY, MODEL, QUESTION = sys.argv[1:]
called: list[str] = []


@function_tool
def look_up(day: Literal["mon", "tue"]) -> str:
    """Look a day up."""
    called.append(day)
    return f"{day} is free"


async def ask(kind: type) -> list[object]:
    """Return an answer, the same answer streamed, and the result of an agent that calls a tool."""
    model = kind(MODEL, AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0))
    plain = Agent(name="plain", model=model)
    whole = await Runner.run(plain, QUESTION)
    stream = Runner.run_streamed(plain, QUESTION)
    said = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        name="caller",
        model=model,
        tools=[look_up],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    used = await Runner.run(agent, QUESTION)
    return [whole.final_output, "".join(said), used.final_output]


async def main() -> None:
    kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    print(json.dumps({name: await ask(kind) for name, kind in kinds.items()} | {"called": called}))


set_tracing_disabled(True)
asyncio.run(main())
