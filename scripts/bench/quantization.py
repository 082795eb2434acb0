"""Costs and gains of quantization: bits, bytes, perplexity, accuracy, speed.

    python -m scripts.bench.quantization [--part quality] [--part speed] [--part experts]
        [--examples 20]

Quality is that of the bundled model on held-out examples of its tasks: perplexity of the answers'
tokens after their prompts, and the share that greedy decoding gets right. Speed is that of decode
steps of a random Llama of 4 layers, 768 wide, in float32, at 1 and 16 rows with 64 cached tokens
each, all modes taking turns. Its ratio is to unquantized weights. The part "experts" does the same
with a mixture of 32 experts of which a token takes 4, in 2 layers. Embedding and output projection
are not quantized, in any model. Bits are of the quantized matrices as a GPU stores them. Writes
quantization.json and .md in scripts/results. A part that is not run keeps the numbers of an earlier
run.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import jax
import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.models import Decoder, parse_model_config, read_model_config
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.settings.config import EngineConfig, bundled_model
from jaxserve.start.loaded import Loaded
from jaxserve.weights import load_weights
from scripts.bench import offline as bench_offline
from scripts.bench.random_engine import load_random
from scripts.demo_model import tasks as demo_tasks
from scripts.lib.argument_types import at_most, script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main

CONTEXT = 64
ROWS = (1, 16)
REPEATS = 15
# Of bench_offline.py's wide model, so that the blocks are most of it: 28M weights in them.
SMALLER = {"num_hidden_layers": 4, "vocab_size": 4096}
MIXTURE = SMALLER | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
MOST_EXAMPLES = 10_000


@dataclass(frozen=True)
class Mode:
    """Row of the table."""

    quantization: Literal["int8", "fp8", "int4"] | None
    kv_cache_dtype: Literal["auto", "fp8"]

    @property
    def name(self) -> str:
        return f"{self.quantization or 'float32'}, cache {self.kv_cache_dtype}"


MODES = [
    Mode(None, "auto"),
    Mode("int8", "auto"),
    Mode("fp8", "auto"),
    Mode("int4", "auto"),
    Mode(None, "fp8"),
    Mode("int4", "fp8"),
]


def examples(count: int) -> list[demo_tasks.Task]:
    """Draw held-out questions, `count` of each task."""
    return [
        task
        for name in demo_tasks.TASKS
        for task in islice(
            demo_tasks.stream(name, random.Random(f"quantization {name}"), "held_out", (1, 40)),
            count,
        )
    ]


def quality(mode: Mode, tasks: list[demo_tasks.Task]) -> dict[str, Any]:
    """Measure the bundled model: bytes, perplexity of the right answers and their share.

    An answer is what greedy decoding gives if and only if each of its tokens, and the end after
    them, is the most likely one after the earlier tokens: scores of the right answers suffice.
    """
    form = mode.quantization
    cache: dict[str, Any] = {"kv_cache_dtype": mode.kv_cache_dtype, "enable_prefix_caching": False}
    losses, right = [], []
    with LLM(quantization=form, max_num_seqs=16, wait_for_all_programs=True, **cache) as llm:
        tokenizer, runner = llm.get_tokenizer(), llm._thread.engine.runner
        questions = [
            tokenizer.render_chat([{"role": "user", "content": task.prompt}]) for task in tasks
        ]
        answers = [[*tokenizer.encode_word(t.answer), tokenizer.eos_token_id] for t in tasks]
        prompts = [{"prompt_token_ids": q + a} for q, a in zip(questions, answers, strict=True)]
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        for output, question in zip(outputs, questions, strict=True):
            scores = [next(iter(e.values())) for e in output.prompt_logprobs[len(question) :]]
            losses += [-score.logprob for score in scores]
            right.append(all(score.rank == 1 for score in scores))
        pages = sum(page.nbytes for pair in runner._state.kv for page in pair)
        weight_bytes, num_pages = runner.weight_bytes, runner.num_pages
        page_size = llm._thread.engine.config.block_size
    directory = bundled_model()
    config = read_model_config(directory)
    model = load_weights(directory, config, np.float32, quantization=form)
    return {
        "mode": mode.name,
        "bits_a_weight": bits_a_weight(model),
        "weight_bytes": weight_bytes,
        "kv_bytes_a_token": pages // num_pages // page_size,
        "perplexity": math.exp(statistics.fmean(losses)),
        "accuracy": statistics.fmean(right),
        "examples": len(right),
        "answer_tokens": len(losses),
    }


def bits_a_weight(model: Decoder) -> float:
    """Count bits a weight of the blocks' matrices, scales and zero points included."""
    matrices = [
        matrix[...]
        for layer in model.layers
        for matrix in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    ]
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(matrices))
    count = sum(
        matrix.inputs * math.prod(matrix.outputs)
        if isinstance(matrix, PlacedWeight)
        else matrix.size
        for matrix in matrices
    )
    return 8 * stored / count


