"""Call the server with langchain-openai, and print the results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

URL, KEY, MODEL, QUESTION = sys.argv[1:]
TO = {"base_url": URL + "/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}

chat = ChatOpenAI(**TO)
answer = chat.invoke([HumanMessage(QUESTION)])
text = OpenAI(**TO, max_tokens=8, temperature=0)
try:
    ChatOpenAI(**TO, temperature=-1).invoke(QUESTION)
    bad = []
except Exception as error:
    bad = [kind.__name__ for kind in type(error).__mro__]
print(
    json.dumps(
        {
            "answers": [
                answer.content,
                "".join(chunk.content for chunk in chat.stream(QUESTION)),
                asyncio.run(chat.ainvoke(QUESTION)).content,
                *(one.content for one in chat.batch([QUESTION, QUESTION])),
                ChatOpenAI(**TO, use_responses_api=True).invoke(QUESTION).text,
            ],
            "usage": answer.usage_metadata["total_tokens"],
            "with_system": bool(chat.invoke([SystemMessage("Be brief."), HumanMessage("hi")])),
            "text": text.invoke("What is"),
            "text_stream": "".join(text.stream("What is")),
            "bad": bad,
        }
    )
)
