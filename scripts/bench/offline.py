"""Continuous against static batching on one engine, and the step against its matrix products.

    python -m scripts.bench.offline --json scripts/results/bench_offline.json
    python -m scripts.bench.offline --part launches      one stream of the bundled model
    python -m scripts.bench.offline --part rollouts --model FILE     what log-probabilities cost

One process, one set of weights, one set of compiled programs: only the schedule differs. The
work is the first rows of the Azure conv trace with lengths divided by 8, all queued at the start,
greedy, end-of-sequence ignored, no prefix cache. Schedules take turns, `--repeats` times. Ratios
are of the medians. S0 pads prompts to the longest of their batch and runs every row until the
longest ends. S1 does not pad, and leaves slots empty until the batch has ended.

Two parts run only where they are named. "launches": one stream's tokens a second, one decode step a
launch against as many as go unnoticed. "rollouts": launches and tokens a second of `LLM.rollout`,
over the same requests without log-probabilities, delivered as arrays too and as `LLM.generate`
delivers them. They take turns in random order, and ratios are of the runs of a turn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import LLM
from jaxserve.commands.argument_types import positive_integer, some_of
from jaxserve.engine.batch import StartedRequests
from jaxserve.engine.engine import Engine, make_scheduler
from jaxserve.models import ModelConfig, parse_model_config
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from pallas_kernels.cpu.product import panel_product
from scripts.bench.random_engine import load_random
from scripts.lib.argument_types import at_most, bench_parser, check_room, checkpoint
from scripts.lib.model_shapes import COMMON, SHAPES
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep
from scripts.lib.static_scheduler import static
from scripts.lib.trace_rows import read_trace

PARTS = ("step", "schedules", "launches", "rollouts")
SCALE = 8
STEP_GATE = 1.3
ROLLOUT_GATE = 0.97
GAIN_GATES = {16: 2.4, 32: 3.1}
PROMPT, MOST_PROMPT = "Once upon", 9  # no more tokens than letters
LAUNCHES = {"one step a launch": 1, "as many as nobody notices": None}


def load_135m(shape: str, batch: int, tokens: int) -> Loaded:
    """Load random weights. Compile for 1 row to twice `batch`, which padding may need."""
    model_config = parse_model_config(COMMON | SHAPES[shape])
    config = EngineConfig(
        max_num_seqs=2 * batch,
        max_num_batched_tokens=tokens,
        max_model_len=1024,
        enable_prefix_caching=False,
        decode_sizes=tuple(sorted({1, max(1, batch // 4), max(1, batch // 2), batch, 2 * batch})),
    )

    def tell(stage: str, done: int, total: int) -> None:
        print(f"  {stage} {done}/{total}", file=sys.stderr)

    return load_random(config, model_config, on_progress=tell, panels=True)


def schedulers(batch: int) -> dict[str, Callable[..., Scheduler]]:
    def continuous(config: EngineConfig, pool: Any, slots: SlotTable) -> Scheduler:
        scheduler = make_scheduler(config, pool, slots)
        scheduler.max_running = batch
        return scheduler

    return {"continuous": continuous, "S1": static(batch, False), "S0": static(batch, True)}


def serve_all(loaded: Loaded, make: Callable[..., Scheduler], rows: list[Any]) -> dict[str, Any]:
    """Serve the workload with one schedule. Return counts, seconds and rows of every step."""
    engine = Engine(loaded, scheduler=make)
    rng = np.random.default_rng(0)
    digest: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        prompt = rng.integers(0, loaded.limits.vocab_size, max(1, row.input_tokens // SCALE))
        params = SamplingParams(
            temperature=0, max_tokens=max(1, row.output_tokens // SCALE), ignore_eos=True
        )
        tokens = digest.setdefault(str(number), [])
        request = engine.requests.make(prompt, params, request_id=str(number))
        engine.add(request, lambda delta, tokens=tokens: tokens.extend(delta.token_ids))
    busy, started, cpu = [], time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
        busy.append(engine.scheduler.num_running)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    stats = engine.stats()
    assert stats.pages_in_use == 0 and stats.num_compiles == 0
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "steps": stats.num_steps,
        "output_tokens": stats.generation_tokens,
        "output_tokens_per_second": stats.generation_tokens / seconds,
        "output_tokens_per_cpu_second": stats.generation_tokens / cpu,
        "busy": busy,
        "digest": digest,
    }


def compare_schedules(loaded: Loaded, batch: int, rows: list[Any], repeats: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for name, make in schedulers(batch).items():
            run = serve_all(loaded, make, rows)
            runs.setdefault(name, []).append(run)
            speed, steps = run["output_tokens_per_second"], run["steps"]
            print(f"  run {repeat + 1} {name:<11} {speed:8.1f} tok/s {steps:6d} steps", flush=True)
    first = runs["continuous"][0]["digest"]
    same = np.mean([run[0]["digest"][n] == first[n] for run in runs.values() for n in first])
    table = {name: _summary(results) for name, results in runs.items()}
    for name in ("S0", "S1"):
        table[name]["gain_of_continuous"] = (
            table["continuous"]["output_tokens_per_second"]
            / table[name]["output_tokens_per_second"]
        )
        table[name]["gain_in_cpu_seconds"] = (
            table["continuous"]["output_tokens_per_cpu_second"]
            / table[name]["output_tokens_per_cpu_second"]
        )
    return {
        "batch": batch,
        "requests": len(rows),
        "equal_answers": float(same),
        "schedules": table,
        "busy": {name: results[0]["busy"] for name, results in runs.items()},
    }


def _summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    names = ("seconds", "cpu_seconds", "output_tokens_per_second", "output_tokens_per_cpu_second")
    summary = {name: statistics.median(run[name] for run in runs) for name in names}
    speeds = [run["output_tokens_per_second"] for run in runs]
    spread = (max(speeds) - min(speeds)) / statistics.median(speeds)
    return summary | {"spread": spread, "steps": runs[0]["steps"]}


def step_over_products(loaded: Loaded, batch: int, context: int, repeats: int) -> dict[str, float]:
    """Time a decode step against its matrix products alone, in turns.

    `weights` multiplies by every weight matrix as the step does, `xla_weights` by the same ones in
    the plain order with XLA's product. `attention` is queries by keys and weights by values for the
    same number of cached tokens, on operands that lie contiguous in memory.
    """
    runner = loaded.runner
    panels = [leaf for leaf in runner._leaves if leaf.ndim == 3]
    plain = [jnp.asarray(_plain(np.asarray(leaf))) for leaf in panels]
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.standard_normal((batch, len(w)), np.float32)) for w in plain]

    @jax.jit
    def multiply(xs: list[jax.Array], ws: list[jax.Array]) -> list[jax.Array]:
        return [panel_product(x, w, "float32") for x, w in zip(xs, ws, strict=True)]

    dots = jax.jit(lambda xs, ws: [x @ w for x, w in zip(xs, ws, strict=True)])
    slots, plan = _decode_batch(loaded, batch, context)
    attend = _attention_products(runner.model_config, int((plan.starts + 1).sum()))
    work: dict[str, Callable[[], object]] = {
        "step": lambda: runner.read(runner.submit(plan, slots)),
        "weights": lambda: jax.block_until_ready(multiply(inputs, panels)),
        "xla_weights": lambda: jax.block_until_ready(dots(inputs, plain)),
        "attention": lambda: jax.block_until_ready(attend()),
    }
    wall: dict[str, list[float]] = {name: [] for name in work}
    cpu: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 3):
        for name, run in work.items():
            started, used = time.perf_counter(), time.process_time()
            run()
            if repeat >= 3:
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - used)
    middle = {name: statistics.median(times) for name, times in wall.items()}
    return {
        "batch": batch,
        "context": context,
        **{f"{name}_ms": seconds * 1e3 for name, seconds in middle.items()},
        "over_all_products": middle["step"] / (middle["weights"] + middle["attention"]),
        "over_weights": middle["step"] / middle["weights"],
        "over_xla_weights": middle["step"] / middle["xla_weights"],
        "over_weights_cpu": sum(cpu["step"]) / sum(cpu["weights"]),
    }


def _attention_products(config: ModelConfig, tokens: int) -> Callable[[], Any]:
    """Make both products of every layer's attention over `tokens` tokens, in chunks of 64."""
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads // kv_heads
    rng = np.random.default_rng(2)
    shape = (max(1, round(tokens / 64)), kv_heads, 64, head_dim)
    cache = [
        [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in "kv"]
        for _ in range(config.num_hidden_layers)
    ]
    asked = jnp.ones((shape[0], kv_heads, queries, head_dim))

    @jax.jit
    def attend(q: jax.Array, cache: list[list[jax.Array]]) -> jax.Array:
        for k, v in cache:
            q = jnp.einsum("wkgc,wkch->wkgh", jnp.einsum("wkgh,wkch->wkgc", q, k), v)
        return q

    return lambda: attend(asked, cache)


