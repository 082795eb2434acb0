"""Answers to a list of prompts, all of them in one batch."""

from jaxserve import LLM, SamplingParams

PROMPTS = ["Reverse: s-t-o-n-e", "Say the words: red fox", "Once upon a time"]


def main() -> None:
    """Print a greedy and a drawn answer to each prompt."""
    greedy = SamplingParams(temperature=0, max_tokens=16)
    # Seeds make drawn answers repeatable, whatever else is served beside them.
    drawn = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=1)
    with LLM() as llm:  # or LLM("path/to/checkpoint"), LLM("org/name"), LLM("model.gguf")
        for name, sampling in (("greedy", greedy), ("drawn", drawn)):
            for output in llm.generate(PROMPTS, sampling, use_tqdm=False):
                answer = output.outputs[0]
                print(f"{name}: {output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    main()
