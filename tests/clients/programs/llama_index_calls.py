"""Call the server with LlamaIndex's class for such servers, and print the results as JSON."""

import asyncio
import json
import sys
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL, KEY, MODEL, QUESTION = sys.argv[1:]
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
TO = {"api_base": URL + "/v1", "api_key": KEY, "model": MODEL, "max_retries": 0, "temperature": 0}


def look_up(day: Literal["mon", "tue"]) -> str:
    """Look a day up."""
    return day


chat = OpenAILike(**TO, is_chat_model=True, is_function_calling_model=True, max_tokens=300)
text = OpenAILike(**TO, is_chat_model=False, max_tokens=8)
called = chat.chat_with_tools(
    [FunctionTool.from_defaults(look_up)], user_msg=QUESTION, tool_required=True
)
[call] = chat.get_tool_calls_from_response(called)
print(
    json.dumps(
        {
            "answers": [
                chat.chat(MESSAGES).message.content,
                [*chat.stream_chat(MESSAGES)][-1].message.content,
                asyncio.run(chat.achat(MESSAGES)).message.content,
                chat.complete(QUESTION).text,
            ],
            "text": text.complete("What is").text,
            "text_stream": [*text.stream_complete("What is")][-1].text,
            "call": [call.tool_name, call.tool_kwargs],
        }
    )
)