def bench_model(mode: Mode, change: dict[str, Any]) -> Loaded:
    """Make a random model for speed, compiled."""
    shape = bench_offline.COMMON | bench_offline.SHAPES["wide"] | change
    model_config = parse_model_config(shape)
    config = EngineConfig(
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=max(ROWS),
        max_model_len=1024,
        num_scheduler_steps=1,
        kv_cache_dtype=mode.kv_cache_dtype,
        decode_sizes=ROWS,
        token_sizes=(max(ROWS),),
    )
    # Greedy decode steps are timed: the sampler is the same in every mode.
    weights: dict[str, Any] = {"quantization": mode.quantization, "panels": True}
    loaded = load_random(config, model_config, greedy_decode=True, **weights)
    print(f"  {mode.name} is compiled", file=sys.stderr, flush=True)
    return loaded


def speed(modes: list[Mode], change: dict[str, Any], name_of: str) -> list[dict[str, Any]]:
    """Measure milliseconds of a decode step for each mode and number of rows, and their ratios.

    Args:
        modes: the others are compared with the first.
        change: fields in which the model differs from bench_offline.py's wide one.
        name_of: prefix of "weight_bytes", "step_ms" and "speed" in the returned keys.
    """
    models = {mode.name: bench_model(mode, change) for mode in modes}
    found: list[dict[str, Any]] = [
        {"mode": name, f"{name_of}_weight_bytes": loaded.runner.weight_bytes}
        for name, loaded in models.items()
    ]
    for rows in ROWS:
        plans = {
            name: bench_offline._decode_batch(loaded, rows, CONTEXT)
            for name, loaded in models.items()
        }
        times: dict[str, list[float]] = {name: [] for name in models}
        for repeat in range(REPEATS + 2):
            for name, loaded in models.items():
                slots, plan = plans[name]
                started = time.perf_counter()
                loaded.runner.read(loaded.runner.submit(plan, slots))
                if repeat >= 2:
                    times[name].append(time.perf_counter() - started)
        base = statistics.median(times[modes[0].name])
        for row in found:
            seconds = statistics.median(times[row["mode"]])
            row[f"{name_of}_step_ms_{rows}"] = seconds * 1e3
            row[f"{name_of}_speed_{rows}"] = base / seconds
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Quantization",
        "",
        "`python -m scripts.bench.quantization`; two shared CPU cores. Quality: the bundled model",
        "on held-out examples. Speed: decode steps of a random Llama of 4 layers, 768 wide, over",
        "those in float32; of experts, of a random mixture of 2 layers.",
        "",
        "| mode | bits a weight | bytes, bundled | bytes, random | KV bytes a token, bundled "
        "| perplexity | accuracy | speed, 1 row | speed, 16 rows | bytes, experts | 1 row "
        "| 16 rows |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    columns = (
        ("bits_a_weight", ".2f"), ("weight_bytes", ",d"), ("bench_weight_bytes", ",d"),
        ("kv_bytes_a_token", ",d"), ("perplexity", ".4f"), ("accuracy", ".1%"),
        ("bench_speed_1", ".2f"), ("bench_speed_16", ".2f"), ("experts_weight_bytes", ",d"),
        ("experts_speed_1", ".2f"), ("experts_speed_16", ".2f"),
    )  # fmt: skip
    for row in rows:
        cells = [format(row[key], form) if key in row else "-" for key, form in columns]
        lines.append(f"| {row['mode']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = script_parser("scripts.bench.quantization", __doc__)
    parser.add_argument("--part", action="append", choices=("quality", "speed", "experts"))
    parser.add_argument("--examples", type=at_most(MOST_EXAMPLES), default=20, help="of each task")
    arguments = parser.parse_args()
    parts = arguments.part or ["quality", "speed", "experts"]
    path = RESULTS / "quantization.json"
    rows = {row["mode"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    rows = {mode.name: rows.get(mode.name, {"mode": mode.name}) for mode in MODES}
    tasks = examples(arguments.examples)
    for mode in MODES if "quality" in parts else ():
        rows[mode.name] |= quality(mode, tasks)
        print(rows[mode.name], file=sys.stderr, flush=True)
    for row in speed(MODES, SMALLER, "bench") if "speed" in parts else ():
        rows[row["mode"]] |= row
    for row in speed(MODES[:4], MIXTURE, "experts") if "experts" in parts else ():
        rows[row["mode"]] |= row
    path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    text = table(list(rows.values()))
    path.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    run_main(main)
