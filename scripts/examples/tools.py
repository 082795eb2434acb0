"""Tool call by a served model, with the official openai client (`pip install openai`).

Start a server first (`jaxserve serve`), and name its address: python -m scripts.examples.tools URL
"""

import json
import sys

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Oslo", "Rome"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def main(url: str) -> None:
    """Print the call that the model makes. A forced one always fits the tool's schema."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "What is the weather in Rome?"}]
    answer = client.chat.completions.create(
        model=model, messages=question, tools=[WEATHER], tool_choice="required", max_tokens=128
    )
    [call] = answer.choices[0].message.tool_calls or []
    print(call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
