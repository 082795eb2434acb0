"""Call the server by each route of litellm for such servers, and print the results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import litellm

URL, KEY, MODEL, QUESTION = sys.argv[1:]
MESSAGES = [{"role": "user", "content": QUESTION}]
TO = {"api_base": URL + "/v1", "api_key": KEY}


def chat(provider: str, **options: object) -> str:
    return litellm.completion(f"{provider}/{MODEL}", MESSAGES, **TO | options)


def said(stream: object) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def kind_of_error(**options: object) -> str:
    try:
        chat("openai", num_retries=0, **options)
    except Exception as error:
        return type(error).__name__
    return "none"


async def ask() -> str:
    answer = await litellm.acompletion(f"openai/{MODEL}", MESSAGES, **TO)
    return answer.choices[0].message.content


text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="What is", max_tokens=8, temperature=0, **TO
)
print(
    json.dumps(
        {
            "answers": [
                chat("openai").choices[0].message.content,
                chat("hosted_vllm").choices[0].message.content,
                chat("anthropic", api_base=URL).choices[0].message.content,
                said(chat("openai", stream=True)),
                said(chat("hosted_vllm", stream=True)),
                said(chat("anthropic", api_base=URL, stream=True)),
                asyncio.run(ask()),
            ],
            "text": text.choices[0].text,
            "usage": chat("openai").usage.total_tokens,
            "bad": kind_of_error(temperature=-1),
            "key": kind_of_error(api_key="no"),
            "good": kind_of_error(),
        }
    )
)
