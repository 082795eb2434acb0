"""One stream's tokens a second: one decode step a launch against as many as nobody notices."""

from __future__ import annotations

import argparse
import statistics
import time

from argument_types import check_room, checkpoint, positive_integer
from jaxserve import LLM, SamplingParams
from serving_process import run_main

PROMPT, MOST_PROMPT = "Once upon", 9  # no more tokens than letters
KINDS = {"one step a launch": 1, "as many as nobody notices": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=checkpoint, help="checkpoint (default: the bundled model)")
    parser.add_argument("--tokens", type=positive_integer, default=600)
    parser.add_argument("--repeats", type=positive_integer, default=5)
    arguments = parser.parse_args()
    check_room(parser, arguments.model, MOST_PROMPT, arguments.tokens)
    engines = {
        name: LLM(arguments.model, max_num_seqs=8, num_scheduler_steps=steps)
        for name, steps in KINDS.items()
    }
    sampling = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, temperature=0)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    answers = set()
    for _ in range(arguments.repeats):
        for name, llm in engines.items():
            started = time.perf_counter()
            [output] = llm.generate(PROMPT, sampling, use_tqdm=False)
            speeds[name].append(arguments.tokens / (time.perf_counter() - started))
            answers.add(tuple(output.outputs[0].token_ids))
    assert len(answers) == 1, "the answers differ"
    for name, llm in engines.items():
        llm.close()
        least, middle, most = min(speeds[name]), statistics.median(speeds[name]), max(speeds[name])
        print(f"{name:<28} {middle:8.0f} tokens/s ({least:.0f} to {most:.0f})")
    one, many = (statistics.median(found) for found in speeds.values())
    print(f"{many / one:.2f} times as fast (gate 2)")
    return 0


if __name__ == "__main__":
    run_main(main)
