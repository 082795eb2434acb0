"""A start in a process of its own, as users have it: no cache of JAX's, and programs behind.

    python -m tests.engine.start_process ACTION CHECKPOINT CACHE

Prints its findings as JSON. The actions are the keys of `ACTIONS`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.execution.buckets import Bucket
from jaxserve.start.programs import compiling_process
from jaxserve.start.programs.behind import ProgramsBehind
from jaxserve.start.programs.compiling_process import CompilingProcess
from jaxserve.start.programs.private_files import file_name

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
WORK = [
    ("a", SamplingParams(temperature=0, max_tokens=9, logprobs=2)),
    ("bc", SamplingParams(temperature=0.9, seed=1, max_tokens=12)),
    ("def", SamplingParams(temperature=0.8, top_p=0.7, seed=2, max_tokens=7, logprobs=1)),
    ("ghij" * 9, SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1)),
    ("k" * 30, SamplingParams(temperature=1.1, seed=3, max_tokens=6, presence_penalty=0.5)),
    ("lm", SamplingParams(temperature=0, max_tokens=8, logit_bias={"7": 2.0}, min_tokens=3)),
]


# Few programs, where how many there are is not the question.
FEW: dict[str, Any] = {"decode_sizes": (4,), "token_sizes": (16, 32)}


def start(checkpoint: str, cache: str, **settings: Any) -> LLM:
    return LLM(checkpoint, compilation_cache_dir=cache, **SIZES | settings)


def answers(llm: LLM) -> list[Any]:
    """Serve all prompts together and return tokens and exact log-probabilities."""
    prompts, settings = zip(*WORK, strict=True)
    outputs = llm.generate(list(prompts), list(settings), use_tqdm=False)
    return [
        [
            output.outputs[0].token_ids,
            repr(output.outputs[0].logprobs),
            repr(output.prompt_logprobs),
        ]
        for output in outputs
    ]


def behind_of(llm: LLM) -> ProgramsBehind:
    behind = llm._thread.engine.loaded.behind
    assert behind is not None
    return behind


def facts(llm: LLM) -> dict[str, Any]:
    stats, behind, runner = llm.stats(), behind_of(llm), llm._thread.engine.runner
    return {
        "waited": stats.num_compiles,
        "behind": stats.num_compiles_behind,
        "missing": stats.num_programs_missing,
        "most_steps": runner.max_steps,
        "buckets": len(runner.buckets),
        "has_early": any(
            isinstance(p, Bucket) and p.num_steps == 1 and p.decode_only for p in runner.programs()
        ),
        "error": behind.error,
    }


def held_back(checkpoint: str, cache: str) -> list[Any]:
    """Serve while a compilation is held back, then with all programs, then from files."""
    gate, compile_program = threading.Event(), CompilingProcess.compile

    def wait_and_compile(process: CompilingProcess, program: Any, meanwhile: Any) -> float:
        gate.wait()
        return compile_program(process, program, meanwhile)

    CompilingProcess.compile = wait_and_compile  # type: ignore[method-assign]
    found: list[Any] = []
    with start(checkpoint, cache) as llm:
        found += [answers(llm), facts(llm)]
        gate.set()
        while not behind_of(llm).wait(0.5):  # programs are put in their places under load
            found[0] = answers(llm) if found[0] == answers(llm) else ["differs"]
        for _ in range(3):  # each size is used, and there is time to read it
            for prompt, settings in WORK:
                llm.generate([prompt], [settings], use_tqdm=False)
            time.sleep(0.3)
        found += [answers(llm), facts(llm)]
    for settings in ({}, {"wait_for_all_programs": True}):
        with start(checkpoint, cache, **settings) as llm:
            if not settings:
                assert behind_of(llm).wait(300)
                found.append(facts(llm))
            found.append(answers(llm))
    return found


def used_alone(checkpoint: str, cache: str) -> list[Any]:
    """Serve one row at a time from files, of which that for two rows is damaged, then two."""

    def decodes() -> list[int]:
        there = llm._thread.engine.runner.programs()
        return sorted(p.num_rows for p in there if isinstance(p, Bucket) and p.decode_only)

    def serve_until(rows: int) -> list[int]:
        prompts = ["a"] * rows
        settings = SamplingParams(temperature=0, max_tokens=9)
        while rows not in decodes():
            llm.generate(prompts, settings, use_tqdm=False)
        return decodes()

    # Named, since sizes whose times are close are left out in some runs.
    sizes: dict[str, Any] = {"decode_sizes": (1, 2, 4), "token_sizes": (32,)}
    with start(checkpoint, cache, **sizes) as llm:
        assert behind_of(llm).wait(300)
    with start(checkpoint, cache, **sizes) as llm:
        stored = behind_of(llm)._stored
        store, name = stored.store, stored.plan.program_name(Bucket(2, 2, True, False, 16))
        assert store.folder is not None
        found = store._named_object(store.folder / file_name(name))
        assert found is not None
        damaged = store.folder.parent.parent / "objects" / found
        damaged.write_bytes(damaged.read_bytes()[:-1])
        return [decodes(), serve_until(1), serve_until(2), facts(llm)]


def killed_child(checkpoint: str, cache: str) -> list[Any]:
    """Kill the process that compiles."""
    with start(checkpoint, cache, **FEW) as llm:
        behind = behind_of(llm)
        while behind._process is None:
            time.sleep(0.01)
        os.kill(behind._process._process.pid, signal.SIGKILL)
        assert behind.wait(300)
        return [answers(llm), facts(llm)]


def full_disk(checkpoint: str, cache: str) -> list[Any]:
    """Start while no file may grow beyond 100 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    with start(checkpoint, cache, **FEW) as llm:
        assert behind_of(llm).wait(300)
        return [answers(llm), facts(llm)]


def closed_early(checkpoint: str, cache: str) -> list[Any]:
    """Close the engine while its first program behind is compiled."""
    with start(checkpoint, cache, **FEW) as llm:
        behind = behind_of(llm)
        while behind._process is None:
            time.sleep(0.01)
        process = behind._process._process
    return [process.poll() is not None, behind.num_missing]


def serve(checkpoint: str, cache: str) -> list[Any]:
    """Print the answers on a line of their own, and go on until all programs are compiled."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with start(checkpoint, cache, **FEW) as llm:
        found = answers(llm)
        print("serves", flush=True)
        assert behind_of(llm).wait(300)
        return [found, facts(llm)]


ACTIONS: dict[str, Callable[[str, str], list[Any]]] = {
    action.__name__: action
    for action in (held_back, used_alone, killed_child, full_disk, closed_early, serve)
}

if __name__ == "__main__":
    # A thread that runs only when no other process does would hardly begin beside the other tests.
    keep_priority = "import os\nos.nice = os.sched_setscheduler = lambda *_: None\n"
    compiling_process._CODE = keep_priority + compiling_process._CODE
    print(json.dumps(ACTIONS[sys.argv[1]](*sys.argv[2:])))
