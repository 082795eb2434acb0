"""Answers of a given form: a JSON schema, one of several texts, a regular expression."""

import json

from jaxserve import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "hen", "owl"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
FORMS = {
    "schema": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "choice": StructuredOutputsParams(choice=["yes", "no"]),
    "regex": StructuredOutputsParams(regex=r"[A-F]{2}-[0-9]{3}"),
}


def main() -> None:
    """Print an answer of each form. The bundled model was not trained on their meaning."""
    prompts = ["Describe an animal."] * len(FORMS)
    params = [
        SamplingParams(max_tokens=64, seed=1, structured_outputs=form) for form in FORMS.values()
    ]
    with LLM() as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for name, output in zip(FORMS, outputs, strict=True):
        print(f"{name}: {output.outputs[0].text}")
    print("legs:", json.loads(outputs[0].outputs[0].text)["legs"])


if __name__ == "__main__":
    main()