def _plain(panels: np.ndarray) -> np.ndarray:
    """Unpack a weight in panels into [inputs, outputs]."""
    return np.ascontiguousarray(panels.transpose(1, 0, 2)).reshape(panels.shape[1], -1)


def _decode_batch(loaded: Loaded, batch: int, context: int) -> tuple[SlotTable, LaunchPlan]:
    """Lay out rows with about `context` cached tokens each, on scattered pages."""
    config = loaded.config
    assert config.max_num_seqs and config.max_model_len
    slots = SlotTable(config.max_num_seqs, config.max_model_len, config.block_size)
    rng = np.random.default_rng(1)
    lengths = np.full(batch, context, np.int32)
    if batch > 1:
        lengths = np.clip(rng.gamma(2, context / 2, batch), 8, 1000).astype(np.int32)
    pages = rng.permutation(loaded.runner.num_pages - 1) + 1
    for slot, length in enumerate(lengths):
        count = -(-int(length + 1) // config.block_size)
        slots.put_pages(slot, 0, 0, pages[:count])
        pages = pages[count:]
    slots.num_known[:batch] = lengths + 1
    return slots, LaunchPlan(
        slots=np.arange(batch, dtype=np.int32),
        starts=lengths,
        num_tokens=np.ones(batch, np.int32),
        samples=np.ones(batch, bool),
        generations=np.ones(batch, np.int64),
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot the rows at work in every step, for each schedule, over the same time axis."""
    # Imported here: only plots need it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batch, schedules = result["batch"], result["schedules"]
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 6), sharex=True, constrained_layout=True)
    for axis, (name, color) in zip(
        axes, {"continuous": "#2a78d6", "S1": "#1baf7a", "S0": "#eb6834"}.items(), strict=True
    ):
        busy = np.array(result["busy"][name])
        when = np.linspace(0, schedules[name]["seconds"], len(busy))
        axis.fill_between(when, busy, step="post", color=color, linewidth=0)
        speed = schedules[name]["output_tokens_per_second"]
        axis.set_title(f"{name}: {speed:.0f} output tokens/s", loc="left", fontsize=10)
        axis.set_ylim(0, batch)
        axis.set_ylabel("rows at work")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        f"seconds; the same {result['requests']} requests (Azure conv trace, lengths / {SCALE}), "
        f"{batch} rows, random Llama of the 135M class, CPU"
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def compare_launches(model: str | None, tokens: int, repeats: int) -> None:
    """Time one stream with each of `LAUNCHES`, in turn, and print its tokens a second.

    Args:
        model: checkpoint. None means the bundled one.
    """
    engines = {
        name: LLM(model, max_num_seqs=8, num_scheduler_steps=steps, wait_for_all_programs=True)
        for name, steps in LAUNCHES.items()
    }
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    answers = set()
    for _ in range(repeats):
        for name, llm in engines.items():
            started = time.perf_counter()
            [output] = llm.generate(PROMPT, sampling, use_tqdm=False)
            speeds[name].append(tokens / (time.perf_counter() - started))
            answers.add(tuple(output.outputs[0].token_ids))
    assert len(answers) == 1, "the answers differ"
    for name, llm in engines.items():
        llm.close()
        least, middle, most = min(speeds[name]), statistics.median(speeds[name]), max(speeds[name])
        print(f"{name:<28} {middle:8.0f} tokens/s ({least:.0f} to {most:.0f})")
    single, many = (statistics.median(found) for found in speeds.values())
    print(f"{many / single:.2f} times as fast (gate 2)")


def compare_rollouts(model: str | None, rows: int, tokens: int, repeats: int) -> None:
    """Time rollouts of one prompt, and the same completions without log-probabilities.

    Args:
        model: checkpoint. None means the bundled one.
        rows: completions.
        tokens: tokens of each completion.
    """
    sampling = SamplingParams(n=rows, max_tokens=tokens, ignore_eos=True, seed=0, detokenize=False)
    seconds: dict[str, list[float]] = {}
    with LLM(model, max_num_seqs=rows, wait_for_all_programs=True) as llm:

        def run_arrays() -> None:
            requests, _ = llm._requests_of(PROMPT, sampling)
            StartedRequests(llm._thread, requests, True).take_all(lambda _: None, False)

        runs: dict[str, Callable[[], object]] = {
            "rollout": lambda: llm.rollout(PROMPT, sampling),
            "arrays without log-probabilities": run_arrays,
            "generate without them": lambda: llm.generate(PROMPT, sampling, use_tqdm=False),
        }
        launches = dict.fromkeys(runs, 0)
        for turn in range(repeats + 1):
            for name in random.sample(list(runs), len(runs)):
                before, started = llm.stats().num_steps, time.perf_counter()
                runs[name]()
                if turn:  # the first turn compiles nothing, but reads the weights
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                    launches[name] += llm.stats().num_steps - before
    for name, found in seconds.items():
        ratios = [mine / other for mine, other in zip(seconds["rollout"], found, strict=True)]
        print(
            f"{name:<34} {rows * tokens / statistics.median(found):8.0f} tokens/s  "
            f"{launches[name] / repeats:6.1f} launches  rollout / this "
            f"{1 / statistics.median(ratios):.3f} ({1 / max(ratios):.3f} to {1 / min(ratios):.3f})"
        )
    print(f"gate: {ROLLOUT_GATE} of the throughput of arrays without log-probabilities")


def main() -> int:
    parser = bench_parser("scripts.bench.offline", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--batch", type=at_most(1024), default=16)
    parser.add_argument("--requests", type=positive_integer, default=512)
    parser.add_argument(
        "--repeats", type=positive_integer, help="turns of each (default: 3; of launches, 5)"
    )
    parser.add_argument(
        "--tokens", type=positive_integer, default=256, help="token budget of a step"
    )
    parser.add_argument("--parts", "--part", type=some_of(PARTS), default="step,schedules")
    launches = parser.add_argument_group("launches and rollouts")
    launches.add_argument("--model", type=checkpoint, help="(default: the bundled model)")
    launches.add_argument("--output-tokens", type=positive_integer, default=600)
    arguments = parser.parse_args()
    if arguments.tokens < 2 * arguments.batch:
        parser.error(
            f"--tokens {arguments.tokens}: must be at least {2 * arguments.batch}, twice --batch, "
            "which padding may need"
        )
    if "launches" in arguments.parts:
        length = arguments.output_tokens
        check_room(parser, arguments.model, MOST_PROMPT, length, "--output-tokens")
        compare_launches(arguments.model, length, arguments.repeats or 5)
    if "rollouts" in arguments.parts:
        length = min(arguments.output_tokens, 256)
        check_room(parser, arguments.model, MOST_PROMPT, length, "--output-tokens")
        compare_rollouts(arguments.model, arguments.batch, length, arguments.repeats or 5)
    if not set(arguments.parts) <= {"launches", "rollouts"}:
        measure(arguments)
    return 0


def measure(arguments: argparse.Namespace) -> None:
    """Measure and print the parts "step" and "schedules", and write their results."""
    rows = read_trace(arguments.requests)
    about = about_run() | {"jax": jax.__version__, "model": COMMON | SHAPES[arguments.shape]}
    loaded = load_135m(arguments.shape, arguments.batch, arguments.tokens)
    assert loaded.start is not None
    about["start_seconds"] = loaded.start.stages
    if "step" in arguments.parts:
        mean = int(np.mean([row.input_tokens + row.output_tokens / 2 for row in rows]) / SCALE)
        steps = [step_over_products(loaded, b, mean, 40) for b in (1, arguments.batch)]
        if arguments.json:
            keep(arguments.json, {"step": steps}, about)
        for step in steps:
            print(
                f"step / its matrix products at B={step['batch']}: {step['over_all_products']:.2f} "
                f"(gate {STEP_GATE}); over the weights' products alone {step['over_weights']:.2f} "
                f"(CPU time {step['over_weights_cpu']:.2f}), by XLA {step['over_xla_weights']:.2f}"
                f"; context {step['context']}"
            )
    if "schedules" in arguments.parts:
        result = compare_schedules(loaded, arguments.batch, rows, arguments.repeats or 3)
        gate = GAIN_GATES.get(arguments.batch)
        for name in ("S1", "S0"):
            schedule = result["schedules"][name]
            print(
                f"continuous over {name} at B={arguments.batch}: "
                f"{schedule['gain_of_continuous']:.2f}"
                + (f" (gate {gate})" if name == "S0" and gate else "")
                + f"; in CPU time {schedule['gain_in_cpu_seconds']:.2f}"
            )
        if arguments.json:
            plot(result, arguments.json.with_suffix(".png"))
            kept = {name: value for name, value in result.items() if name != "busy"}
            keep(arguments.json, {"schedules": kept}, about)


if __name__ == "__main__":
    run_main(main)
