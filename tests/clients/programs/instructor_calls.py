"""Call the server with instructor, by tools and a JSON schema, and print the results as JSON."""

from __future__ import annotations

import json
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

URL, KEY, MODEL, QUESTION = sys.argv[1:]
MESSAGES = [{"role": "user", "content": QUESTION}]


class Plan(BaseModel):
    """When to do it."""

    # Or a model that knows no better makes up properties, with names of any length.
    model_config = ConfigDict(extra="forbid")

    day: Literal["mon", "tue"]
    sure: bool


def plans(mode: instructor.Mode) -> list[dict]:
    """Return one plan at once, and the same plan in parts as they arrive."""
    client = instructor.from_openai(OpenAI(base_url=URL + "/v1", api_key=KEY), mode=mode)
    asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_retries": 0}
    whole = client.create(response_model=Plan, **asked)
    *_, last = client.create_partial(response_model=Plan, **asked)
    return [whole.model_dump(), last.model_dump()]


modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
print(json.dumps({mode.name: plans(mode) for mode in modes}))
