"""Process that starts one engine, serves greedy requests, and prints the results as JSON.

It reads an object: `settings` of `EngineConfig`, `prompts` of token ids, `outputs`, the tokens of
each, `rounds` that it serves them, and `logprobs`, 2 to compare the two most likely tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from jaxserve.settings.environment import prepare_process


def read_stages(engine: Any, begun: float, imported: float, ready: float) -> dict[str, float]:
    stages = engine.loaded.start.stages
    rest = ready - imported - sum(stages.values())
    named = {"imports": imported - begun, **stages, "rest": rest, "ready": ready - begun}
    return {name: round(seconds, 2) for name, seconds in named.items()}


def gap(likely: dict[int, Any]) -> float:
    """Return how far apart the log-probabilities of the two most likely tokens are."""
    first, second = sorted((entry.logprob for entry in likely.values()), reverse=True)[:2]
    return round(first - second, 6)


def serve(given: dict[str, Any], begun: float) -> dict[str, Any]:
    """Start the engine and serve. Return tokens, rates and stages of the start."""
    prepare_process()
    # Imported here: the time that it takes is part of the start.
    import jax

    from jaxserve import LLM, SamplingParams
    from scripts.lib.host_clock import HostClock

    imported = time.time()
    settings = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given["settings"].items()
    }
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=given.get("logprobs")
        )
        for count in given["outputs"]
    ]
    with LLM(skip_tokenizer_init=True, wait_for_all_programs=True, **settings) as llm:
        ready = time.time()
        engine = llm._thread.engine
        compiles, rates, done = engine.runner.num_compiles, [], []
        for _ in range(given["rounds"]):
            started = time.perf_counter()
            done = llm.generate(given["prompts"], params, use_tqdm=False)
            seconds = time.perf_counter() - started
            rates.append(sum(len(d.outputs[0].token_ids) for d in done) / seconds)
        clock = HostClock(engine)
        started = time.perf_counter()
        [alone] = llm.generate(given["prompts"][:1], params[:1], use_tqdm=False)
        alone_rate = len(alone.outputs[0].token_ids) / (time.perf_counter() - started)
        clock.restore()
        answers = [output.outputs[0] for output in done]
        found = {
            "start": read_stages(engine, begun, imported, ready),
            "buckets": str(engine.loaded.start),
            "compiles": compiles,
            "compiles_after_ready": engine.runner.num_compiles - compiles,
            "rates": rates,
            "alone": alone_rate,
            "alone_us": {
                name: [len(spent), round(1e6 * statistics.median(spent))]
                for name, spent in clock.spent.items()
                if spent
            },
            "tokens": [answer.token_ids for answer in answers],
            "device": jax.devices()[0].device_kind,
        }
        if given.get("logprobs"):
            found["gaps"] = [[gap(likely) for likely in a.logprobs or ()] for a in answers]
    return found


if __name__ == "__main__":
    BEGUN = time.time()
    print(json.dumps(serve(json.load(sys.stdin), BEGUN)))
