"""Call the server with DSPy, and print the results as JSON."""

from __future__ import annotations

import json
import sys

import dspy

URL, KEY, MODEL, QUESTION = sys.argv[1:]


class Plan(dspy.Signature):
    """Decide when to do it."""

    task: str = dspy.InputField()
    day: str = dspy.OutputField()


lm = dspy.LM(
    f"openai/{MODEL}", api_base=URL + "/v1", api_key=KEY, cache=False, temperature=0, max_tokens=300
)
# A small model was not trained on the adapter's format: the server enforces it.
form = {
    "type": "object",
    "properties": {"day": {"type": "string", "enum": ["mon", "tue"]}},
    "required": ["day"],
    "additionalProperties": False,
}
held = {"type": "json_schema", "json_schema": {"name": "plan", "strict": True, "schema": form}}
with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
    plan = dspy.Predict(Plan, response_format=held)(task=QUESTION)
responses = dspy.LM(
    f"openai/{MODEL}", model_type="responses", api_base=URL + "/v1", api_key=KEY, cache=False
)
answers = [*lm(QUESTION), responses(QUESTION)[0]["text"]]
print(json.dumps({"day": plan.day, "answers": answers}))
