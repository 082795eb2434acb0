"""Scores of answers by Transformers in float64: judge.py MODEL THREADS < answers > verdicts.

In: a list of {"prompt": ids, "tokens": ids}. Out, for each: the logit gaps of its tokens, which is
the best logit at that position less that of the token that was drawn, given the answer's own
earlier tokens. Greedy answers without rounding have gaps of 0.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers


def gaps(network: torch.nn.Module, prompt: list[int], tokens: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = network(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    drawn = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (logits.max(1).values - drawn).tolist()


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    network = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64)
    network.eval()
    answers = json.load(sys.stdin)
    json.dump([gaps(network, answer["prompt"], answer["tokens"]) for answer in answers], sys.stdout)


if __name__ == "__main__":
    main()
