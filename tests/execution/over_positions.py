"""An engine whose devices divide the positions of a sequence, in a process with 8 of them on CPU.

    python -m tests.execution.over_positions            the run of ./scripts/test
    python -m tests.execution.over_positions --long     more divisions

Prints its findings as a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.execution.mesh import local_bytes
from jaxserve.execution.state import memory_kinds
from jaxserve.models.shards import Split
from jaxserve.request import SamplingParams
from scripts.lib.placed_model import start_runner
from tests.equivalence import (
    EXPERTS,
    LARGEST,
    Bench,
    divided_model,
    fields_of_case,
    run_schedule,
    with_sizes,
)
from tests.execution.over_devices import counts_of
from tests.support.quick_code import compile_quickly

PAGE = 4


def fields_of(split: Split) -> dict[str, Any]:
    """Return a model with a layer of experts, each of whose kv heads lies on `context` devices."""
    return with_sizes(EXPERTS, {"num_key_value_heads": split.devices // split.context})


def schedules_of(
    devices: int, context: int, count: int, case: str = ""
) -> tuple[Bench, dict[str, int]]:
    """Run random schedules of an engine, of the model of a case if one is named."""
    split = Split(devices, context=context)
    fields = fields_of_case(case) if case else fields_of(split)
    bench = Bench(fields, (PAGE,), split=split, sizes=LARGEST)
    return bench, dict(sum(map(partial(run_schedule, bench), range(count)), Counter()))


def long_request(bench: Bench) -> dict[str, Any]:
    """Answer a request that is too long for an undivided cache of as many bytes.

    Returns:
        the pages of the divided and of the undivided cache, and the tokens from this and from a
        large cache.
    """
    loaded = bench.loaded[PAGE]
    split = loaded.runner.model_config.split
    model_config, model = divided_model(fields_of(split), split, "float64")
    undivided = replace(model_config, split=replace(split, context=1))
    whole = memory_kinds(undivided, PAGE, np.float64, 1)[0].bytes_per_unit
    budget: dict[str, Any] = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 8 * whole}
    sizes: dict[str, Any] = {"decode_sizes": (2,), "token_sizes": (8,), "num_scheduler_steps": 1}
    sizes |= {"max_num_seqs": 2, "max_num_batched_tokens": 8}
    config = replace(loaded.config, **budget, **sizes)
    runner = start_runner(config, model_config, model)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers: list[list[int]] = []
    for engine in (Engine(replace(loaded, config=config, runner=runner)), Engine(loaded)):
        answers.append([])
        prompt = [5 + 7 * i % 20 for i in range(44)]
        request = engine.requests.make(prompt, params, request_id="0")
        engine.add(request, lambda delta, got=answers[-1]: got.extend(delta.token_ids))
        while engine.has_work:
            engine.step()
    pages = {"pages": runner.num_pages, "undivided pages": 8}
    return pages | {"tokens": answers[0], "in a large cache": answers[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    compile_quickly()
    bench, schedules = schedules_of(4, 2, 4)
    runner = bench.loaded[PAGE].runner
    state: Any = runner._state
    found: dict[str, Any] = {
        "schedules": schedules,
        "programs": counts_of(runner),
        "page bytes": runner.memory[0].bytes_per_unit,
        "held bytes": sum(map(local_bytes, jax.tree.leaves(state.kv))) // runner.num_pages,
    }
    found["long request"] = long_request(bench)
    bench, found["schedules of latents"] = schedules_of(2, 2, 3, "deepseek_v3_groups")
    runner = bench.loaded[PAGE].runner
    state = runner._state
    held = sum(map(local_bytes, jax.tree.leaves(state.kv))) // runner.num_pages
    found["bytes of latents"] = {"planned": runner.memory[0].bytes_per_unit, "held": held}
    if arguments.long:
        for devices, context in ((2, 2), (4, 4)):
            found[f"schedules, {devices} and {context}"] = schedules_of(devices, context, 20)[1]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
