"""Worker of `scripts.bench.checkouts`: it times loads of one checkout, one for each line it reads.

It runs as a file, with `jaxserve` of that checkout on the path, and imports no other package of
this one.
"""

from __future__ import annotations

import sys
import time

import numpy as np

# Of each load: requests, tokens of each prompt, tokens of each answer.
LOADS = {"one": (1, 4, 32), "eight": (8, 4, 24), "prompts": (4, 120, 1), "mixed": (12, 40, 8)}


def main() -> None:
    """Load a model, report that it is ready, and answer each name of a load with its seconds."""
    # Imported here: `checkouts` imports this file for the names of its loads alone.
    from jaxserve.settings.environment import prepare_process

    prepare_process()
    from jaxserve import LLM, SamplingParams

    model, folder, dtype = sys.argv[1:]
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=1024,
        skip_tokenizer_init=True,
        compilation_cache_dir=folder,
        decode_sizes=(1, 8),
        token_sizes=(64, 128),
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=200 << 20,
        enable_prefix_caching=False,
        wait_for_all_programs=True,
    )
    random = np.random.default_rng(0)

    def run(requests: int, prompt: int, answer: int) -> float:
        ids = random.integers(5, 250, (requests, prompt)).tolist()
        settings = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in ids], settings, use_tqdm=False)
        return time.perf_counter() - started

    for load in (*LOADS.values(), *LOADS.values()):
        run(*load)
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(*LOADS[line.strip()]), flush=True)


if __name__ == "__main__":
    main()
