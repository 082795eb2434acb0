"""Scores of answers: the log-probability of each token, and the perplexity of the whole."""

import math

from jaxserve import LLM, SamplingParams

QUESTION = "<|im_start|>user\nReverse: s-t-o-n-e<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = ["e-n-o-t-s", "e-n-o-s-t"]


def main() -> None:
    """Print the perplexity of each answer and its least likely token."""
    # One token must be drawn. The prompt's tokens are scored on the way.
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM() as llm:
        start = len(llm.get_tokenizer().encode(QUESTION))
        prompts = [QUESTION + answer for answer in ANSWERS]
        for answer, output in zip(
            ANSWERS, llm.generate(prompts, sampling, use_tqdm=False), strict=True
        ):
            scored = (output.prompt_logprobs or [])[start:]
            entries = [next(iter(position.values())) for position in scored if position]
            perplexity = math.exp(-sum(entry.logprob for entry in entries) / len(entries))
            worst = min(entries, key=lambda entry: entry.logprob)
            print(f"{answer!r}: {perplexity:.1f}, least likely {worst.decoded_token!r}")


if __name__ == "__main__":
    main()
