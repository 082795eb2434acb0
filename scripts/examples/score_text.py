"""Scores of texts: the log-probability of each token, and the perplexity of the whole."""

import math

from jaxserve import LLM, SamplingParams

TEXTS = ["The fox and the hen are red.", "Red the are hen the and fox."]


def main() -> None:
    """Print the perplexity of each text and its least likely token."""
    # One token must be drawn; the prompt's are scored on the way.
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM() as llm:
        for output in llm.generate(TEXTS, sampling, use_tqdm=False):
            scored = (output.prompt_logprobs or [])[1:]  # nothing comes before the first token
            entries = [next(iter(position.values())) for position in scored if position]
            perplexity = math.exp(-sum(entry.logprob for entry in entries) / len(entries))
            worst = min(entries, key=lambda entry: entry.logprob)
            print(f"{output.prompt!r}: {perplexity:.1f}, least likely {worst.decoded_token!r}")


if __name__ == "__main__":
    main()
